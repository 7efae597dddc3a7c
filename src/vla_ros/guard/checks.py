"""What the guard checks again of every command of one arm. Pure logic; it rejects and never clamps.

Each check has a tolerance for rounding only, because the node applies the same limits. Motions that bring a joint
back towards its range pass. Not checked: the tip's step and box, collisions, and the speed of fingers.
"""

import math
from collections.abc import Iterable

import numpy as np

from vla_ros.config import Config
from vla_ros.config.takeover import PERSON_RATE_HZ
from vla_ros.control.arm_options import ArmOptions
from vla_ros.control.command import Command, lifetime
from vla_ros.control.measured import position_of
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


class ArmCheck(ArmOptions):
    """The limits of one arm, read from the options again.

    Attributes:
        fastest: How fast each joint can move, [N].
        motion: The kind of its motions.
        count: Numbers of a motion: N, or 6 of a twist.
        longest_lifetime: Nanoseconds for which a frame may be in force, whatever it says.
    """

    def __init__(self, config: Config, name: str, kinematics: Kinematics | None) -> None:
        super().__init__(config, name, kinematics)
        self.fastest = np.array(list(self.speeds.values()))
        limits, self._accelerates = self.envelope.joints, math.isfinite(self.envelope.joints.acceleration)
        self._speeds = limits.velocity.tolist()
        columns = limits.low.tolist(), limits.high.tolist(), self._speeds, limits.lead.tolist()
        self._joints = list(zip(self.joint_names, *columns, strict=True))
        self.motion = Kind.VELOCITIES if self.sends_velocities else Kind.POSITIONS
        self.motion = Kind.TWIST if self.sends_twists else self.motion
        self.count = 6 if self.sends_twists else len(self.joint_names)
        self._fingers = self.arm.robot.gripper_joint_names
        self._lifetime = lifetime(config)
        step = RateLimiter(config.control.rate_hz).period
        periods = (step,) if config.takeover.input == "none" else (step, 1 / PERSON_RATE_HZ)
        self._durations = _SHORTEST * min(periods) * self.sends_velocities, max(periods)
        seconds = self._lifetime if self.sends_velocities else config.timeouts.inference + _SPARE
        self.longest_lifetime = round(1e9 * seconds)

    def split(self, frame: GuardFrame) -> tuple[FloatArray, FloatArray]:
        """Return the numbers of a motion or a hold, and the fingers' positions [F], NaN without a command."""
        return frame.values[: self.count], frame.values[self.count :]

    def check_form(self, frame: GuardFrame) -> None:
        """Raise ValueError if a motion or a hold is none of this arm's, wherever it is."""
        if frame.kind not in (self.motion, Kind.HOLD):
            raise ValueError(f"found {frame.kind.name}, expected {self.motion.name}")
        values, fingers = frame.values.tolist(), len(self._fingers)
        if len(values) != self.count + fingers:
            raise ValueError(f"found {len(values)} numbers, expected {self.count} and {fingers} fingers")
        if not all(map(math.isfinite, values[: self.count])) or any(map(math.isinf, values)):
            raise ValueError(f"found {values}, expected finite numbers")
        if frame.kind is not Kind.HOLD:
            least, most = self._durations
            inside = frame.duration > 0 and least <= frame.duration * _SHARE <= most * _SHARE * _SHARE
            _require(inside, f"found a step of {frame.duration} s, expected {least:.4g} to {most:.4g} s")

    def check_motion(
        self, frame: GuardFrame, measured: MeasuredRange | None, origins: Iterable[FloatArray], before: FloatArray
    ) -> FloatArray:
        """Return the speed [N] of a motion; raises ValueError with what was found and what is allowed.

        Args:
            frame: The motion.
            measured: Where the arm was; None for a twist without kinematics.
            origins: Positions [N] at which the step may start: the last command, and where the arm was.
            before: Speed of the last motion [N].
        """
        numbers, _ = self.split(frame)
        if self.motion is Kind.TWIST:
            self._check_twist(numbers, frame.duration)
            return np.zeros(len(self.joint_names))
        assert measured is not None
        ends, dt, speeds, wrong = numbers.tolist(), frame.duration, list[FloatArray](), ""
        if self.sends_velocities:
            starts = np.where((numbers > 0) ^ measured.certain, measured.low, measured.high)
            self._require_step(starts.tolist(), (starts + numbers * dt).tolist(), measured, before, dt)
            return np.abs(numbers)
        for origin in origins:
            try:
                self._require_step(origin.tolist(), ends, measured, before, dt)
            except ValueError as error:
                wrong = wrong or str(error)
                continue
            if not self._accelerates:  # it matters only once an acceleration is limited
                return np.minimum(self.envelope.joints.velocity, self.envelope.joints.step / dt)
            speeds.append(np.abs(numbers - origin) / dt)
        if not speeds:
            raise ValueError(wrong or "found no command from which it may continue")
        # It may also have begun where the arm was, as after a hold.
        reach = np.array([self._reach(*each, dt) for each in zip(self._speeds, before.tolist(), strict=True)])
        if np.all(np.abs(numbers - np.clip(numbers, measured.low, measured.high)) <= reach):
            farthest = np.maximum(np.abs(numbers - measured.low), np.abs(numbers - measured.high))
            speeds.append(np.minimum(farthest, reach) / dt)
        return np.max(speeds, axis=0)  # type: ignore[no-any-return]

    def _reach(self, fastest: float, before: float, dt: float) -> float:
        """Return the longest step of ``dt`` seconds; a joint that is too fast slows down within its limit."""
        limits = self.envelope.joints
        return min(max(fastest, before - limits.acceleration * dt) * dt, limits.step)

    def is_at(self, frame: GuardFrame, held: FloatArray) -> bool:
        """Return True if a frame has the positions ``held`` [N]."""
        return bool(np.allclose(frame.values[: len(held)], held, rtol=0, atol=_ROUNDING))

    def check_hold(
        self, frame: GuardFrame, measured: MeasuredRange | None, held: FloatArray | None, origins: list[FloatArray]
    ) -> None:
        """Raise ValueError if a hold is neither at the measured position nor at the ``held`` one [N], or too slow.

        It comes from one of ``origins`` [N].
        """
        limits, numbers, most = self.envelope.joints, self.split(frame)[0], _HOLDING
        if not self.sends_velocities:
            free, far = limits.velocity > 0, [limits.lead, *(np.abs(numbers - each) for each in origins)]
            most += 2 * float(np.max(np.max(far, axis=0)[free] / limits.velocity[free], initial=0.0))
        inside = 0 <= frame.duration <= most
        _require(inside, f"found a hold that takes {frame.duration} s, expected at most {most:.3g} s")
        if self.sends_velocities:
            _require(not numbers.any(), f"found a hold with {numbers.tolist()}, expected zeros")
        elif held is None or not self.is_at(frame, held):
            assert measured is not None
            joints = zip(self._joints, numbers.tolist(), measured.nearest(numbers).tolist(), strict=True)
            for (name, *_, lead), to, at in joints:
                _require_near(name, "held", to, "measured", at, lead)

    def command(self, frame: GuardFrame) -> Command:
        """Return the command that a checked motion or hold stands for."""
        numbers, values = (part.tolist() for part in self.split(frame))
        fingers = {name: at for name, at in zip(self._fingers, values, strict=True) if not math.isnan(at)}
        joints = {} if self.sends_twists else dict(zip(self.joint_names, numbers, strict=True))
        positions = fingers if self.sends_velocities else joints | fingers
        return Command(
            names=tuple(positions),
            positions=np.array([*positions.values()]),
            stamp=frame.stamp,
            arm=self.arm.name,
            hold=frame.kind is Kind.HOLD,
            duration=frame.duration,
            frame_id=self.frame,
            twist=(np.array(numbers[:3]), np.array(numbers[3:])) if self.sends_twists else None,
            velocities=joints if self.motion is Kind.VELOCITIES else None,
        )

    def _require_step(
        self, starts: list[float], ends: list[float], measured: MeasuredRange, before: FloatArray, dt: float
    ) -> None:
        """Raise ValueError for a joint that must not move from its start to its end in ``dt`` seconds.

        ``before`` is its speed then.
        """
        limits, lasts = self.envelope.joints, max(1.0, self._lifetime / dt) if self.sends_velocities else 1.0
        seen = zip(starts, ends, *(each.tolist() for each in (measured.low, measured.high, before)), strict=True)
        for (name, least, most, fastest, lead), (start, end, down, up, was) in zip(self._joints, seen, strict=True):
            _require_near(name, "commanded", end, "from", start, self._reach(fastest, was, dt))
            step, far = end - start, start + lasts * (end - start)
            beyond = max(far - most if step > _ROUNDING else 0.0, least - far if step < -_ROUNDING else 0.0)
            if beyond > _ROUNDING:
                raise ValueError(f"joint '{name}' is out of its range at {far:.6g}, from {start:.6g}")
            near = start if self.sends_velocities else min(max(end, down), up)
            if measured.certain:  # the farthest
                near = down if abs(end - down) > abs(end - up) else up
            if not self.sends_velocities:
                _require_near(name, "commanded", end, "measured", near, lead)
            if self._accelerates:
                returns = max(start, up) > most or min(start, down) < least
                if measured.certain or not (returns or abs(end - near) < abs(start - near)):  # it gives way
                    reach = (was + _EASE * limits.acceleration * dt) * dt
                    _require_near(name, "accelerated to", end, "from", start, reach)

    def _check_twist(self, twist: FloatArray, dt: float) -> None:
        limits = self.arm.limits
        pairs = (twist[:3], limits.max_translation_step, "m/s"), (twist[3:], limits.max_rotation_step, "rad/s")
        for vector, step, unit in pairs:
            size, most = math.hypot(*vector.tolist()), step / dt * _TWIST
            _require(size <= most + _ROUNDING, f"found a twist of {size:.4g} {unit}, allowed {most:.4g}")

    def check_fingers(self, frame: GuardFrame, joints: JointState | None) -> None:
        """Raise ValueError for a finger outside of its range, unless a hold has it where ``joints`` measure it."""
        low, high = sorted((self.arm.gripper.closed_position, self.arm.gripper.open_position))
        for name, finger in zip(self._fingers, self.split(frame)[1].tolist(), strict=True):
            if low - _ROUNDING <= finger <= high + _ROUNDING or math.isnan(finger):
                continue
            at, spare = position_of(joints, name), _BEYOND * (high - low)
            near = frame.kind is Kind.HOLD and at is not None and abs(finger - at) <= spare
            _require(near, f"found '{name}' at {finger:g}, allowed {low:g} to {high:g}; measured at {at}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _require_near(name: str, what: str, at: float, to: str, other: float, allowed: float) -> None:
    found = abs(at - other)
    if found > allowed * _SHARE + _ROUNDING:
        raise ValueError(
            f"joint '{name}' is {what} {at:.6g}, {to} {other:.6g}: {found:.4g} apart, allowed {allowed:.4g}"
        )
