"""Forward and inverse kinematics of a serial arm, with Pinocchio.

The inverse uses damped least squares (Nakamura and Hanafusa 1986; Wampler 1986). The damping grows as the
Jacobian's smallest singular value falls below a threshold (Maciejewski and Klein 1988), so the solution is exact
where the arm can follow and bounded where it cannot. Joints at a limit are left out, and the others take over.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_ros.errors import ConfigError, MissingDependencyError, did_you_mean
from vla_ros.kinematics.native import with_reason
from vla_ros.kinematics.rotations import Pose
from vla_ros.kinematics.urdf import Mimic, Urdf, UrdfJoint, read_urdf, unknown_name
from vla_ros.kinematics.urdf_xml import listed
from vla_ros.types import FloatArray

_SINGULAR = 0.05  # damping sets in below this singular value (m/rad, or dimensionless)
_MAX_DAMPING = 0.05
_TOLERANCE = 1e-5  # m and rad
_MAX_ITERATION_STEP = 0.3  # rad or m per joint and iteration; the linearisation is valid about that far
_POSTURE_STEP = 0.02  # rad or m that spare degrees of freedom may drift per call
_REMEMBERED_POSES = 8
_MOST_JOINTS = 100  # between base and tip


class Kinematics:
    """The chain of joints from a base to a tip link. Thread-safe; create it with :meth:`from_urdf`.

    Positions are in radians and metres, poses in the base frame. A joint that mimics another one moves with it and
    is none of the N; its limits narrow those of the joint that it follows.

    Attributes:
        description: The URDF.
        gripper_joints: Joints that can move beyond the arm's last one.
        joint_names: The arm's N joints in command order.
        position_low: Float64 [N], lower limits of the URDF (-1e6 for continuous joints).
        position_high: Float64 [N], upper limits.
        velocity_limits: Float64 [N], rad/s or m/s; infinite where the URDF says 0 (as MoveIt reads it).
        is_prismatic: Bool [N], True for a joint whose positions are in metres.
        base_frame: Link in which poses are given.
        tip_frame: Link whose pose is computed.
    """

    def __init__(self, description: Urdf, joint_names: tuple[str, ...], base_frame: str, tip_frame: str) -> None:
        self._pinocchio, self._model = _model(description, base_frame, tip_frame)
        self._data = self._model.createData()
        self._tip = self._model.getFrameId(tip_frame, self._pinocchio.BODY)  # a joint may have the same name
        self._lock = threading.Lock()
        self._poses: OrderedDict[bytes, Pose] = OrderedDict()
        # With fewer than six joints, the position of the tip is more important than its rotation.
        self._weights = np.array([1.0] * 3 + [1.0 if len(joint_names) >= 6 else 0.1] * 3)
        self.description = description
        self.joint_names = joint_names
        self.base_frame = base_frame
        self.tip_frame = tip_frame
        # Pinocchio's vector of positions [M], in the URDF's order, is spread @ q + offset.
        moving = [joint for joint in description.chain(base_frame, tip_frame) if joint.is_movable]
        self._spread, self._offset = np.zeros((len(moving), len(joint_names))), np.zeros(len(moving))
        for row, joint in enumerate(moving):
            mimic = joint.mimic or Mimic(joint.name, 1.0, 0.0)
            self._spread[row, joint_names.index(mimic.leader)] = mimic.scale
            self._offset[row] = mimic.offset
        low, high, speed = _limits(description, moving, joint_names)
        self.position_low: FloatArray = low
        self.position_high: FloatArray = high
        self.velocity_limits: FloatArray = speed
        self.gripper_joints = tuple(description.movable_below(moving[-1].child))
        kinds = {joint.name: joint.kind for joint in moving}
        self.is_prismatic = np.array([kinds[name] == "prismatic" for name in joint_names])

    @classmethod
    def from_urdf(
        cls, urdf: str, joint_names: Sequence[str] = (), base_frame: str = "", tip_frame: str = ""
    ) -> "Kinematics":
        """Read a URDF; raises ConfigError if it cannot be read or does not fit the other arguments.

        Args:
            urdf: The path, or ``demo`` for the simulation's arm.
            joint_names: Joints in command order; empty for all movable joints from base to tip.
            base_frame: Empty for the root link.
            tip_frame: Empty for the end of the chain, before fingers branch off.
        """
        description = read_urdf(urdf)
        for option, link in (("robot.base_frame", base_frame), ("robot.tip_frame", tip_frame)):
            if link and link not in description.links:
                raise unknown_name(option, link, description.links, description.path)
        movable = {joint.name: joint for joint in description.joints if joint.is_movable}
        for name in joint_names:
            if name not in movable:
                raise unknown_name("robot.joint_names", name, movable, description.path)
            if (mimic := movable[name].mimic) is not None:
                raise ConfigError(
                    f"robot.joint_names: found '{name}', which mimics '{mimic.leader}' in {description.path} and "
                    "moves with it; leave it out"
                )
        base = base_frame or description.root
        if not tip_frame:
            ends = [movable[name].child for name in joint_names]
            end = max(ends, key=lambda link: len(description.chain(base, link)), default="")
            tip_frame = description.tip_of(end or description.serial_end(base))
        joints = [joint for joint in description.chain(base, tip_frame) if joint.is_movable]
        chain = tuple(joint.name for joint in joints if joint.mimic is None)
        if len(joints) > _MOST_JOINTS:
            raise ConfigError(
                f"robot.tip_frame: found {len(joints)} movable joints from '{base}' to '{tip_frame}' in "
                f"{description.path}, expected at most {_MOST_JOINTS}"
            )
        for joint in joints:
            if joint.mimic is not None and joint.mimic.leader not in chain:
                leader = joint.mimic.leader
                wrong = "mimics another joint as well" if movable.get(leader) in joints else "is not between them"
                hint = "" if leader in movable else did_you_mean(leader, movable)
                raise ConfigError(
                    f"robot.tip_frame: between '{base}' and '{tip_frame}' in {description.path}, joint "
                    f"'{joint.name}' mimics '{leader}', which {wrong}{hint}"
                )
        names = tuple(joint_names) or chain
        if not chain:
            raise ConfigError(
                f"robot.tip_frame: no joint of {description.path} moves '{tip_frame}' relative to '{base}'; name "
                f"the link at the end of the arm, of {listed(description.links)}"
            )
        if set(names) != set(chain) or len(names) != len(chain):
            raise ConfigError(
                f"robot.joint_names: found {list(names)}, expected the movable joints from '{base}' to "
                f"'{tip_frame}', [{listed(chain)}], in any order"
            )
        return cls(description, names, base, tip_frame)

    def forward(self, q: FloatArray) -> Pose:
        """Return the pose of the tip in the base frame at joint positions ``q`` [N]."""
        with self._lock:
            return self._pose(np.asarray(q, dtype=np.float64))

    def jacobian(self, q: FloatArray) -> FloatArray:
        """Return the tip's Jacobian [6, N] at ``q`` [N]: linear over angular, in base axes."""
        with self._lock:
            return self._jacobian(q)

    def solve(
        self,
        q: FloatArray,
        target: Pose,
        *,
        low: FloatArray | None = None,
        high: FloatArray | None = None,
        posture: FloatArray | None = None,
        posture_gain: float = 0.1,
        iterations: int = 10,
    ) -> FloatArray:
        """Return joint positions [N] near ``q`` at which the tip is as near to ``target`` as possible.

        The result is finite, within ``low`` and ``high`` (None: the URDF's limits), and no joint moves by more than
        0.3 rad or m per iteration. If the target is already reached, ``q`` is returned. Redundant joints drift
        towards ``posture`` [N], if given, by ``posture_gain`` times the distance, at most 0.02 rad or m per call.
        """
        low = self.position_low if low is None else low
        high = self.position_high if high is None else high
        now = _clip(q, low, high)
        best, best_error, stalled = now, math.inf, 0
        with self._lock:
            if _distance(self._pose(now), target) < _TOLERANCE:  # cheaper than _error(), which takes a logarithm
                return now
            for iteration in range(iterations + 1):
                error = self._error(now, target)
                size = math.sqrt(error @ error)
                stalled = stalled + 1 if size > 0.9 * best_error else 0
                if size < best_error:
                    best, best_error = now, size
                if size < _TOLERANCE or stalled == 2 or iteration == iterations:
                    break
                drift = None
                if iteration == 0 and posture is not None:
                    drift = _clip(posture_gain * (posture - now), -_POSTURE_STEP, _POSTURE_STEP)
                step = self._step(now, error, low, high, drift)
                if float(np.abs(step).max()) < 1e-9:
                    break
                now = _clip(now + step, low, high)
        return best

    def follow(
        self, q: FloatArray, twist: FloatArray, steps: FloatArray, dampings: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return where servos that get a twist bring the arm, [D, T + 1, N], and its speeds there.

        A servo resolves the twist at each step, as MoveIt Servo does without a plugin for inverse kinematics: the
        least joint velocities, all of them slower if one would exceed its limit.

        Args:
            q: Joint positions [N] at the start.
            twist: Velocity of the tip [6], m/s over rad/s, in base axes.
            steps: Durations [T] in s.
            dampings: Of the servos' pseudo-inverses [D], as singular values of the Jacobian.
        """
        low, high = np.minimum(self.position_low, q), np.maximum(self.position_high, q)
        way = np.tile(q, (len(dampings), len(steps) + 1, 1))
        speeds = np.empty_like(way)
        for number, seconds in enumerate(steps.tolist()):
            speeds[:, number] = speed = self.resolve(way[:, number], twist, dampings)
            way[:, number + 1] = _clip(way[:, number] + seconds * speed, low, high)
        speeds[:, -1] = self.resolve(way[:, -1], twist, dampings)
        return way, speeds

    def resolve(self, q: FloatArray, twist: FloatArray, dampings: FloatArray) -> FloatArray:
        """Return the joint velocities [D, N] with which servos follow a ``twist`` [6] at ``q`` [D, N]."""
        with self._lock:
            jacobian = np.array([self._jacobian(each) for each in q])
        turned = jacobian.swapaxes(1, 2)
        squares = jacobian @ turned
        squares[:, range(6), range(6)] += (dampings**2)[:, None]
        # [D, N, 6] @ [D, 6, 1]; NumPy 1 takes [6, 1] for six vectors of one number
        speed: FloatArray = (turned @ np.linalg.solve(squares, twist[None, :, None]))[..., 0]
        speed /= np.maximum(1.0, (np.abs(speed) / self.velocity_limits).max(axis=1, keepdims=True))
        return speed

    def _step(
        self, q: FloatArray, error: FloatArray, low: FloatArray, high: FloatArray, drift: FloatArray | None
    ) -> FloatArray:
        """Return a damped step; joints that would exceed a limit move to it, and the others take over."""
        jacobian = self._weights[:, None] * self._jacobian(q)  # [6, N]
        error = self._weights * error
        down, up = low - q, high - q
        step = _bounded(damped_least_squares(jacobian, error, drift))
        fixed = (step < down) | (step > up)
        while fixed.any() and not fixed.all():
            step = np.where(fixed, _clip(step, down, up), 0.0)
            rest = None if drift is None else drift[~fixed]
            step[~fixed] = _bounded(damped_least_squares(jacobian[:, ~fixed], error - jacobian @ step, rest))
            beyond = (step < down) | (step > up)
            if not beyond.any():
                return step
            fixed |= beyond
        return _clip(step, down, up)

    def _error(self, q: FloatArray, target: Pose) -> FloatArray:
        """Return the error [6] of the pose at ``q``: translation over rotation vector, in base axes."""
        pose = self._pose(q)
        error: FloatArray = np.empty(6)
        error[:3] = target.position - pose.position
        error[3:] = self._pinocchio.log3(target.rotation @ pose.rotation.T)
        return error

    def _pose(self, q: FloatArray) -> Pose:
        """Return the tip's pose; recent poses are cached, because a command uses the same few."""
        key = q.tobytes()
        pose = self._poses.get(key)
        if pose is None:
            pinocchio = self._pinocchio
            pinocchio.forwardKinematics(self._model, self._data, self._full(q))
            tip = pinocchio.updateFramePlacement(self._model, self._data, self._tip)
            pose = self._poses[key] = Pose(tip.translation.copy(), tip.rotation.copy())
            if len(self._poses) > _REMEMBERED_POSES:
                self._poses.popitem(last=False)
        return pose

    def _jacobian(self, q: FloatArray) -> FloatArray:
        """Return the tip's Jacobian [6, N] in base axes."""
        aligned, full = self._pinocchio.ReferenceFrame.LOCAL_WORLD_ALIGNED, self._full(q)
        whole = self._pinocchio.computeFrameJacobian(self._model, self._data, full, self._tip, aligned)
        result: FloatArray = whole @ self._spread
        return result

    def _full(self, q: FloatArray) -> FloatArray:
        """Return Pinocchio's positions [M] for the positions ``q`` [N] of ``joint_names``."""
        full: FloatArray = self._spread @ q + self._offset
        return full


def damped_least_squares(jacobian: FloatArray, error: FloatArray, drift: FloatArray | None = None) -> FloatArray:
    """Return the joint step [N] for a tip error [6], with ``drift`` [N] in the null space.

    Damping near singularities bounds the amplification of the error by 1 / 0.05.
    """
    # The eigenvalues of J J^T [6, 6] are the squared singular values of J; an SVD of J would take twice as long.
    squares, directions = np.linalg.eigh(jacobian @ jacobian.T)
    damping = _MAX_DAMPING**2 * np.maximum(0.0, 1.0 - squares / _SINGULAR**2)
    if drift is not None:
        error = error - jacobian @ drift
    step: FloatArray = jacobian.T @ (directions @ ((directions.T @ error) / (squares + damping)))
    return step if drift is None else step + drift


def _clip(values: FloatArray, low: FloatArray | float, high: FloatArray | float) -> FloatArray:
    """Like `numpy.clip`, but five times as fast."""
    clipped: FloatArray = np.minimum(np.maximum(values, low), high)
    return clipped


def _distance(pose: Pose, target: Pose) -> float:
    """Return the distance between two poses (rad and m), with the chord instead of the angle."""
    shift = target.position - pose.position
    turn = (target.rotation - pose.rotation).ravel()  # its length is sqrt(8) sin(angle / 2)
    return math.sqrt(shift @ shift + 0.5 * (turn @ turn))


def _bounded(step: FloatArray) -> FloatArray:
    """Return ``step``, scaled down if necessary so that no joint exceeds an iteration's limit."""
    largest = float(np.abs(step).max())
    return step if largest <= _MAX_ITERATION_STEP else step * (_MAX_ITERATION_STEP / largest)


def _model(description: Urdf, base: str, tip: str) -> tuple[Any, Any]:
    """Return the library Pinocchio, and its model of the chain from ``base`` to ``tip``."""
    try:
        import pinocchio
    except ImportError as error:
        raise MissingDependencyError(f"kinematics needs Pinocchio ({error}); run `pip install pin`") from None
    text = description.part(base, tip)
    try:
        return pinocchio, with_reason(lambda: pinocchio.buildModelFromXML(text))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"robot.urdf: Pinocchio cannot read {description.path} ({error})") from None


