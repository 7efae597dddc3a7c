"""What the guard checks again of every command of one arm. Pure logic; it rejects and never clamps.

Each check has a tolerance for rounding only, because the node applies the same limits. Motions that bring a joint
back towards its range pass. Not checked: the tip's step and box, collisions, and the speed of fingers.
"""

import math
from copy import copy
from dataclasses import replace

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, Config
from vla_ros.config.takeover import PERSON_RATE_HZ
from vla_ros.control.command import Command, lifetime
from vla_ros.control.envelope import Envelope
from vla_ros.control.measured import MeasuredArm, held_fingers, joint_speeds, position_of, sags
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.guard.frames import GuardFrame, Kind
from vla_ros.guard.history import MeasuredRange
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, JointState

_SPARE = 1.0  # s beyond timeouts.inference, as the node's
_ROUNDING = 1e-6  # rad, m, rad/s or m/s
_SHARE = 1 + 1e-6
_EASE = 2.0  # factor by which an acceleration may exceed its limit: where a step began is not always known
_SHORTEST = 0.4  # of a step; a velocity's last one on the way to rest is no shorter
_HOLDING = 1.0  # s beyond what the joints need, for which a hold may take
_BEYOND = 0.1  # share of the stroke; a measured finger moves by less until it is held
_TWIST = 1.02  # factor by which a twist may exceed its step limits, as docs/safety.md says, and rounding


