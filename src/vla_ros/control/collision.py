"""Decides whether commands may be sent: no body comes too near another one, until the arms can stop.

The motion that is checked leads from the measured positions to the commanded ones, goes on until a velocity
expires, and ends where every joint has stopped with ``collision.deceleration``. If an arm is not where it was last
commanded to be, two more are: from the last command, and from where the arm is by as much as the command moves.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vla_ros.collision.checker import Checker, Clearance, Margins
from vla_ros.collision.geometry import Body
from vla_ros.collision.pairs import sampled_pairs
from vla_ros.collision.world import World, make_world, read_srdf, with_bodies, without
from vla_ros.config import Config
from vla_ros.control.command import Command, lifetime
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, IntArray, JointState

_HALF = 0.5  # opening below which a gripper is closed
_DAMPINGS = np.geomspace(1e-3, 2e-2, 7)  # of servos; near singularities they move the joints differently
_PERIOD = 0.01  # s, of a servo
_SAME = 1e-6  # rad or m
_HANGS = 1.0  # s; what reads the scene comes back ten times a second


def checked_world(config: Config, kinematics: Mapping[str, Kinematics]) -> World | None:
    """Return the world with the pairs that are checked, or None if no arm has a URDF. Raises ConfigError."""
    for arm in config.arms:
        joints = len(kinematics[arm.name].joint_names) if arm.name in kinematics else 6
        if arm.output == "twist_stamped" and joints < 6:
            raise ConfigError(
                f"collision.check: {joints} joints cannot follow every twist, so nobody knows how arm '{arm.name}' "
                "moves; set control.output to joint_state or joint_velocity_state, or collision.check to false"
            )
    world = make_world(config, kinematics)
    if world is None:
        return None
    srdf = config.collision.srdf
    found = read_srdf(Path(srdf).expanduser()) if srdf else sampled_pairs(world, config.collision.hold_distance)
    return without(world, *found)


def refusal(found: Clearance) -> Refused | None:
    """Return why a motion is refused, or None."""
    if not found.forbidden:
        return None
    first, second = found.bodies
    reason = Reason.COLLISION_SCENE if found.with_scene else Reason.COLLISION_SELF
    return Refused(reason, f"{first} and {second}: {1e3 * found.distance:.3g} mm apart on the way")


class CollisionCheck:
    """Checks the commands of all arms that are sent together.

    One thread calls :meth:`limit`; another one may call :meth:`set_scene` and read :attr:`last`.

    Args:
        config: All options.
        kinematics: Kinematics by arm; an arm without a URDF is not covered.

    Attributes:
        world: The bodies and pairs without the scene, or None if nothing is checked.
        last: What was found for the last command, or None before the first.
        closest: The nearest two bodies at the last :meth:`look`, or None before the first.
        steady: The steady clock, s; by default that of the system.
        scene_silent: Returns for how many seconds nobody has read the scene or ended obstacles; assign it.

    Raises:
        ConfigError: The geometry or the options cannot be used; the text names the file or the option.
    """

    def __init__(self, config: Config, kinematics: Mapping[str, Kinematics]) -> None:
        self.world = checked_world(config, kinematics) if config.collision.check else None
        self._kinematics = kinematics
        self.last: Clearance | None = None
        self.closest: Clearance | None = None
        self.steady: Callable[[], float] = time.monotonic
        self.scene_silent: Callable[[], float] = lambda: 0.0
        self._columns: dict[tuple[str, tuple[str, ...]], tuple[IntArray, IntArray]] = {}
        self._speeds: dict[str, FloatArray] = {}  # of each arm's joints, at the last command
        self.scene: tuple[Body, ...] = ()
        self._unknown = ""  # the first body of the scene whose shape is not known
        self._scene_at = -math.inf  # when the scene was published, s
        self.configure(config)
        if self.world is not None:
            self.checker = Checker(self.world)
            joints = self.world.joints
            self._at = {arm: [joints[arm][name] for name in kinematics[arm].joint_names] for arm in joints}
            self._unseen = set(self.world.joints)  # arms whose joint state has never arrived
            names = len(self.world.tree.names)
            self._q = np.clip(np.zeros(names), self.world.tree.low, self.world.tree.high)

    def configure(self, config: Config) -> None:
        """Apply changed options; those of the geometry are not live."""
        self._config, options = config, config.collision
        self._margins = Margins(options.hold_distance, options.slow_distance, options.support_distance)
        self._lifetime = lifetime(config)
        self._arms = {arm.name: arm for arm in config.arms}

    def set_scene(self, bodies: Sequence[Body], *, age: float | None = 0.0) -> None:
        """Replace the obstacles that move; ``age`` is that of the message in s, or None if there was none.

        While the shape of one is not known, the arms hold.
        """
        assert self.world is not None
        self.scene = tuple(bodies)
        unknown = next((f"{body.name}: {body.unknown}" for body in bodies if body.unknown), "")
        self._unknown = self._unknown or unknown  # before the checker changes, and until it has
        self.checker = Checker(with_bodies(self.world, [body for body in bodies if not body.unknown]))
        self._unknown = unknown
        self._scene_at = self._scene_at if age is None else self.steady() - age

    def limit(self, commands: Sequence[Command], joints: Mapping[str, JointState | None]) -> float:
        """Return the share of the commands' motion that may be executed in the same time.

        Args:
            commands: The commands of all arms that have one.
            joints: Each arm's newest joint state.

        Raises:
            Refused: Two bodies would come too near, or a required scene is stale.
        """
        if self.world is None or not any(command.arm in self.world.joints for command in commands):
            return 1.0
        options = self._config.collision
        late = self.steady() - self._scene_at
        if options.scene_required and late > options.scene_timeout:
            old = f"{late:.2g} s old" if math.isfinite(late) else "none has arrived"
            raise Refused(Reason.SCENE_STALE, f"{options.scene}: {old}, allowed {options.scene_timeout:g} s")
        if (silent := self.scene_silent()) > _HANGS:
            raise Refused(Reason.SCENE_STALE, f"{options.scene}: its thread has not come back for {silent:.2g} s")
        if self._unknown:
            raise Refused(Reason.COLLISION_SCENE, self._unknown)
        self._unseen -= {arm for arm, state in joints.items() if state is not None}
        if self._unseen:
            unseen = ", ".join(sorted(self._unseen))
            raise Refused(Reason.JOINT_STATE_STALE, f"{unseen}: no joint state yet, so it cannot be kept clear of")
        ways, closed = self.ways(commands, joints)
        self.last = found = self.clearance(ways, closed, self._beside(commands, ways[0]))
        if (refused := refusal(found)) is not None:
            raise refused
        return found.share

    def clearance(
        self, ways: FloatArray, closed: Sequence[str] = (), beside: FloatArray | None = None
    ) -> Clearance:
        """Check motions through waypoints [D, W, J] of which the arms make one, supposedly that in the middle.

        ``closed`` are the arms whose grippers are closed, ``beside`` further motions (:meth:`Checker.check`).
        """
        others = ways if len(ways) > 1 else None
        return self.checker.check(ways[len(ways) // 2], self._margins, closed, others, beside)

    def ways(
        self, commands: Sequence[Command], joints: Mapping[str, JointState | None]
    ) -> tuple[FloatArray, list[str]]:
        """Return the waypoints [D, W, J] of the commands, and the arms whose gripper is closed; D is 1 or odd."""
        assert self.world is not None
        tree, start = self.world.tree, self._q
        for arm, state in joints.items():
            if state is not None and arm in self.world.joints:
                index, column = self._index(arm, state.names)
                start[index] = state.positions[column]
        start = tree.follow(np.where(np.isfinite(start), start, 0.0))
        known = [each for each in commands if each.arm in self.world.joints]
        return tree.follow(self._ways(known, start)), [each.arm for each in known if self._is_closed(each)]

    def _ways(self, commands: Sequence[Command], start: FloatArray) -> FloatArray:
        """Return the waypoints [D, W, J] from ``start`` [J] until all arms have come to rest.

        D is 1, or the number of servos that may follow a twist, which choose the joints' velocities.
        """
        twists = [each.duration for each in commands if each.twist is not None and not each.hold]
        dampings = _DAMPINGS if twists else _DAMPINGS[:1]
        first = math.ceil(max(twists) / _PERIOD) if twists else 1  # steps of the command,
        beyond = max((self._lifetime - each.duration for each in commands if each.moves_on), default=0.0)
        more = 0 if beyond <= 0 else math.ceil(beyond / _PERIOD) if twists else 1  # and until it expires
        way = np.empty((len(dampings), first + more + 1, len(start)))
        way[:] = start
        speeds = np.zeros_like(way)
        for command in commands:
            index, column = self._index(command.arm, command.names)
            at, left = self._at[command.arm], max(self._lifetime - command.duration, 0.0)
            way[:, 1:, index] = goal = command.positions[column]
            if command.hold:
                speeds[..., at] = self._speeds.pop(command.arm, 0.0)
                continue
            if command.twist is not None:
                steps = np.repeat((command.duration / first, left / max(more, 1)), (first, more))
                twist, chain = np.concatenate(command.twist), self._kinematics[command.arm]
                way[..., at], speeds[..., at] = chain.follow(start[at], twist, steps, dampings)
            else:
                if first > 1:
                    way[:, :first, index] = start[index] + np.arange(first)[:, None] / first * (goal - start[index])
                if more and command.moves_on:
                    way[:, first + 1 :, at] += np.arange(1, more + 1)[:, None] / more * left * command.velocity
                speeds[..., at] = command.velocity
            self._speeds[command.arm] = speeds[len(dampings) // 2, first, at]
        if not twists:
            return np.concatenate([way, self._stopped(way[:, -1:], speeds[:, -1:])], axis=1)
        early, late = (self._braked(way[:, at], speeds[:, at - 1 : at + 1]) for at in (first, first + more))
        return np.concatenate([way[:, : first + 1], early, way[:, first:], late[:, :-1]], axis=1)

    def _beside(self, commands: Sequence[Command], way: FloatArray) -> FloatArray | None:
        """Return the ways [2, W, J] of arms that are not where they were commanded to be, or None if all are.

        ``way`` leads from the measured positions to the goals, which an arm that was late reaches. One that has
        caught up goes there from its last command, and one that sags goes on beside it, from where it is.
        """
        assert self.world is not None
        behind = np.zeros(way.shape[1])
        for command in commands:
            if command.arm in self.world.joints and not (command.hold or command.moves_on):
                origin = command.arm_positions - command.velocity * command.duration
                at = self._at[command.arm]
                behind[at] = origin - way[0, at]
        if np.abs(behind).max() < _SAME:
            return None
        ways = np.stack([way, way])
        ways[0, 0] += behind
        ways[1, 1:] -= behind
        return self.world.tree.follow(ways)

    def _braked(self, q: FloatArray, speeds: FloatArray) -> FloatArray:
        """Return ways [D, 4, J] to rest from ``q`` [D, J], and back; a servo's last speed is one of two."""
        half, rest = (self._stopped(q[:, None], speeds, share) for share in (0.5, 1.0))
        return np.concatenate([half[:, :1], rest, half[:, 1:]], axis=1)

    def _stopped(self, q: FloatArray, speeds: FloatArray, share: float = 1.0) -> FloatArray:
        """Return where joints at ``q`` [..., J] with ``speeds`` [..., J] are after a share of the time to stop."""
        assert self.world is not None
        slower = self._config.collision.deceleration
        passed = np.abs(speeds) / slower
        if share < 1.0:
            passed = np.minimum(passed, share * passed.max(axis=-1, keepdims=True))
        there = q + passed * (speeds - np.copysign(0.5 * slower * passed, speeds))
        low, high = np.minimum(self.world.tree.low, q), np.maximum(self.world.tree.high, q)
        stopped: FloatArray = np.minimum(np.maximum(there, low), high)
        return stopped

    def _is_closed(self, command: Command) -> bool:
        arm = self._arms[command.arm]
        fingers, gripper = arm.robot.gripper_joint_names, arm.gripper
        positions = dict(zip(command.names, command.positions.tolist(), strict=True))
        if not fingers or fingers[0] not in positions:
            return False
        wide = gripper.open_position - gripper.closed_position
        return wide != 0 and (positions[fingers[0]] - gripper.closed_position) / wide < _HALF

    def _index(self, arm: str, names: tuple[str, ...]) -> tuple[IntArray, IntArray]:
        """Return which joints of the tree ``names`` are, and their places in ``names``."""
        key = arm, names
        if key not in self._columns:
            assert self.world is not None
            own = self.world.joints[arm]
            known = [(own[name], place) for place, name in enumerate(names) if name in own]
            index, column = np.array(known, np.int64).reshape(-1, 2).T
            if len(self._columns) > 64:  # a driver that reorders its joints
                self._columns.clear()
            self._columns[key] = index, column
        return self._columns[key]

    def placed(self, frame: int, joints: Mapping[str, JointState]) -> FloatArray:
        """Return where a frame of the world's tree is, [4, 4], with each arm's joints at a joint state.

        Raises ConfigError if an arm has none. Any thread may call it.
        """
        assert self.world is not None
        if missing := self.world.joints.keys() - joints.keys():
            raise ConfigError(f"no joint state of {', '.join(sorted(missing))}")
        tree, q = self.world.tree, self.positions
        for arm, state in joints.items():
            own = self.world.joints.get(arm, {})
            for name, position in zip(state.names, state.positions.tolist(), strict=True):
                if name in own:
                    q[own[name]] = position
        if not np.isfinite(q).all():
            raise ConfigError("a joint state that is not finite")
        found: FloatArray = tree.forward(tree.follow(q)[None])[frame, 0]
        return found

    @property
    def positions(self) -> FloatArray:
        """The newest positions [J] of the tree's joints."""
        return self._q.copy()

    def nearest(self) -> Clearance | None:
        """Return the smallest distance at the last positions, or None if nothing is checked."""
        return None if self.world is None else self.checker.nearest(self.positions)

    def look(self) -> None:
        """Keep what :meth:`nearest` returns as :attr:`closest`; with many obstacles, that takes a while."""
        self.closest = self.nearest()

    @property
    def why_not(self) -> str:
        """Why nothing is checked, or ""."""
        if not self._config.collision.check:
            return "collision.check is false"
        return "robot.urdf is not set" if self.world is None else ""

    def describe(self) -> str:
        """Return what is checked and what is not, as text."""
        options, world = self._config.collision, self.world
        if world is None:
            return f"collision: NOT CHECKED ({self.why_not})"
        scene = f", and {options.scene}{' (required)' if options.scene_required else ''}" if options.scene else ""
        named = [
            f"{body.name} (support)" if body.is_support else body.name for body in world.bodies if body.is_scene
        ]
        tips = [body.name for body in world.bodies if body.is_tip]
        lines = [
            f"collision: {len(world.pairs)} pairs checked, {len(world.unchecked)} not; hold below "
            f"{1e3 * options.hold_distance:g} mm, slower below {1e3 * options.slow_distance:g} mm, stops at "
            f"{options.deceleration:g} rad/s^2",
            f"  bodies: {', '.join(body.name for body in world.bodies if not body.is_scene)}",
            f"  obstacles: {', '.join(named) or 'none'}{scene}",
        ]
        partners = dict[str, list[str]]()
        for i, j in world.pairs:
            partners.setdefault(world.bodies[i].name, []).append(world.bodies[j].name)
        lines += [f"  pairs of {first}: {', '.join(others)}" for first, others in partners.items()]
        lines += [
            f"  near everywhere, so that they slow nothing: {first} and {second}"
            for first, second in sorted(world.near)
        ]
        if tips:
            lines.append(f"  {1e3 * options.support_distance:g} mm from a support: {', '.join(tips)}")
        redundant = [
            f"motions of {name} that do not move its tip; a servo of a twist must make none"
            for name, arm in self._arms.items()
            if name in world.joints
            and arm.output == "twist_stamped"
            and len(self._kinematics[name].joint_names) > 6
        ]
        return "\n".join([*lines, *(f"  not covered: {note}" for note in (*world.notes, *redundant))])
