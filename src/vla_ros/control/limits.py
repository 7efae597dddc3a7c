"""Functions that limit commands and return which limits they applied.

Whatever the target, the result is finite, and clamping never makes a step larger. For a few joints, plain floats
are ten times as fast as numpy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_ros.config import LimitsConfig
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray

_SLACK = 1 + 1e-9  # for rounding
_SAME = 1e-9  # rad or m; smaller differences are rounding


@dataclass(frozen=True)
class Violation:
    """A limit that changed a target; ``detail`` says what was found and what is allowed."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class JointLimits:
    """Limits of N joints; radians, metres, seconds."""

    names: tuple[str, ...]  # joint names, for messages
    low: FloatArray  # float64 [N], lowest positions (margin included)
    high: FloatArray  # float64 [N]
    velocity: FloatArray  # float64 [N], may be infinite
    acceleration: float  # largest change of velocity per second; infinite for no limit
    step: float  # largest step from where the command starts
    lead: FloatArray  # float64 [N], largest distance from the measured position; may be infinite

    @classmethod
    def from_config(
        cls,
        config: LimitsConfig,
        names: tuple[str, ...],
        low: FloatArray,
        high: FloatArray,
        velocity: FloatArray,
        prismatic: NDArray[np.bool_],
    ) -> "JointLimits":
        """Narrow the URDF's limits by the options; raises ConfigError if a joint has no range left.

        ``prismatic`` [N] says which joints move in metres.
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
        speed = np.minimum(speed, config.max_joint_velocity or math.inf)
        lead = np.where(prismatic, config.following_error_prismatic, config.following_error)
        return cls(names, inner_low, inner_high, speed, acceleration, config.max_joint_step, lead)


def brake(target: FloatArray, origin: FloatArray, acceleration: float, dt: float) -> FloatArray:
    """Return the end of a step from ``origin`` to a ``target`` [N] at which all joints can still stop.

    A joint that moves ``dt`` seconds with v, and then decelerates, goes v dt + v^2 / (2 ``acceleration``) further.
    Without this, commands pass a target by turns on either side, perhaps for ever.
    """
    far = float(np.abs(target - origin).max(initial=0.0))
    if math.isinf(acceleration) or far == 0.0:
        return target
    speed = acceleration * (math.sqrt(dt**2 + 2.0 * far / acceleration) - dt)
    return origin + min(1.0, speed * dt / far) * (target - origin)


def limit_length(vector: FloatArray, limit: float) -> tuple[FloatArray, bool]:
    """Shorten ``vector`` to the length ``limit`` if necessary; also return True if it was shortened."""
    values = vector.tolist()
    if math.hypot(*values) <= limit * _SLACK:
        return vector, False
    largest = max(map(abs, values))
    if largest == 0.0:
        return vector, False
    direction = vector / largest
    return direction * (limit / math.hypot(*direction.tolist())), True


def limit_box(
    target: FloatArray, current: FloatArray, low: tuple[float, ...], high: tuple[float, ...]
) -> tuple[FloatArray, bool]:
    """Move ``target`` [3] into the box if necessary; also return True if it was moved.

    The box is extended to ``current``: a tip that is already outside (the arm was switched on there) may stay or
    return, but not move further out.
    """
    wanted, here = target.tolist(), current.tolist()
    inside = [_clip(w, min(a, c), max(b, c)) for w, c, a, b in zip(wanted, here, low, high, strict=True)]
    return np.array(inside), any(abs(i - w) > _SAME for i, w in zip(inside, wanted, strict=True))


def limit_joints(
    target: FloatArray,
    measured: FloatArray,
    origin: FloatArray,
    last_velocity: FloatArray,
    dt: float,
    limits: JointLimits,
) -> tuple[FloatArray, list[Violation]]:
    """Return joint positions [N] that may be sent, and the violations of ``target``.

    The result is within ``velocity * dt`` and ``step`` of ``origin``, within ``lead`` of ``measured``, and within
    the position limits. If ``origin`` is outside the position limits (an elastic end stop, an encoder offset), the
    joint moves back as far as the other limits allow. The velocity, step and lead limits shorten the motion of all
    joints by the same factor, so that the arm stays on its path; the lead is no violation, because it does not
    depend on the target alone. Acceleration is limited per joint; the other limits take precedence.

    Args:
        target: Wanted positions, finite, [N].
        measured: Newest measured positions, [N].
        origin: Start of the step: ``measured``, or the last command, within ``lead`` of ``measured``.
        last_velocity: Velocity of the last command, [N]; zeros after a hold.
        dt: Seconds until the next command.
        limits: The limits.
    """
    violations: list[Violation] = []
    asked, here, farthest = target.tolist(), measured.tolist(), limits.step
    low, high, reach = limits.low.tolist(), limits.high.tolist(), (limits.velocity * dt).tolist()
    start, lead = origin.tolist(), limits.lead.tolist()

    wanted = [_clip(a, below, above) for a, below, above in zip(asked, low, high, strict=True)]
    _note(violations, Reason.LIMIT_POSITION, limits, asked, wanted)

    slowed = _shortened(start, wanted, [-r for r in reach], reach)
    _note(violations, Reason.LIMIT_VELOCITY, limits, wanted, slowed)

    near = _shortened(start, slowed, [-farthest] * len(start), [farthest] * len(start))
    _note(violations, Reason.LIMIT_JUMP, limits, slowed, near)

    down = [min(0.0, m - far - o) for m, far, o in zip(here, lead, start, strict=True)]
    up = [max(0.0, m + far - o) for m, far, o in zip(here, lead, start, strict=True)]
    near = _shortened(start, near, down, up)

    eased = near
    if math.isfinite(limits.acceleration):
        change = limits.acceleration * dt
        eased = [
            o + dt * _clip((n - o) / dt, before - change, before + change)
            for o, n, before in zip(start, near, last_velocity.tolist(), strict=True)
        ]
        _note(violations, Reason.LIMIT_ACCELERATION, limits, near, eased)

    result = [
        _clip(_clip(e, below, above), max(o - min(r, farthest), m - far), min(o + min(r, farthest), m + far))
        for e, below, above, o, r, m, far in zip(eased, low, high, start, reach, here, lead, strict=True)
    ]
    return np.array(result), violations


def slower(speed: FloatArray, acceleration: float, seconds: float) -> FloatArray:
    """Return ``speed`` [N] after decelerating for ``seconds``."""
    change = acceleration * seconds if seconds > 0 else 0.0
    return speed - np.minimum(np.maximum(speed, -change), change)


def _clip(value: float, low: float, high: float) -> float:
    """Like `numpy.clip`; returns ``high`` if ``low`` is above it."""
    return min(max(value, low), high)


def _shortened(start: list[float], end: list[float], down: Sequence[float], up: Sequence[float]) -> list[float]:
    """Return where a step ends if it is shortened to within ``down`` (<= 0) and ``up`` (>= 0) of its start."""
    step = [e - o for e, o in zip(end, start, strict=True)]
    least = min(
        ((u if s > 0 else d) / s for s, d, u in zip(step, down, up, strict=True) if abs(s) > 1e-12), default=1.0
    )
    share = max(0.0, min(1.0, least * _SLACK))
    return end if share == 1.0 else [o + share * s for o, s in zip(start, step, strict=True)]


def _note(
    violations: list[Violation],
    reason: Reason,
    limits: JointLimits,
    wanted: Sequence[float],
    allowed: Sequence[float],
) -> None:
    """Add a violation for the joint whose ``allowed`` differs most from ``wanted``, if any does."""
    if allowed is wanted:
        return
    difference = [abs(w - a) for w, a in zip(wanted, allowed, strict=True)]
    largest = max(difference, default=0.0)
    if largest > _SAME:
        worst = difference.index(largest)
        detail = f"joint '{limits.names[worst]}' wanted {wanted[worst]:.4g}, allowed {allowed[worst]:.4g}"
        violations.append(Violation(reason, detail))
