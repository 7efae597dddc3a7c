"""What a command may be at most. Functions over numbers; each says which limits it had to apply.

Whatever the target, the result is finite, and nearer to the measured position than it was: clamping never makes
a step larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.config import LimitsConfig
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray

_SLACK = 1 + 1e-9  # rounding is no violation


@dataclass(frozen=True)
class Violation:
    """A target that a limit changed.

    Attributes:
        reason: Which limit.
        detail: What was found and what is allowed, with units.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True)
class JointLimits:
    """Limits of N joints; radians, metres, seconds.

    Attributes:
        names: Joint names, for messages.
        low: Float64 [N], lowest positions (margin included).
        high: Float64 [N].
        velocity: Float64 [N], may be infinite.
        acceleration: Largest change of velocity per second; infinite for none.
        step: Largest distance from the measured position.
    """

    names: tuple[str, ...]
    low: FloatArray
    high: FloatArray
    velocity: FloatArray
    acceleration: float
    step: float

    @classmethod
    def from_config(
        cls, config: LimitsConfig, names: tuple[str, ...], low: FloatArray, high: FloatArray, velocity: FloatArray
    ) -> JointLimits:
        """The URDF's limits, drawn in by the options.

        Raises:
            ConfigError: The margin leaves a joint no room.
        """
        inner_low, inner_high = low + config.joint_margin, high - config.joint_margin
        for name, below, above in zip(names, inner_low, inner_high, strict=True):
            if not below <= above:
                raise ConfigError(
                    f"limits.joint_margin: {config.joint_margin:g} leaves joint '{name}' no room between "
                    f"{below - config.joint_margin:g} and {above + config.joint_margin:g}"
                )
        acceleration = config.max_joint_acceleration or math.inf
        speed = velocity * config.velocity_scale if config.velocity_scale else np.zeros(len(names))
        return cls(names, inner_low, inner_high, speed, acceleration, config.max_joint_step)


def limit_length(vector: FloatArray, limit: float) -> tuple[FloatArray, bool]:
    """``vector`` shortened to ``limit`` where it is longer, without overflow; and True where it was."""
    largest = float(np.abs(vector).max())
    if largest == 0.0:
        return vector, False
    direction = vector / largest
    length = float(np.linalg.norm(direction))
    if largest * length <= limit * _SLACK:
        return vector, False
    return direction * (limit / length), True


def limit_box(
    target: FloatArray, current: FloatArray, low: tuple[float, ...], high: tuple[float, ...]
) -> tuple[FloatArray, bool]:
    """``target`` [3] drawn into the box; and True where it was outside.

    A tip that is outside already (an arm switched on there) may come back or stay, never go further out: the
    box is widened by ``current``.
    """
    inside = np.clip(target, np.minimum(low, current), np.maximum(high, current))
    return inside, bool(np.any(np.abs(inside - target) > 1e-9))


def limit_joints(
    target: FloatArray,
    measured: FloatArray,
    origin: FloatArray,
    last_velocity: FloatArray,
    dt: float,
    limits: JointLimits,
) -> tuple[FloatArray, list[Violation]]:
    """Joint positions [N] that may be sent, on the way to ``target``.

    The result is within ``velocity * dt`` of ``origin``, within ``step`` of ``measured``, and within the position
    limits; where ``measured`` is outside those (a stop that gives, an encoder's offset), it goes back as far as
    the other two allow. For velocity and distance the whole step is shortened, so that the arm stays on its
    path. Acceleration is limited joint by joint and yields to the others.

    Args:
        target: Wanted positions, finite, [N].
        measured: Newest measured positions, [N].
        origin: Where the step starts: ``measured``, or the last command. Taken no further than ``step`` away
            from ``measured``.
        last_velocity: Velocity of the last command, [N]; zeros after a hold.
        dt: Seconds until the next command.
        limits: What is allowed.
    """
    violations: list[Violation] = []
    origin = np.clip(origin, measured - limits.step, measured + limits.step)

    wanted = np.clip(target, limits.low, limits.high)
    _note(violations, Reason.LIMIT_POSITION, limits, target, wanted)

    step = wanted - origin
    reach = limits.velocity * dt
    slowed = origin + _share(step, -reach, reach) * step
    _note(violations, Reason.LIMIT_VELOCITY, limits, wanted, slowed)

    step = slowed - origin
    near = origin + _share(step, measured - limits.step - origin, measured + limits.step - origin) * step
    _note(violations, Reason.LIMIT_JUMP, limits, slowed, near)

    eased = near
    if math.isfinite(limits.acceleration):
        change = limits.acceleration * dt
        eased = origin + dt * np.clip((near - origin) / dt, last_velocity - change, last_velocity + change)
        _note(violations, Reason.LIMIT_ACCELERATION, limits, near, eased)

    low = np.maximum(origin - reach, measured - limits.step)
    high = np.minimum(origin + reach, measured + limits.step)
    result: FloatArray = np.clip(np.clip(eased, limits.low, limits.high), low, high)
    return result, violations


def _share(step: FloatArray, down: FloatArray, up: FloatArray) -> float:
    """Largest share in [0, 1] of ``step`` that stays between ``down`` (<= 0) and ``up`` (>= 0)."""
    moving = np.abs(step) > 1e-12
    if not moving.any():
        return 1.0
    room = np.where(step > 0, up, down)[moving]
    return max(0.0, min(1.0, float((room / step[moving]).min()) * _SLACK))


def _note(
    violations: list[Violation], reason: Reason, limits: JointLimits, wanted: FloatArray, allowed: FloatArray
) -> None:
    """Add a violation where ``allowed`` differs from ``wanted``, naming the joint that differs most."""
    difference = np.abs(wanted - allowed)
    worst = int(np.argmax(difference))
    if difference[worst] > 1e-9:
        detail = f"joint '{limits.names[worst]}' wanted {wanted[worst]:.4g}, allowed {allowed[worst]:.4g}"
        violations.append(Violation(reason, detail))
