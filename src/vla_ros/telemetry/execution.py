"""Measures how steadily the plan is executed, for diagnostics, ``vla-ros top``, metrics, the demo and replay."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.control.clock import Now
from vla_ros.control.command import Command
from vla_ros.control.outcome import StepResult
from vla_ros.types import FloatArray

_REMEMBERED = 4096
_STALLED = 1.5  # periods between two steps


class ExecutionStats:
    """Thread-safe record of the steps that were sent; of accelerations and ages only recent ones are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = self._chunks = self._skipped = 0
        self._moving = self._stalled = self._longest = 0.0
        self._ages, self._inside, self._seams, self._jerks = (deque[float](maxlen=_REMEMBERED) for _ in range(4))
        self.interrupted()

    def interrupted(self) -> None:
        """Record that motion ended for a reason (hold, stop, another task), so that no gap or seam is counted."""
        self._seam = False  # the last step was the first one of a chunk
        self._last: float | None = None
        self._positions: FloatArray | None = None
        self._speed: FloatArray | None = None
        self._acceleration: FloatArray | None = None

    def sent(self, step: StepResult, joints: Mapping[str, int], now: Now, period: float) -> None:
        """Record a step whose commands were sent at ``now``.

        The first step sent from a chunk passes that ``chunk``. ``joints`` maps each arm to its number of joints,
        which come before the fingers; ``period`` is the time between two steps in seconds.
        """
        at = now.steady / 1e9
        with self._lock:
            self._steps += 1
            self._ages.append((now.ros - step.stamp) / 1e6)
            if step.chunk is not None:
                self._chunks += 1
                self._skipped += step.index
            last, self._last = self._last, at
            if last is not None:
                gap = at - last
                self._moving += gap
                self._longest = max(self._longest, gap)
                if gap > _STALLED * period:
                    self._stalled += gap - period
                    self._positions = self._speed = self._acceleration = None
            self._differentiate(step, joints, period)

    def _differentiate(self, step: StepResult, joints: Mapping[str, int], period: float) -> None:
        """Accelerations and jerks from the commands of successive steps, a period apart."""
        positions, speed = _numbers(step.commands, joints)
        before, self._positions = self._positions, positions
        after_seam, self._seam = self._seam, step.chunk is not None
        if speed is None and positions is not None and before is not None and len(before) == len(positions):
            speed = (positions - before) / period
        slower, self._speed = self._speed, speed
        steady, self._acceleration = self._acceleration, None
        if speed is None or slower is None or len(speed) != len(slower):
            return
        self._acceleration = (speed - slower) / period
        where = self._seams if self._seam or after_seam else self._inside
        where.append(_largest(self._acceleration))
        if steady is not None:
            self._jerks.append(_largest((self._acceleration - steady) / period))

    def summary(self) -> dict[str, float]:
        """Return the figures; without those that do not exist (yet).

        ``steps`` sent, ``chunks`` begun (each is a refill but the first) and ``skipped`` steps of them, which were
        executed from the chunk before; ``seconds`` between steps, the ``stalled_share`` of them beyond a period
        where a gap was longer than 1.5, ``longest_gap_ms``; ages of the frame behind a step, ``age_p50_ms`` and
        ``age_p99_ms``; of commands, 99th percentiles of the joints' largest ``acceleration`` within chunks and
        ``seam_acceleration`` towards and from the first step of a chunk (rad/s^2, m/s^2), their ``seam_ratio``, and
        ``jerk`` (per second more).
        """
        with self._lock:
            found: dict[str, float] = {"steps": self._steps, "chunks": self._chunks, "skipped": self._skipped}
            moving, stalled, longest = self._moving, self._stalled, self._longest
            ages, inside, seams, jerks = map(np.array, (self._ages, self._inside, self._seams, self._jerks))
        if moving:
            found |= {"seconds": moving, "stalled_share": stalled / moving, "longest_gap_ms": 1e3 * longest}
        if len(ages):
            found |= dict(zip(("age_p50_ms", "age_p99_ms"), np.percentile(ages, (50, 99)).tolist(), strict=True))
        for name, values in (("acceleration", inside), ("seam_acceleration", seams), ("jerk", jerks)):
            if len(values):
                found[name] = float(np.percentile(values, 99))
        if found.get("acceleration") and "seam_acceleration" in found:
            found["seam_ratio"] = found["seam_acceleration"] / found["acceleration"]
        return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in found.items()}


def _numbers(commands: Sequence[Command], joints: Mapping[str, int]) -> tuple[FloatArray | None, FloatArray | None]:
    """Return the positions of all arms, or their velocities where those are commanded."""
    speeds = [np.array(list(each.velocities.values())) for each in commands if each.velocities is not None]
    speeds += [
        np.concatenate(each.twist) for each in commands if each.velocities is None and each.twist is not None
    ]
    if speeds:
        return None, np.concatenate(speeds)
    positions = [each.positions[: joints[each.arm]] for each in commands]
    return (np.concatenate(positions), None) if positions else (None, None)


def _largest(values: FloatArray) -> float:
    return max(map(abs, values.tolist()), default=math.nan)
