"""Compares predicted with recorded actions: error, direction, gripper and motion.

``predicted`` and ``recorded`` are float64 [M, D], one row per compared frame, in the action's units. Unknown
numbers are NaN and left out; a figure without data is NaN. ``episodes`` is int64 [M], ascending; differences are
not taken across episodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_ros.config import GripperConfig
from vla_ros.types import FloatArray, IntArray

EDGE = 2 / 510 * 1.01
"""Numbers this close to an end of [-1, 1] count as the end; OpenVLA's outermost bin centres are 1/255 away."""

STILL_SHARE = 0.05
"""A recorded translation below this share of the 95th percentile counts as standing still."""


def mean(values: FloatArray, axis: int | None = 0) -> FloatArray:
    """Return the mean of the finite values; NaN if there are none."""
    finite = np.isfinite(values)
    return ratio(np.where(finite, values, 0.0).sum(axis=axis), finite.sum(axis=axis))


def ratio(top: ArrayLike, bottom: ArrayLike, least: ArrayLike = 0.0) -> FloatArray:
    """Return ``top / bottom``; NaN where ``bottom`` is not above ``least``."""
    result = np.full(np.shape(top), np.nan)
    return np.asarray(np.divide(top, bottom, out=result, where=np.asarray(bottom) > least))


def std(values: FloatArray) -> FloatArray:
    """Return the standard deviation of the finite values of each dimension, [D]."""
    return np.asarray(np.sqrt(mean((values - mean(values)) ** 2)))


