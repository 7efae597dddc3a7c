"""Measures how steadily the plan is executed, for diagnostics, ``vla-ros top``, metrics, the demo and replay."""

import math
import threading
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.control.clock import Now
from vla_ros.control.command import Command
from vla_ros.control.outcome import StepResult
from vla_ros.types import FloatArray

REMEMBERED = 4096
"""Numbers of each figure."""

_STALLED = 1.5  # periods between two commands that are a stall
_FEWEST = 8  # fewest accelerations that give a meaningful ratio
_QUANTILE = 99


class Recent:
    """The newest numbers, ``most`` of them (None: all), which numpy copies at once. One thread at a time."""

    def __init__(self, most: int | None) -> None:
        self._most, self._numbers, self._oldest = most, array("d"), 0

    def __len__(self) -> int:
        return len(self._numbers)

    def append(self, number: float) -> None:
        if len(self._numbers) == self._most:
            self._numbers[self._oldest] = number
            self._oldest = (self._oldest + 1) % self._most
        else:
            self._numbers.append(number)

    def read(self) -> FloatArray:
        """Return a copy, oldest first."""
        return np.roll(self._numbers, -self._oldest)


class Steadiness:
    """Gaps between commands, and accelerations at seams and within chunks: the one definition of stalls and seams.

    The node measures the steps it sends; demo and benchmarks the commands that the robot receives. One thread.

    Args:
        remembered: How many of the newest accelerations are kept; None keeps all.
    """

    def __init__(self, remembered: int | None = None) -> None:
        self._seconds = self._stalled = self._longest = 0.0
        self._inside, self._seams, self._jerks = (Recent(remembered) for _ in range(3))
        self.interrupted()

    def interrupted(self) -> None:
        """Forget the last command, so that the next one counts neither as a gap nor as a seam."""
        self._at: float | None = None
        self._was_seam = False
        self._positions: FloatArray | None = None
        self._speed: FloatArray | None = None
        self._acceleration: FloatArray | None = None

    def waited(self, at: float, period: float) -> None:
        """Count the seconds from the last command to ``at``; one command per ``period`` is expected."""
        last, self._at = self._at, at
        if last is not None:
            gap = at - last
            self._seconds += gap
            self._longest = max(self._longest, gap)
            self._stalled += gap - period if gap > _STALLED * period else 0.0

    def moved(
        self, positions: FloatArray | None, speed: FloatArray | None, period: float, *, begins_chunk: bool
    ) -> None:
        """Count a command to move to ``positions`` [N], or at ``speed`` [N] for a ``period``.

        Commands count as one period apart even after a gap, so that a restart counts as acceleration at the seam.
        """
        before, self._positions = self._positions, positions
        is_seam, self._was_seam = begins_chunk or self._was_seam, begins_chunk
        if speed is None and positions is not None and before is not None and len(before) == len(positions):
            speed = (positions - before) / period
        slower, self._speed = self._speed, speed
        steady, self._acceleration = self._acceleration, None
        if speed is None or slower is None or len(speed) != len(slower):
            return
        self._acceleration = (speed - slower) / period
        (self._seams if is_seam else self._inside).append(_length(self._acceleration))
        if steady is not None:
            self._jerks.append(_length((self._acceleration - steady) / period))

    def figures(self) -> dict[str, float]:
        """Return the available figures.

        ``seconds`` is the total time between commands; ``stalled_share`` is the share of it by which commands were
        late, in gaps over 1.5 periods; ``longest_gap_ms`` is the longest gap. 99th percentiles of norms over the
        joints (rad, m, s) are ``acceleration`` within chunks, ``seam_acceleration`` at a chunk's first command, and
        ``jerk``. ``seam_ratio`` is ``seam_acceleration`` divided by ``acceleration``.
        """
        figures = {}
        if self._seconds:
            figures["seconds"], figures["stalled_share"] = self._seconds, self._stalled / self._seconds
            figures["longest_gap_ms"] = 1e3 * self._longest
        kinds = {"acceleration": self._inside, "seam_acceleration": self._seams, "jerk": self._jerks}
        figures |= {
            name: float(np.percentile(values.read(), _QUANTILE)) for name, values in kinds.items() if len(values)
        }
        if min(len(self._inside), len(self._seams)) >= _FEWEST and figures["acceleration"]:
            figures["seam_ratio"] = figures["seam_acceleration"] / figures["acceleration"]
        return figures


def _length(values: FloatArray) -> float:
    return math.hypot(*values.tolist())


class ExecutionStats:
    """Thread-safe record of the steps that were sent; only recent accelerations and ages are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = self._chunks = self._skipped = 0
        self._ages = Recent(REMEMBERED)
        self._steadiness = Steadiness(REMEMBERED)

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
            summary: dict[str, float] = {"steps": self._steps, "chunks": self._chunks, "skipped": self._skipped}
            summary |= self._steadiness.figures()
            ages = self._ages.read()
        if len(ages):
            summary |= dict(zip(("age_p50_ms", "age_p99_ms"), np.percentile(ages, (50, 99)).tolist(), strict=True))
        return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in summary.items()}


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
