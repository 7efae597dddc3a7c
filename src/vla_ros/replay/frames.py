"""The answered frames of all bags as arrays, and the moments with the largest errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vla_ros.replay import metrics
from vla_ros.replay.samples import Samples
from vla_ros.types import FloatArray, IntArray

APART_S = 0.5
"""Least time between two of the worst moments of a bag, seconds."""


@dataclass(frozen=True)
class Frames:
    """Answered frames: M rows in order of time; bags follow each other and episodes are numbered throughout.

    ``times`` are seconds since the first frame of the first bag, with one second between bags; ``openings`` is how
    far the measured fingers are open. Other fields as in :class:`~vla_ros.replay.samples.Samples`.
    """

    predicted: FloatArray
    recorded: FloatArray
    normalized: FloatArray
    openings: FloatArray
    times: FloatArray
    episodes: IntArray

    @property
    def compared(self) -> IntArray:
        """Rows with a recorded action."""
        return np.flatnonzero(np.isfinite(self.recorded).any(axis=1))

    def take(self, rows: IntArray) -> Frames:
        """Only the frames ``rows``."""
        return Frames(**{name: array[rows] for name, array in vars(self).items()})


def gather(samples: Sequence[Samples]) -> Frames:
    """Joins the frames of all bags."""
    first_episode, origin, times, episodes = 0, 0.0, [], []
    for bag in samples:
        times.append((bag.times - bag.times[:1]) * 1e-9 + origin)
        episodes.append(bag.episodes + first_episode)
        if len(bag.times):
            origin = float(times[-1][-1]) + 1.0
            first_episode += int(bag.episodes[-1]) + 1
    joined = {
        name: np.concatenate([getattr(bag, name) for bag in samples])
        for name in ("predicted", "recorded", "normalized", "openings")
    }
    return Frames(**joined, times=np.concatenate(times), episodes=np.concatenate(episodes))


class Moment(NamedTuple):
    """One frame: index of the bag, row in its samples, and its error as :func:`errors` returns it."""

    bag: int
    row: int
    error: float


def errors(samples: Sequence[Samples]) -> list[FloatArray]:
    """Error of each frame of each bag, [F]: the mean of |error| / standard deviation of the recorded number.

    NaN where nothing was recorded; numbers that hardly vary do not count.
    """
    spread = np.nan_to_num(metrics.std(np.concatenate([bag.recorded for bag in samples])))
    scale = np.where(spread > 1e-6, spread, np.inf)
    return [metrics.mean(np.abs(bag.predicted - bag.recorded) / scale, axis=1) for bag in samples]


def worst(samples: Sequence[Samples], count: int = 10) -> list[Moment]:
    """The frames with the largest errors, the worst first, none within :data:`APART_S` seconds of another."""
    moments = [
        Moment(bag, row, error)
        for bag, found in enumerate(errors(samples))
        for row, error in enumerate(found.tolist())
        if error > 0  # NaN is not
    ]
    chosen: list[Moment] = []
    for moment in sorted(moments, key=lambda item: -item.error):
        times = samples[moment.bag].times
        near = [other.row for other in chosen if other.bag == moment.bag]
        if (np.abs(times[near] - times[moment.row]) > APART_S * 1e9).all():
            chosen.append(moment)
        if len(chosen) == count:
            break
    return chosen
