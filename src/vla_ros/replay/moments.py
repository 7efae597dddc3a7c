"""Which moments of a recording are worth a look: the worst ones, far enough apart to be different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.replay import metrics
from vla_ros.replay.samples import Samples
from vla_ros.types import FloatArray

APART_S = 0.5


@dataclass(frozen=True)
class Moment:
    """One frame of one bag.

    Attributes:
        bag: Index of the bag.
        row: Row in its samples.
        score: Error in units of how much the recorded numbers vary.
    """

    bag: int
    row: int
    score: float


def scores(samples: Samples, scale: FloatArray) -> FloatArray:
    """Error of each frame, [F]: the mean over numbers of |error| / scale; NaN where nothing was recorded."""
    return metrics.mean(np.abs(samples.predicted - samples.recorded) / scale, axis=1)


def scale_of(samples: Sequence[Samples]) -> FloatArray:
    """Standard deviation of the recorded numbers, [D]; infinite for numbers that hardly vary."""
    recorded = np.concatenate([bag.recorded for bag in samples])
    spread = np.sqrt(metrics.mean((recorded - metrics.mean(recorded)) ** 2))
    return np.where(np.nan_to_num(spread) > 1e-6, spread, np.inf)


def worst(samples: Sequence[Samples], count: int = 10) -> list[Moment]:
    """The frames with the largest errors, the worst first, no two within :data:`APART_S` seconds of a bag."""
    scale = scale_of(samples)
    moments = [
        Moment(index, int(row), float(value))
        for index, bag in enumerate(samples)
        for row, value in enumerate(scores(bag, scale))
        if np.isfinite(value) and value > 0
    ]
    chosen: list[Moment] = []
    for moment in sorted(moments, key=lambda item: -item.score):
        time = samples[moment.bag].times[moment.row]
        near = (other for other in chosen if other.bag == moment.bag)
        if all(abs(int(samples[other.bag].times[other.row]) - int(time)) > APART_S * 1e9 for other in near):
            chosen.append(moment)
        if len(chosen) == count:
            break
    return chosen
