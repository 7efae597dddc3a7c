"""Confidence intervals by resampling whole episodes: frames of one episode are too alike to count singly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_ros.types import FloatArray, IntArray

RESAMPLES = 2000


def per_episode(values: FloatArray, episodes: IntArray) -> FloatArray:
    """Sums of ``values`` [M, S] by episode, [E, S]; rows with a NaN must have been zeroed before."""
    _, index = np.unique(episodes, return_inverse=True)
    sums = np.zeros((int(index.max(initial=-1)) + 1, values.shape[1]))
    np.add.at(sums, index, values)
    return sums


def interval(
    sums: FloatArray,
    statistic: Callable[[FloatArray], FloatArray],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval of a figure (Efron 1979) over episodes.

    Args:
        sums: [E, S], sums by episode.
        statistic: From sums over all episodes [R, S] to the figure [R].
        level: Share of resamples inside.
        resamples: How often episodes are drawn with replacement.
        seed: Of the random draws; the same data always give the same interval.

    Returns:
        Lower and upper end; None for fewer than two episodes, of which nothing can be said.
    """
    count = len(sums)
    if count < 2:
        return None
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    figures = statistic(drawn @ sums)
    figures = figures[np.isfinite(figures)]
    if not figures.size:
        return None
    low, high = np.percentile(figures, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)
