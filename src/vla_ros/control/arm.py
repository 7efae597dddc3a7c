"""Turns an action into the command of one arm: motion, kinematics, limits, gripper.

- Positions begin at the last command, and at the measured position after a hold: an arm that sags or lags is never
  where it was commanded to be, and would sink by that distance (:mod:`vla_ros.control.following`) at each step.
- Velocities begin at the measured position, and so do deltas with ``control.delta_from: measured``.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.components import Component
from vla_ros.control.arm_options import ArmOptions
from vla_ros.control.command import Command, Commanded
from vla_ros.control.envelope import limit_pose, twist_between
from vla_ros.control.following import Following
from vla_ros.control.gripper import Gripper, fastest
from vla_ros.control.limits import Violation, brake, slower
from vla_ros.control.measured import position_of
from vla_ros.control.motion import JointMotion, TipMotion, check_fit, make_motion
from vla_ros.control.reasons import Refused
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import Pose
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, JointState

_FAR = 1e9  # far beyond every limit, but small enough that products do not overflow
_REACHED = 0.005  # m; a tip closer to its target has reached it
_STANDS = 1e-6  # rad/s or m/s; slower joints are at rest
_NOWHERE = Pose(np.zeros(3), np.eye(3))


class ArmController:
    """Makes the commands for one arm. Not thread-safe, but for ``check_joints`` and ``joint_speeds``.

    Args:
        config: All options.
        columns: The parts of an action that belong to this arm, with their columns.
        kinematics: The arm's kinematics; None without a URDF, in which case only step limits apply.
        name: Name of the arm in ``config.arms``.

    Attributes:
        joint_names: Joints in command order; empty for a twist without kinematics.
        names: Joints of a command: the arm's, then the fingers.
        joint_speeds: How fast each joint can move (:func:`vla_ros.control.measured.joint_speeds`).
        counters: How often each limit changed a target, by the reason's value. Three counters never stop the arm:
            ``gripper_speed``, ``not_reached`` (inverse kinematics stayed more than 5 mm from the target) and
            ``tip_shortened`` (joint limits bent the path of the tip, so the step was shortened).

    Raises:
        ConfigError: The options, the URDF and the policy do not fit together.
    """

    def __init__(
        self,
        config: Config,
        columns: Sequence[tuple[Component, slice]],
        kinematics: Kinematics | None = None,
        name: str = "arm",
    ) -> None:
        self.name, self._section = name, "robot" if name == "arm" else name
        self._kinematics, self.counters = kinematics, Counter[str]()
        arm = next(each for each in config.arms if each.name == name)
        self.joint_names = kinematics.joint_names if kinematics else arm.robot.joint_names
        grippers = [each for each in columns if each[0].quantity == "gripper"]
        # Sorted: tip_position before tip_rotation.
        motion = sorted((each for each in columns if each not in grippers), key=lambda each: each[0].quantity)
        self._motion = make_motion([part for part, _ in motion], arm, config.control, kinematics)
        self._motion_columns = np.concatenate([np.arange(place.start, place.stop) for _, place in motion])
        if isinstance(self._motion, JointMotion) and len(self._motion_columns) != len(self.joint_names):
            raise ConfigError(
                f"{self._section}.joint_names: found {len(self.joint_names)} joints {list(self.joint_names)}, but "
                f"the policy returns {len(self._motion_columns)} numbers"
            )
        self._gripper_column = grippers[0][1].start if grippers else None
        self._gripper = Gripper(arm.gripper, grippers[0][0] if grippers else None)
        self.configure(config)
        check_fit(arm, self._motion, kinematics, self.joint_names)
        self.names = self.joint_names + self._finger_names
        self.reset()

    def configure(self, config: Config) -> None:
        """Apply changed options, and keep the last command."""
        options = ArmOptions(config, self.name, self._kinematics)
        arm, self._options, self._control, self.joint_speeds = options.arm, options, config.control, options.speeds
        self._gripper.config, self._gripper.fastest = arm.gripper, fastest(arm, self._kinematics)
        self._arm, self._measured, self._envelope = arm, options.measured, options.envelope
        self._sends_velocities = options.sends_velocities
        self._from_measured = self._sends_velocities or config.control.delta_from == "measured"
        self._posture = np.array(arm.robot.home) if arm.robot.home else None
        used = arm.gripper.mode != "none" and self._gripper_column is not None
        self._finger_names = arm.robot.gripper_joint_names if used else ()

    @property
    def binary(self) -> tuple[int, ...]:
        """The gripper's column in an action if the gripper is binary (``gripper.mode``), otherwise ()."""
        column = self._gripper_column
        return () if column is None or self._arm.gripper.mode != "binary" else (column,)

    @property
    def unused_gripper(self) -> str:
        """A warning if the policy commands a gripper that has no finger joints, otherwise ""."""
        if self._gripper_column is None or self._arm.gripper.mode == "none" or self._finger_names:
            return ""
        return (
            f"the gripper will not move: {self._section}.gripper_joint_names is empty; name the finger joints, "
            "or set gripper.mode to none"
        )

    def reset(self) -> None:
        """Forget previous commands, but keep the counters."""
        self._gripper.reset()
        self.restart()

    def restart(self) -> None:
        """Begin the next command at rest, at the measured position; keep the grip and the counters."""
        self._following = Following(self.joint_names, self._options.sags)
        self._rest()

    def _rest(self) -> None:
        """Forget the last command of the arm, which is at rest."""
        self._commanded = Commanded(np.zeros(len(self.joint_names)))
        self._motion.reset()

    def settle(self, joints: JointState | None) -> None:
        """Begin the next command at the measured position if the arm, which rests, was moved; raises Refused."""
        if self._following.is_moved(
            self._commanded.sent, self._measured.positions(joints), self._envelope.joints.lead
        ):
            self._rest()

    def assume(self, joints: JointState | None) -> None:
        """Take the measured positions for the last command if there is one; raises Refused."""
        if self._commanded.sent is not None:
            self._commanded.sent = self._measured.positions(joints)

    def continue_from(self, other: "ArmController") -> None:
        """Continue after the last command of ``other``, a controller of the same arm for other actions."""
        self.reset()
        self.counters, self._following = other.counters, copy(other._following)
        self._commanded = replace(other._commanded, made=None)
        self._gripper.target = other._gripper.target

    def next_start(self, joints: JointState | None) -> tuple[FloatArray, float]:
        """Return where the next command starts, [N], and the gripper's opening in [0, 1]; raises Refused."""
        positions = self._begin(joints)[1].copy() if self.joint_names else np.zeros(0)
        target = self._gripper.target
        finger = position_of(joints, self._finger_names[0]) if target is None and self._finger_names else target
        return positions, 1.0 if finger is None else self._gripper.share(finger)

    def check_joints(self, joints: JointState) -> None:
        """Raise Refused if no command may be based on a joint state. Thread-safe."""
        self._measured.check(self._measured.positions(joints))
        self._measured.check_fingers(joints, self._finger_names)

    def outside_box(self, joints: JointState | None) -> str:
        """Return how the tip is outside the workspace box, or ""; raises Refused without positions."""
        return self._envelope.outside_box(self._measured.positions(joints)) if self.joint_names else ""

    def command(
        self,
        action: FloatArray,
        joints: JointState | None,
        stamp: int,
        dt: float,
        reference: JointState | None = None,
    ) -> Command:
        """Return the command for one action. Call :meth:`sent` once it has been sent.

        Args:
            action: Float64 [D], un-normalised and finite, with the numbers of all arms.
            joints: Newest joint state; None only for a twist without kinematics.
            stamp: Stamp in nanoseconds of the frame from which the action was inferred.
            dt: Seconds until the next command; positive and finite.
            reference: Joint state at the frame's stamp, to which deltas are relative; None means ``joints``.

        Raises:
            Refused: No command may be sent.
        """
        numbers = np.minimum(np.maximum(action[self._motion_columns], -_FAR), _FAR)
        if self._kinematics is None and isinstance(self._motion, TipMotion):
            return self._twist_only(numbers, stamp, dt, self._fingers(action, joints, dt))
        measured, origin = self._begin(joints)
        start, goes_on = origin, self._commanded.sent is not None and not self._sends_velocities
        if self._from_measured and self._motion.quantity in ("tip_delta", "joint_delta", "joint_velocity"):
            at_frame = joints if reference is None or self._motion.quantity == "joint_velocity" else reference
            start, goes_on = self._measured.positions(at_frame), False
        self._following.begin_step(origin, measured, self._envelope, tip=self._from_measured)
        target = self._target(numbers, start, measured if goes_on else None, dt)
        if self._motion.quantity in ("joint_position", "tip_position"):
            target = brake(target, origin, self._envelope.joints.acceleration, dt)
        positions, violations, wrong = self._envelope.limit(target, measured, origin, self._commanded.velocity, dt)
        if wrong is not None and isinstance(self._motion, TipMotion):
            self.counters["tip_shortened"] += 1  # the policy's target was within the limits
        elif wrong is not None:
            violations.append(wrong)
        self._apply(violations)
        if isinstance(self._motion, TipMotion) and self._kinematics and not np.array_equal(positions, target):
            self._motion.shortened(self._kinematics.forward(positions))
        return self._commanded.make(self._command(positions, origin, self._fingers(action, joints, dt), stamp, dt))

    def _begin(self, joints: JointState | None) -> tuple[FloatArray, FloatArray]:
        """Return the measured positions [N], and where a command begins, [N]; raises Refused."""
        measured = self._measured.positions(joints)
        self._measured.check(measured)
        if self._sends_velocities:
            return measured, measured
        if self._following.is_lost:
            self._rest()
        sent = self._commanded.sent
        origin = self._following.origin(measured) if sent is None else sent
        self._following.check(measured, origin, self._envelope.joints.lead, joints.stamp if joints else 0)
        return measured, origin

    @property
    def is_moving(self) -> bool:
        """True if the arm needs further commands to come to rest."""
        moves = self._commanded.goal is not None and bool(np.any(np.abs(self._commanded.velocity) > _STANDS))
        return moves and (self._sends_velocities or math.isfinite(self._envelope.joints.acceleration))

    def interpolate(self, joints: JointState | None, dt: float, remaining: float, elapsed: float) -> Command | None:
        """Return a command between two actions, or None if there was no action yet.

        The arm moves straight to the positions of the last action, which are due in ``remaining`` seconds; if
        that is 0, the arm decelerates to rest. ``elapsed`` is the time in seconds since the last command, so that
        late commands do not prolong the deceleration. Raises Refused as :meth:`command` does.
        """
        goal = self._commanded.goal
        if goal is None:
            return None
        measured, origin = self._begin(joints)
        before, limits, envelope = self._commanded.velocity, self._envelope.joints, self._envelope
        if remaining > 0:
            target = origin + (goal.arm_positions - origin) * min(1.0, dt / remaining)
        else:
            before = slower(before, limits.acceleration, elapsed - dt)
            target = origin + dt * slower(before, limits.acceleration, dt)
            if not self._sends_velocities:  # not further than a step beyond the action
                envelope = envelope.around(goal.arm_positions, self._following.step)
        self._motion.discard()
        # The action was within the limits: what is carried beyond them is shortened, and not counted.
        positions, _, _ = envelope.limit(target, measured, origin, before, dt)
        if not self._sends_velocities:
            ends = goal.arm_positions, origin
            positions = self._following.give_way(positions, measured, *ends, self._envelope, dt)
        command = self._command(positions, origin, goal.fingers, goal.stamp, dt)
        return self._commanded.make(command, between=True)

    def _command(
        self, positions: FloatArray, origin: FloatArray, fingers: list[float], stamp: int, dt: float
    ) -> Command:
        """Return the command that moves from ``origin`` to ``positions`` [N] in ``dt`` seconds."""
        velocity = (positions - origin) / dt
        command = Command(
            arm=self.name,
            names=self.names,
            positions=np.array(positions.tolist() + fingers),
            stamp=stamp,
            duration=dt,
            frame_id=self._kinematics.base_frame if self._kinematics else "",
            velocity=velocity,
        )
        if self._sends_velocities and not self._options.sends_twists:
            return replace(command, velocities=dict(zip(self.joint_names, velocity.tolist(), strict=True)))
        if self._options.sends_twists and self._kinematics is not None:
            ends = self._kinematics.forward(origin), self._kinematics.forward(positions)
            return replace(command, twist=twist_between(*ends, dt))
        return command

    def shortened(self, share: float) -> Command | None:
        """Return the last command with a ``share`` of its motion in the same time, or None without one."""
        made = self._commanded.made
        if made is None or not len(made.velocity):
            return None
        origin = made.arm_positions - made.velocity * made.duration
        positions = self._envelope.within(origin, origin + share * made.velocity * made.duration, made.duration)
        if isinstance(self._motion, TipMotion) and self._kinematics:
            self._motion.shortened(self._kinematics.forward(positions))
        command = self._command(positions, origin, made.fingers, made.stamp, made.duration)
        return self._commanded.make(command, between=self._commanded.between)

    def sent(self) -> None:
        """Record that the last command was sent; later commands start from it."""
        sent = self._commanded.send(gave_way=self._following.gave_way)
        if sent is not None:
            self._following.sent(sent.arm_positions)
            self._motion.sent(sent.arm_positions)
            if sent.fingers:
                self._gripper.target = sent.fingers[0]

    def hold(self, joints: JointState | None) -> Command:
        """Return a command that holds the arm and forgets the last one; see :meth:`ArmOptions.hold`.

        The last one stays in force, and is not forgotten, where that raises Refused.
        """
        fingers = dict.fromkeys(self._finger_names, self._gripper.target)
        command = self._options.hold(self._following, joints, self._commanded.sent, fingers)
        self._rest()
        return command

    def _target(self, numbers: FloatArray, start: FloatArray, measured: FloatArray | None, dt: float) -> FloatArray:
        """Return the joint positions [N] that ``numbers`` mean for an arm at ``start`` [N].

        ``measured`` [N] is given if ``start`` is the last command.
        """
        if isinstance(self._motion, JointMotion):
            return self._motion.target(numbers, start, dt, self._control)
        assert self._kinematics is not None
        pose, pivot = self._kinematics.forward(start), None
        if measured is not None:
            pose = self._motion.pose_at(start) or pose  # without inverse kinematics' error, which would add up
            # BridgeData's robot (rail-berkeley/bridge_data_robot) turns about the measured tip.
            pivot = self._kinematics.forward(measured).position
        target = self._motion.target(numbers, pose, self._control, pivot)
        wanted, violations = limit_pose(target, pose, self._arm.limits)
        if violations:
            self._motion.shortened(wanted)
        self._apply(violations)
        low, high = self._envelope.joints.low, self._envelope.joints.high
        solved = self._kinematics.solve(start, wanted, low=low, high=high, posture=self._posture)
        if math.dist(self._kinematics.forward(solved).position.tolist(), wanted.position.tolist()) > _REACHED:
            self.counters["not_reached"] += 1
        return solved

    def _twist_only(self, numbers: FloatArray, stamp: int, dt: float, fingers: list[float]) -> Command:
        """Return a twist for a servo that computes the kinematics; only step limits apply."""
        assert isinstance(self._motion, TipMotion)
        start = self._motion.pose_at(np.zeros(0)) or _NOWHERE
        end, violations = limit_pose(self._motion.target(numbers, start, self._control), start, self._arm.limits)
        self._apply(violations)
        command = Command(
            arm=self.name,
            names=self._finger_names,
            positions=np.array(fingers),
            stamp=stamp,
            duration=dt,
            frame_id=self._options.frame,
            twist=twist_between(start, end, dt),
        )
        return self._commanded.make(command, between=True)  # nothing moves the arm between two twists

    def _fingers(self, action: FloatArray, joints: JointState | None, dt: float) -> list[float]:
        """Return the same position for every finger joint."""
        if not self._finger_names or self._gripper_column is None:
            return []
        measured = position_of(joints, self._finger_names[0])
        position, slowed = self._gripper.command(float(action[self._gripper_column]), measured, dt)
        if slowed:
            self.counters["gripper_speed"] += 1
        return [position] * len(self._finger_names)

    def _apply(self, violations: Iterable[Violation]) -> None:
        """Count violations; with ``limits.on_violation: stop``, refuse the command."""
        for violation in violations:
            self.counters[violation.reason.value] += 1
            if self._arm.limits.on_violation == "stop":
                raise Refused(violation.reason, violation.detail)
