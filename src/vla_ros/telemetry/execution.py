"""Measures how steadily the plan is executed, for diagnostics, ``vla-ros top``, metrics, the demo and replay."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.control.clock import Now
from vla_ros.control.command import Command
from vla_ros.control.outcome import StepResult
from vla_ros.telemetry.steadiness import Steadiness
from vla_ros.types import FloatArray

_REMEMBERED = 4096


class ExecutionStats:
    """Thread-safe record of the steps that were sent; only recent accelerations and ages are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = self._chunks = self._skipped = 0
        self._ages = deque[float](maxlen=_REMEMBERED)
        self._steadiness = Steadiness(_REMEMBERED)

    def interrupted(self) -> None:
        """Record that motion was interrupted (hold, stop, another task): the pause is neither a gap nor a seam."""
        with self._lock:
            self._steadiness.interrupted()

    def sent(self, step: StepResult, joints: Mapping[str, int], now: Now, period: float) -> None:
        """Record a step whose commands were sent at ``now``.

        Only the first step sent from a chunk has ``step.chunk``. ``joints`` maps each arm to its number of joints,
        which come before the fingers; ``period`` is the time between two steps in seconds.
        """
        positions, speed = _numbers(step.commands, joints)
        with self._lock:
            self._steps += 1
            self._ages.append((now.ros - step.stamp) / 1e6)
            if step.chunk is not None:
                self._chunks += 1
                self._skipped += step.index
            self._steadiness.waited(now.steady / 1e9, period)
            self._steadiness.moved(positions, speed, period, begins_chunk=step.chunk is not None)

    def summary(self) -> dict[str, float]:
        """Return the available figures.

        They are ``steps`` sent; ``chunks`` begun; ``skipped`` steps at the beginning of chunks, executed from the
        previous chunk instead; the age of a step's frame (``age_p50_ms``, ``age_p99_ms``); and
        :meth:`Steadiness.figures`.
        """
        with self._lock:
            found: dict[str, float] = {"steps": self._steps, "chunks": self._chunks, "skipped": self._skipped}
            found |= self._steadiness.figures()
            ages = np.array(self._ages)
        if len(ages):
            found |= dict(zip(("age_p50_ms", "age_p99_ms"), np.percentile(ages, (50, 99)).tolist(), strict=True))
        return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in found.items()}


def _numbers(commands: Sequence[Command], joints: Mapping[str, int]) -> tuple[FloatArray | None, FloatArray | None]:
    """Return (positions, None) of all arms, or (None, velocities) if velocities are commanded."""
    speeds = [np.array(list(each.velocities.values())) for each in commands if each.velocities is not None]
    speeds += [
        np.concatenate(each.twist) for each in commands if each.velocities is None and each.twist is not None
    ]
    if speeds:
        return None, np.concatenate(speeds)
    positions = [each.positions[: joints[each.arm]] for each in commands]
    return (np.concatenate(positions), None) if positions else (None, None)