class ArmCheck:
    """The limits of one arm, read from the options again.

    Attributes:
        arm: The arm's options.
        names: Its N joints in command order; empty for a twist without kinematics.
        envelope: Its limits.
        sags: How far each joint may be from where it is held, [N].
        measured: Reads its positions from joint states.
        speeds: How fast each joint can move, by name.
        fastest: The same, [N].
        sends_velocities: True if motion ends only with another command.
    """

    def __init__(self, config: Config, index: int, kinematics: Kinematics | None) -> None:
        self._index, self._kinematics = index, kinematics
        self.arm = config.arms[index]
        self.names = kinematics.joint_names if kinematics else self.arm.robot.joint_names
        self.names = () if kinematics is None and self.arm.output == "twist_stamped" else self.names
        self.measured = MeasuredArm(self.names, kinematics)
        self.sags = sags(self.names, kinematics)
        self._read(config)

    def configured(self, config: Config) -> "ArmCheck":
        """Return the check with changed options."""
        changed = copy(self)
        changed._read(config)
        return changed

    def _read(self, config: Config) -> None:
        self.arm = config.arms[self._index]
        self.envelope = Envelope.from_config(config, self.arm, self.names, self._kinematics)
        self.speeds = joint_speeds(self.arm, self.names, self._kinematics)
        self.fastest = np.array(list(self.speeds.values()))
        self._accelerates = math.isfinite(self.envelope.joints.acceleration)
        self.sends_velocities = self.arm.output in VELOCITY_OUTPUTS
        self._lifetime = lifetime(config)
        step = RateLimiter(config.control.rate_hz).period
        periods = (step,) if config.takeover.input == "none" else (step, 1 / PERSON_RATE_HZ)
        self._durations = _SHORTEST * min(periods) * self.sends_velocities, max(periods)
        seconds = self._lifetime if self.sends_velocities else config.timeouts.inference + _SPARE
        self.longest = round(1e9 * seconds)  # ns for which a frame may be in force, whatever it says
        robot = self.arm.robot
        frame = robot.tip_frame if config.control.delta_frame == "tip" else robot.base_frame
        self._frame = self._kinematics.base_frame if self._kinematics else frame

    @property
    def motion(self) -> Kind:
        """The kind of this arm's motions."""
        if not self.sends_velocities:
            return Kind.POSITIONS
        return Kind.TWIST if self.arm.output == "twist_stamped" else Kind.VELOCITIES

    def split(self, frame: GuardFrame) -> tuple[FloatArray, FloatArray]:
        """Return the numbers of a motion or a hold, and the fingers' positions [F], NaN without a command."""
        count = 6 if self.motion is Kind.TWIST else len(self.names)
        return frame.values[:count], frame.values[count:]

    def check_form(self, frame: GuardFrame) -> None:
        """Raise ValueError if a motion or a hold is none of this arm's, wherever it is."""
        if frame.kind not in (self.motion, Kind.HOLD):
            raise ValueError(f"found {frame.kind.name}, expected {self.motion.name}")
        numbers, fingers = self.split(frame)
        count, gripper = 6 if self.motion is Kind.TWIST else len(self.names), self.arm.robot.gripper_joint_names
        if len(frame.values) != count + len(gripper):
            found = f"found {len(frame.values)} numbers"
            raise ValueError(f"{found}, expected {count} and {len(gripper)} fingers")
        if not np.isfinite(numbers).all() or np.isinf(fingers).any():
            raise ValueError(f"found {frame.values.tolist()}, expected finite numbers")
        if frame.kind is not Kind.HOLD:
            least, most = self._durations
            inside = frame.duration > 0 and least <= frame.duration * _SHARE <= most * _SHARE * _SHARE
            self._require(inside, f"found a step of {frame.duration} s, expected {least:.4g} to {most:.4g} s")

    def check_motion(
        self, frame: GuardFrame, measured: MeasuredRange | None, origins: list[FloatArray], before: FloatArray
    ) -> FloatArray:
        """Return the speed [N] of a motion; raises ValueError with what was found and what is allowed.

        Args:
            frame: The motion.
            measured: Where the arm was; None for a twist without kinematics.
            origins: Positions [N] at which the step may start: the last command, and where the arm was.
            before: Speed of the last motion [N].
        """
        numbers, fingers = self.split(frame)
        self._check_fingers(fingers)
        if self.motion is Kind.TWIST:
            self._check_twist(numbers, frame.duration)
            return np.zeros(len(self.names))
        assert measured is not None
        if self.sends_velocities:
            start = np.where((numbers > 0) ^ measured.certain, measured.low, measured.high)
            step = numbers * frame.duration
            if why := self._wrong_step(step, start, measured, before, frame.duration):
                raise ValueError(why)
            return np.abs(numbers)
        wrong, steps = "found no command from which it may continue", list[FloatArray]()
        for origin in origins:
            why = self._wrong_step(numbers - origin, origin, measured, before, frame.duration)
            if not why:
                steps.append(np.abs(numbers - origin))
                if not self._accelerates:
                    break  # the speed matters for an acceleration alone
            elif origin is origins[0]:
                wrong = why
        if not steps:
            raise ValueError(wrong)
        # It may also have begun where the arm was, as after a hold.
        reach = self._reach(before, frame.duration)
        if self._accelerates and np.all(np.abs(numbers - np.clip(numbers, measured.low, measured.high)) <= reach):
            ends = np.abs(numbers - measured.low), np.abs(numbers - measured.high)
            steps.append(np.minimum(np.maximum(*ends), reach))
        return np.max(steps, axis=0) / frame.duration  # type: ignore[no-any-return]

    def _reach(self, before: FloatArray, dt: float) -> FloatArray:
        """Return the longest step [N] of ``dt`` seconds; a joint that is too fast slows down within its limit."""
        limits = self.envelope.joints
        fastest = limits.velocity
        if self._accelerates:
            fastest = np.maximum(fastest, before - limits.acceleration * dt)
        return np.minimum(fastest * dt, limits.step)

    def is_at(self, frame: GuardFrame, held: FloatArray) -> bool:
        """Return True if a frame has the positions ``held`` [N]."""
        return bool(np.allclose(frame.values[: len(held)], held, rtol=0, atol=_ROUNDING))

    def check_hold(
        self,
        frame: GuardFrame,
        measured: MeasuredRange | None,
        held: FloatArray | None,
        joints: JointState | None,
        origins: list[FloatArray],
    ) -> None:
        """Raise ValueError if a hold is neither at the measured position nor at the ``held`` one [N], or too slow.

        It comes from one of ``origins`` [N]. Fingers outside of their range must be where ``joints`` has them.
        """
        limits, (numbers, fingers) = self.envelope.joints, self.split(frame)
        self._check_fingers(fingers, joints)
        most = _HOLDING
        if not self.sends_velocities:
            free, far = limits.velocity > 0, [limits.lead, *(np.abs(numbers - each) for each in origins)]
            most += 2 * float(np.max(np.max(far, axis=0)[free] / limits.velocity[free], initial=0.0))
        inside = 0 <= frame.duration <= most
        self._require(inside, f"found a hold that takes {frame.duration} s, expected at most {most:.3g} s")
        if self.sends_velocities:
            self._require(not numbers.any(), f"found a hold with {numbers.tolist()}, expected zeros")
        elif held is None or np.any(np.abs(numbers - held) > _ROUNDING):
            assert measured is not None
            near = measured.nearest(numbers)
            wrong = self._beyond(np.abs(numbers - near), limits.lead, numbers, near, "held", "measured")
            self._require(not wrong, wrong)

    def command(self, frame: GuardFrame) -> Command:
        """Return the command that a checked motion or hold stands for."""
        numbers, values = self.split(frame)
        known = {
            name: value
            for name, value in zip(self.arm.robot.gripper_joint_names, values.tolist(), strict=True)
            if not math.isnan(value)
        }
        holds = frame.kind is Kind.HOLD
        return self._command(numbers, known, frame.stamp, frame.duration, hold=holds)

    def hold(self, positions: FloatArray, fingers: dict[str, float | None], stamp: int, duration: float) -> Command:
        """Return a hold at ``positions`` [N], or zero velocity; raises Refused if the driver needs more joints."""
        numbers = (
            positions
            if not self.sends_velocities
            else np.zeros(6 if self.motion is Kind.TWIST else len(self.names))
        )
        return self._command(numbers, held_fingers(self.arm, fingers), stamp, duration, hold=True)

    def _command(
        self, numbers: FloatArray, fingers: dict[str, float], stamp: int, duration: float, *, hold: bool
    ) -> Command:
        ends = list(fingers.values())
        command = Command(
            arm=self.arm.name,
            names=tuple(fingers),
            positions=np.array(ends),
            stamp=stamp,
            hold=hold,
            duration=duration,
            frame_id=self._frame if self.sends_velocities or self._kinematics else "",
        )
        if self.motion is Kind.TWIST:
            return replace(command, twist=(numbers[:3], numbers[3:]))
        if self.motion is Kind.VELOCITIES:
            return replace(command, velocities=dict(zip(self.names, numbers.tolist(), strict=True)))
        positions = np.concatenate((numbers, ends))
        return replace(command, names=self.names + tuple(fingers), positions=positions)

    def _wrong_step(
        self, step: FloatArray, origin: FloatArray, measured: MeasuredRange, before: FloatArray, dt: float
    ) -> str:
        """Return what is wrong with a ``step`` [N] of ``dt`` seconds from ``origin`` [N], or ""."""
        limits, end = self.envelope.joints, origin + step
        found = [self._beyond(np.abs(step), self._reach(before, dt), end, origin, "commanded", "from")]
        lasts = max(1.0, self._lifetime / dt) if self.sends_velocities else 1.0
        far = origin + lasts * step
        outside = np.maximum(far - limits.high, limits.low - far)
        leaves = np.where(far > limits.high, step > _ROUNDING, step < -_ROUNDING)
        outside = np.where(leaves, outside, 0.0)
        found.append(self._beyond(outside, np.zeros(len(step)), far, origin, "out of its range at", "from"))
        near = measured.nearest(end)
        if not self.sends_velocities:
            found.append(self._beyond(np.abs(end - near), limits.lead, end, near, "commanded", "measured"))
        if math.isfinite(limits.acceleration):
            returns = (np.maximum(origin, measured.high) > limits.high) | (
                np.minimum(origin, measured.low) < limits.low
            )
            returns |= np.abs(end - near) < np.abs(origin - near)  # it gives way
            returns &= not measured.certain
            most = np.where(returns, np.inf, (before + _EASE * limits.acceleration * dt) * dt)
            found.append(self._beyond(np.abs(step), most, end, origin, "accelerated to", "from"))
        return next(filter(None, found), "")

    def _check_twist(self, twist: FloatArray, dt: float) -> None:
        limits = self.arm.limits
        pairs = (twist[:3], limits.max_translation_step, "m/s"), (twist[3:], limits.max_rotation_step, "rad/s")
        for vector, step, unit in pairs:
            size, most = math.hypot(*vector.tolist()), step / dt * _TWIST
            self._require(size <= most + _ROUNDING, f"found a twist of {size:.4g} {unit}, allowed {most:.4g}")

    def _check_fingers(self, fingers: FloatArray, joints: JointState | None = None) -> None:
        low, high = sorted((self.arm.gripper.closed_position, self.arm.gripper.open_position))
        for name, finger in zip(self.arm.robot.gripper_joint_names, fingers.tolist(), strict=True):
            at, spare = position_of(joints, name), _BEYOND * (high - low)
            least, most = (low, high) if at is None else (min(low, at - spare), max(high, at + spare))
            inside = math.isnan(finger) or least - _ROUNDING <= finger <= most + _ROUNDING
            self._require(inside, f"found '{name}' at {finger:g}, allowed {least:.4g} to {most:.4g}")

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise ValueError(otherwise)

    def _beyond(
        self, found: FloatArray, allowed: FloatArray, one: FloatArray, other: FloatArray, what: str, to: str
    ) -> str:
        """Name both positions of the worst joint if a ``found`` [N] is beyond ``allowed`` [N]; else return ""."""
        excess = found - (allowed * _SHARE + _ROUNDING)
        if not np.any(excess > 0):
            return ""
        worst = int(np.argmax(excess))
        return (
            f"joint '{self.names[worst]}' is {what} {one[worst]:.6g}, {to} {other[worst]:.6g}: "
            f"{found[worst]:.4g} apart, allowed {allowed[worst]:.4g}"
        )