def _limits(
    description: Urdf, joints: Sequence[UrdfJoint], names: tuple[str, ...]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the lowest and highest positions and the speeds [N] of ``names``.

    Joints that mimic them narrow the limits; equal limits of such a joint are none. Raises ConfigError if no range
    is left.
    """
    stated = {joint.name: description.limits(joint.name) for joint in joints}
    low, high = (np.array([stated[name][part] for name in names]) for part in (0, 1))
    speeds = np.array([stated[name][2] for name in names])
    speeds = np.where(speeds > 0, speeds, np.inf)
    for joint in joints:
        if joint.mimic is None or joint.mimic.scale == 0:
            continue
        mimic, at = joint.mimic, names.index(joint.mimic.leader)
        least, most, speed = stated[joint.name]
        if least < most:
            ends = sorted(((least - mimic.offset) / mimic.scale, (most - mimic.offset) / mimic.scale))
            low[at], high[at] = max(low[at], ends[0]), min(high[at], ends[1])
        if speed > 0:
            speeds[at] = min(speeds[at], speed / abs(mimic.scale))
        if low[at] > high[at]:
            raise ConfigError(
                f"robot.urdf: {description.path}: joint '{joint.name}' mimics '{mimic.leader}', but within the "
                f"limits of '{mimic.leader}' it is never within its own, {least:g} to {most:g}"
            )
    return low, high, speeds
