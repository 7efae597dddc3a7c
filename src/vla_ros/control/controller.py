"""From one action to one command: gripper, pose, kinematics, limits. Nothing unchecked leaves it.

Two rules decide what a number means:

- A delta counts from the *measured* position (``control.delta_from: measured``): of the joint state that belongs
  to the frame where the caller has it, else of the newest. An arm that lags behind its commands then cannot run
  up a debt; ``commanded`` counts from the last command, for arms that sag or stick.
- Limits count from the newest measured position, always.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import Command
from vla_ros.control.end_effector import draw_into_box, read_delta, shorten_for_tip, twist_between
from vla_ros.control.fit import check_fit
from vla_ros.control.gripper import Gripper
from vla_ros.control.limits import JointLimits, Violation, limit_joints
from vla_ros.control.measured import MeasuredArm, position_of
from vla_ros.control.reasons import Reason, Refused
from vla_ros.kinematics.solver import Kinematics
from vla_ros.kinematics.transforms import rotation_vector
from vla_ros.types import ActionChunk, FloatArray, JointState

_REACHED = 0.005  # m
_WHOLE = ("float64_multi_array", "joint_trajectory")  # their drivers refuse a message that lacks a joint
_SAG = 0.02  # rad or m; an arm that sags by less is held where it was


@dataclass(frozen=True)
class _Made:
    """A command that may be sent: positions [N], velocity [N] of the arm, and the fingers'."""

    positions: FloatArray
    velocity: FloatArray
    fingers: list[float]