def mae(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    return mean(np.abs(predicted - recorded))


def rmse(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    return np.asarray(np.sqrt(mean((predicted - recorded) ** 2)))


def correlation(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Return Pearson's correlation of each dimension, [D]; NaN where either action is constant."""
    known = np.isfinite(recorded + predicted)
    a, b = (np.where(known, values, np.nan) for values in (predicted, recorded))
    a, b = a - mean(a), b - mean(b)
    scale = np.maximum(np.abs(np.nan_to_num(predicted)).max(axis=0, initial=0.0), 1e-300)
    # Because of rounding, the variance of a constant is not exactly zero.
    return ratio(mean(a * b), np.sqrt(mean(a**2) * mean(b**2)), 1e-12 * scale**2)


def still_threshold(recorded: FloatArray) -> float:
    """Return the length below which recorded translations [M, 3] count as standing still."""
    lengths = np.linalg.norm(recorded, axis=1)
    lengths = lengths[np.isfinite(lengths)]
    return max(STILL_SHARE * float(np.percentile(lengths, 95)), 1e-12) if lengths.size else 1e-12


def direction_cosines(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Return the cosine between the predicted and the recorded translation [M, 3] of each frame, [M].

    NaN where the recorded arm stands still (:func:`still_threshold`) or is unknown; 0 where it moves but the
    prediction does not.
    """
    lengths, predicted_lengths = np.linalg.norm(recorded, axis=1), np.linalg.norm(predicted, axis=1)
    cosines = ratio((predicted * recorded).sum(axis=1), lengths * predicted_lengths, 1e-15 * lengths)
    moving = np.nan_to_num(lengths) > still_threshold(recorded)
    return np.where(moving, np.nan_to_num(cosines), np.nan)


def is_closed(values: FloatArray, gripper: GripperConfig) -> FloatArray:
    """Return 1 where a gripper number [M] means closed, 0 where open, NaN where unknown.

    The threshold is the same as in control.
    """
    opening = (values - gripper.closed_value) / (gripper.open_value - gripper.closed_value)
    return np.where(np.isfinite(values), (opening <= gripper.threshold).astype(float), np.nan)


def gripper_scores(predicted: FloatArray, recorded: FloatArray) -> tuple[float, float]:
    """Return the accuracy of gripper states [M], and the F1 of the state closed.

    The states are from :func:`is_closed`.
    """
    both, differ = predicted * recorded, np.abs(predicted - recorded)
    return 1.0 - float(mean(differ, axis=None)), float(ratio(2 * np.nansum(both), np.nansum(2 * both + differ)))


class Events(NamedTuple):
    """Openings and closings of the gripper."""

    recorded: int
    predicted: int
    delays: FloatArray  # float64 [matched], predicted minus recorded time of the matched events, in seconds

    @property
    def f1(self) -> float:
        """F1 of the matched events; NaN without events."""
        count = self.recorded + self.predicted
        return 2 * len(self.delays) / count if count else float("nan")


def _switches(closed: FloatArray, times: FloatArray, episodes: IntArray) -> list[tuple[float, bool, int, int]]:
    """Return (time, closes, episode, gripper) for each change of a gripper's known state."""
    switches = []
    for gripper, states in enumerate(np.atleast_2d(closed.T)):
        rows = np.flatnonzero(np.isfinite(states))
        before, after = rows[:-1], rows[1:]
        changed = after[(states[before] != states[after]) & (episodes[before] == episodes[after])]
        switches += [(float(times[i]), bool(states[i] > 0.5), int(episodes[i]), gripper) for i in changed]
    return switches


def match_events(
    predicted: FloatArray, recorded: FloatArray, times: FloatArray, episodes: IntArray, window: float = 1.0
) -> Events:
    """Match predicted with recorded events, nearest in time first.

    Matching events have the same gripper, kind and episode. States [M, G] are from :func:`is_closed`; ``times`` [M]
    and the maximum delay ``window`` are in seconds.
    """
    predictions, recordings = _switches(predicted, times, episodes), _switches(recorded, times, episodes)
    pairs = sorted(
        (abs(a[0] - b[0]), i, j)
        for i, a in enumerate(predictions)
        for j, b in enumerate(recordings)
        if a[1:] == b[1:] and abs(a[0] - b[0]) <= window
    )
    matched: dict[int, int] = {}
    for _, i, j in pairs:
        if i not in matched and j not in matched.values():
            matched[i] = j
    delays = sorted(predictions[i][0] - recordings[j][0] for i, j in matched.items())
    return Events(len(recordings), len(predictions), np.array(delays))


def at_edge(normalized: FloatArray) -> NDArray[np.bool_]:
    """Return True where a normalised value lies in an outermost bin of [-1, 1] or beyond."""
    return np.greater_equal(np.abs(normalized), 1 - EDGE, dtype=np.bool_)


def jerk(motion: FloatArray, times: FloatArray, episodes: IntArray, order: int = 2) -> float:
    """Return the root mean square of the jerk, in the motion's unit per second cubed.

    With ``order`` 2, ``motion`` [M, N] contains displacements per step, whose second difference is the third
    difference of the positions; with ``order`` 3 it contains positions. The period is the median step of ``times``
    [M], seconds.
    """
    steps = np.diff(times)[np.diff(episodes) == 0]
    steps = steps[steps > 0]
    if not steps.size or len(motion) <= order:
        return float("nan")
    differences = np.diff(motion, n=order, axis=0)[episodes[order:] == episodes[:-order]]
    return float(np.sqrt(mean((differences**2).sum(axis=1), axis=None)) / np.median(steps) ** 3)


def idle_share(translation: FloatArray, threshold: float) -> float:
    """Return the share of translations [M, 3] shorter than ``threshold``."""
    lengths = np.linalg.norm(translation, axis=1)
    return float(mean(np.where(np.isfinite(lengths), lengths <= threshold, np.nan), axis=None))


def percentile_figures(
    values: FloatArray | Sequence[float], points: Sequence[float] = (50, 90, 99)
) -> dict[str, float]:
    """Return ``{"p50": ..., "p90": ..., "p99": ..., "count": ...}`` of the finite values; NaN if there are none."""
    data = np.asarray(values, float)
    data = data[np.isfinite(data)]
    figures = np.percentile(data, points).tolist() if data.size else [float("nan")] * len(points)
    return {**{f"p{point:g}": figure for point, figure in zip(points, figures, strict=True)}, "count": data.size}
