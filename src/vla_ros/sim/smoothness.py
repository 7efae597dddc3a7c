"""Measures how regularly commands arrive, and how smooth the motion is between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_ros.types import FloatArray, IntArray

_LATE = 1.5  # periods after which a missing command counts as a stall
_QUANTILE = 99
_FEWEST = 8  # samples, below which the ratio says nothing


@dataclass(frozen=True)
class Commands:
    """The commands of an episode, as the robot's side receives them."""

    # Arrivals, seconds, and the end of the episode, float64 [T + 1]; empty in lockstep.
    times: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Of the frame behind each, nanoseconds, int64 [T]; commands of one chunk share theirs.
    stamps: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Of the arm's joints, float64 [T, N], radians.
    positions: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def gaps(self) -> FloatArray:
        """Seconds from each command to the next, or to the end."""
        return np.diff(self.times)

    def accelerations(self, rate_hz: float) -> tuple[FloatArray, FloatArray]:
        """Return the norm of the commanded joint acceleration, rad/s^2, at chunk boundaries and within chunks.

        Each value is computed from three consecutive commands, assumed to be ``1 / rate_hz`` apart.
        """
        if len(self.stamps) < 3:
            return np.zeros(0), np.zeros(0)
        found = np.linalg.norm(np.diff(self.positions, n=2, axis=0), axis=1) * rate_hz**2
        seam = (self.stamps[2:] != self.stamps[1:-1]) | (self.stamps[1:-1] != self.stamps[:-2])
        return found[seam], found[~seam]


def stalled_share(episodes: Sequence[Commands], rate_hz: float) -> float | None:
    """Return the share of time in which a command was overdue; None in lockstep."""
    gaps = np.concatenate([np.zeros(0), *(commands.gaps for commands in episodes)])
    if not len(gaps):
        return None
    late = gaps[gaps > _LATE / rate_hz]
    return float((late - 1 / rate_hz).sum() / gaps.sum())


def longest_gap(episodes: Sequence[Commands]) -> float | None:
    """Return the longest gap between two commands in seconds; None in lockstep."""
    return max((float(commands.gaps.max()) for commands in episodes if len(commands.gaps)), default=None)


def seam_ratio(episodes: Sequence[Commands], rate_hz: float) -> float | None:
    """Return the ratio of the 99th percentile accelerations at seams and within chunks; None for single steps."""
    pairs = [commands.accelerations(rate_hz) for commands in episodes]
    seams, inside = (
        (np.concatenate([np.zeros(0), *parts]) for parts in zip(*pairs, strict=True)) if pairs else ((), ())
    )
    if min(len(seams), len(inside)) < _FEWEST:
        return None
    return float(np.percentile(seams, _QUANTILE) / np.percentile(inside, _QUANTILE))