class Controller:
    """Makes commands, and refuses those that must not be sent. Used from one thread.

    Args:
        config: The whole tree; sections robot, control, gripper and limits are read.
        spec: What the policy's numbers mean.
        kinematics: The arm; may be None for joint modes (then ``robot.joint_names`` is needed, and only
            ``limits.max_joint_step`` limits them) and for ``twist_stamped``.

    Attributes:
        arm_names: Joints of the arm in command order; empty for a twist without kinematics.
        names: Joints of a command: the arm's and then the fingers.
        counters: How often each limit changed a target, by the reason's value. Besides: ``gripper_speed``,
            ``not_reached`` (kinematics stayed more than 5 mm away from the target) and ``tip_shortened`` (joint
            limits bent the tip's path, and the step was shortened for it). These three never stop the arm.

    Raises:
        ConfigError: The options, the URDF and the policy do not fit together.
    """

    def __init__(self, config: Config, spec: PolicySpec, kinematics: Kinematics | None = None) -> None:
        self._spec = spec
        self._kinematics = kinematics
        self._gripper = Gripper(config.gripper)
        check_fit(config, spec, kinematics)
        self._mode, self._gripper_column = spec.motion, spec.gripper
        self._motion = np.array([number for number in range(spec.dimension) if number != self._gripper_column])
        self.counters: Counter[str] = Counter()
        self.arm_names = kinematics.joint_names if kinematics else tuple(config.robot.joint_names)
        self._arm = MeasuredArm(self.arm_names, kinematics)
        self.configure(config)
        self.joint_speeds = dict(zip(self.arm_names, kinematics.velocity_limits, strict=True)) if kinematics else {}
        self.names = self.arm_names + self._finger_names
        self.reset()

    def configure(self, config: Config) -> None:
        """Take new options that may change while running; where the arm is stays known.

        Raises:
            ConfigError: The limits leave a joint no room.
        """
        n, arm = len(self.arm_names), self._kinematics
        wide = np.full(n, math.inf)
        self._limits = JointLimits.from_config(
            config.limits,
            self.arm_names,
            arm.position_low if arm else -wide,
            arm.position_high if arm else wide,
            arm.velocity_limits if arm else wide,
        )
        self._gripper.configure(config.gripper)
        self._config = config
        has_gripper = self._gripper.is_used and self._gripper_column is not None
        self._finger_names = tuple(config.robot.gripper_joint_names) if has_gripper else ()

    def reset(self) -> None:
        """Forget what was commanded (new episode, after a hold of the driver); the counters stay."""
        self._gripper.reset()
        self._last: FloatArray | None = None
        self._last_velocity: FloatArray = np.zeros(len(self.arm_names))
        self._held: FloatArray | None = None
        self._made: _Made | None = None

    def check(self, chunk: ActionChunk) -> None:
        """Refuse a chunk that has a wrong shape or holds NaN or infinity, before its first step is executed.

        Raises:
            Refused: ``action_invalid``.
        """
        shape = chunk.actions.shape
        if len(shape) != 2 or shape[1] != self._spec.dimension or not 1 <= shape[0] <= self._spec.horizon:
            raise Refused(
                Reason.ACTION_INVALID,
                f"actions have shape {list(shape)}, expected [1 to {self._spec.horizon}, {self._spec.dimension}]",
            )
        if not np.isfinite(chunk.actions).all():
            step, number = np.argwhere(~np.isfinite(chunk.actions))[0]
            raise Refused(Reason.ACTION_INVALID, f"number {number} of step {step} is {chunk.actions[step, number]}")

    def check_joints(self, joints: JointState) -> None:
        """Refuse a measurement that no command may be built on; from any thread.

        Raises:
            Refused: ``joint_state_invalid``, with what is wrong.
        """
        self._arm.check(self._arm.positions(joints))

    def command(
        self,
        action: FloatArray,
        joints: JointState | None,
        stamp: int,
        dt: float,
        reference: JointState | None = None,
    ) -> Command:
        """The command for one action. Call :meth:`executed` once it was sent.

        Args:
            action: Float64 [D], un-normalised.
            joints: Newest joint state; None only for a twist without kinematics.
            stamp: Stamp of the frame from which the action came, nanoseconds.
            dt: Seconds until the next command.
            reference: Joint state at the frame's stamp, from which deltas count; None takes ``joints``.

        Raises:
            Refused: With the reason; nothing of the command may be sent.
        """
        if not (math.isfinite(dt) and dt > 0):
            raise Refused(Reason.CLOCK_JUMP, f"{dt} s until the next command, expected more than 0")
        if action.shape != (self._spec.dimension,) or not all(map(math.isfinite, action.tolist())):
            raise Refused(
                Reason.ACTION_INVALID,
                f"found {np.array2string(action, precision=4)}, expected {self._spec.dimension} finite numbers",
            )
        motion = np.asarray(action, dtype=np.float64)[self._motion]
        if self._mode == "tip_delta" and self._kinematics is None:
            return self._twist_only(motion, stamp, dt, self._fingers(action, joints, dt))
        measured = self._arm.positions(joints)
        self._arm.check(measured)
        reach = self._limits.step
        origin = measured
        if self._last is not None and self._config.control.delta_from == "commanded":
            origin = np.minimum(np.maximum(self._last, measured - reach), measured + reach)
        start = origin
        if origin is measured and reference is not None and reference is not joints:
            start = self._arm.positions(reference)
        positions = self._limited(self._target(start, motion), measured, origin, dt)
        twist, frame = None, ""
        if self._kinematics is not None:
            frame = self._kinematics.base_frame
            if self._config.control.output == "twist_stamped":
                ends = self._kinematics.forward(origin), self._kinematics.forward(positions)
                twist = twist_between(*ends, dt)
        fingers = self._fingers(action, joints, dt)
        self._made = _Made(positions, (positions - origin) / dt, fingers)
        return Command(
            names=self.names,
            positions=np.array(positions.tolist() + fingers),
            stamp=stamp,
            duration=dt,
            frame_id=frame,
            twist=twist,
        )

    def executed(self) -> None:
        """The command that was made last was sent: what follows starts from it.

        A command that was made and not sent (the arm holds) leaves no trace without this.
        """
        made, self._made = self._made, None
        if made is not None:
            self._last, self._last_velocity, self._held = made.positions, made.velocity, None
            if made.fingers:
                self._gripper.sent(made.fingers[0])

    def hold(self, joints: JointState | None) -> Command:
        """Keep the last measured position (never zeros); a twist stands still.

        The position is the one measured when the hold began: an arm that sags does not creep down with its own
        measurements. It is measured anew once a joint is more than 0.02 rad or m away from it (somebody moved
        the arm). Fingers keep what they were told, so that nothing is dropped, and their measured position where
        they were told nothing yet. The next command starts from rest.

        Where the measured position is an old one, the arm may have gone on since: no further than one step, because
        every step begins at the newest measurement (``control.delta_from: commanded``: no further than
        ``limits.max_joint_step`` from it). The way back takes as long as the velocity limits ask for
        (``Command.duration``, which trajectories carry).

        Raises:
            Refused: ``joint_state_stale`` or ``joint_state_invalid``: nothing usable was measured, so nothing
                can be sent. A twist stands still whatever is measured.
        """
        before, self._last = self._last, None
        self._last_velocity, self._made = np.zeros(len(self.arm_names)), None
        if self._config.control.output == "twist_stamped":
            frame = self._kinematics.base_frame if self._kinematics else self._twist_frame
            names, positions = self._held_fingers(joints)
            return Command(
                names,
                np.array(positions),
                joints.stamp if joints else 0,
                hold=True,
                frame_id=frame,
                twist=(np.zeros(3), np.zeros(3)),
            )
        measured = self._arm.positions(joints)
        assert joints is not None
        if self._held is None or np.any(np.abs(measured - self._held) > _SAG):
            self._held = measured
        names, positions = self._held_fingers(joints)
        return Command(
            self.arm_names + names,
            np.array(self._held.tolist() + positions),
            joints.stamp,
            hold=True,
            duration=0.0 if before is None else self._shortest(np.abs(self._held - before)),
        )

    def _held_fingers(self, joints: JointState | None) -> tuple[tuple[str, ...], list[float]]:
        """Names and positions of the fingers in a hold; those that were told nothing and are not measured lack.

        Raises:
            Refused: The message would lack a joint that its driver insists on.
        """
        target = self._gripper.target
        found = {name: target if target is not None else position_of(joints, name) for name in self._finger_names}
        known = {name: position for name, position in found.items() if position is not None}
        if len(known) == len(found):
            return tuple(known), list(known.values())
        if self._config.topics.gripper:  # told nothing yet: there is nothing to end
            return (), []
        if self._config.control.output in _WHOLE:
            missing = sorted(set(found) - set(known))
            raise Refused(
                Reason.JOINT_STATE_INVALID,
                f"finger joints {missing} are not measured and were told nothing yet, and "
                f"{self._config.control.output} must name every joint",
            )
        return tuple(known), list(known.values())

    def _shortest(self, distance: FloatArray) -> float:
        """Seconds that a way of ``distance`` [N] takes at the velocity limits."""
        seconds = [d / v for d, v in zip(distance.tolist(), self._limits.velocity.tolist(), strict=True) if v > 0]
        return max(seconds, default=0.0)

    @property
    def _twist_frame(self) -> str:
        """Frame of a twist that no kinematics of ours turns into the base frame."""
        robot = self._config.robot
        return robot.tip_frame if self._config.control.delta_frame == "tip" else robot.base_frame

    def _target(self, start: FloatArray, motion: FloatArray) -> FloatArray:
        """Joint positions [N] that an action's motion [D without gripper] wants from ``start`` [N]."""
        if self._mode == "joint_position":
            return motion
        if self._mode == "joint_delta":
            return start + motion
        assert self._kinematics is not None
        config = self._config
        delta, violations = read_delta(motion, config.control, config.limits)
        pose = self._kinematics.forward(start)
        wanted, outside = draw_into_box(delta.apply(pose, config.control.delta_frame), pose, config.limits)
        self._apply(violations + outside)
        solved = self._kinematics.solve(
            start,
            wanted,
            low=self._limits.low,
            high=self._limits.high,
            posture=np.array(config.robot.home) if config.robot.home else None,
        )
        if math.dist(self._kinematics.forward(solved).position.tolist(), wanted.position.tolist()) > _REACHED:
            self.counters["not_reached"] += 1
        return solved

    def _limited(self, target: FloatArray, measured: FloatArray, origin: FloatArray, dt: float) -> FloatArray:
        """Positions [N] that may be sent, on the way from ``origin`` to ``target``."""
        positions, violations = limit_joints(target, measured, origin, self._last_velocity, dt, self._limits)
        self._apply(violations)
        if self._kinematics is None:
            return positions
        is_pose = self._mode == "tip_delta"
        limits = self._config.limits
        positions, wrong = shorten_for_tip(self._kinematics, origin, positions, limits, steps=is_pose)
        if wrong and is_pose:  # the target was right: what bent its path is no fault of the policy's
            self.counters["tip_shortened"] += 1
        elif wrong:
            self._apply([Violation(Reason.LIMIT_WORKSPACE, wrong)])
        return positions

    def _twist_only(self, motion: FloatArray, stamp: int, dt: float, fingers: list[float]) -> Command:
        """A twist for a servo that does the kinematics itself; only the step limits apply."""
        config = self._config
        delta, violations = read_delta(motion, config.control, config.limits)
        self._apply(violations)
        self._made = _Made(np.zeros(0), np.zeros(0), fingers)
        return Command(
            names=self._finger_names,
            positions=np.array(fingers),
            stamp=stamp,
            duration=dt,
            frame_id=self._twist_frame,
            twist=(delta.translation / dt, rotation_vector(delta.rotation) / dt),
        )

    def _fingers(self, action: FloatArray, joints: JointState | None, dt: float) -> list[float]:
        """Positions of the finger joints, all the same."""
        if not self._finger_names or self._gripper_column is None:
            return []
        measured = position_of(joints, self._finger_names[0])
        position, slowed = self._gripper.command(float(action[self._gripper_column]), measured, dt)
        if slowed:
            self.counters["gripper_speed"] += 1
        return [position] * len(self._finger_names)

    def _apply(self, violations: Iterable[Violation]) -> None:
        """Count violations; refuse where the options say that they stop the arm.

        Raises:
            Refused: With ``limits.on_violation: stop``.
        """
        for violation in violations:
            self.counters[violation.reason.value] += 1
            if self._config.limits.on_violation == "stop":
                raise Refused(violation.reason, violation.detail)
