"""How far predicted actions are from recorded ones: pure functions over numpy arrays.

``predicted`` and ``recorded`` are float64 [M, D], one row per compared frame, in the action's own units. A recorded
number that is unknown is NaN and is left out of that dimension's figures. A figure that nothing supports is NaN.
``episodes`` is int64 [M], the episode of each row, ascending: nothing is differenced across its borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_ros.types import FloatArray, IntArray

BoolArray = NDArray[np.bool_]

EDGE = 2 / 510 * 1.01
"""An OpenVLA action at the first or last bin centre lies 1/255 from the border of [-1, 1]: it counts as at it."""

STILL_SHARE = 0.05
"""A recorded translation below this share of the recording's 95th percentile has no direction worth comparing."""


def mean(values: FloatArray, axis: int | None = 0) -> FloatArray:
    """Mean of what is finite; NaN where nothing is."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axis)
    total = np.where(finite, values, 0.0).sum(axis=axis)
    return np.asarray(np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0))


def mae(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Mean absolute error by dimension, [D]."""
    return mean(np.abs(predicted - recorded))


def rmse(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Root of the mean squared error by dimension, [D]."""
    return np.asarray(np.sqrt(mean((predicted - recorded) ** 2)))


def bias(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Mean of predicted minus recorded by dimension, [D]."""
    return mean(predicted - recorded)


def correlation(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Pearson's correlation by dimension, [D]; NaN where one of the two never changes."""
    known = np.isfinite(recorded) & np.isfinite(predicted)
    a = np.where(known, predicted, np.nan)
    b = np.where(known, recorded, np.nan)
    a, b = a - mean(a), b - mean(b)
    product, norm = mean(a * b), np.sqrt(mean(a**2) * mean(b**2))
    scale = np.maximum(np.abs(np.nan_to_num(predicted)).max(axis=0, initial=0.0), 1e-300)
    return np.asarray(np.divide(product, norm, out=np.full(norm.shape, np.nan), where=norm > 1e-12 * scale**2))


def still_threshold(recorded: FloatArray) -> float:
    """Length under which a recorded translation [M, 3] counts as standing still."""
    lengths = np.linalg.norm(recorded, axis=1)
    lengths = lengths[np.isfinite(lengths)]
    return STILL_SHARE * float(np.percentile(lengths, 95)) if lengths.size else 0.0


def direction_cosines(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
    """Cosine between predicted and recorded translation of each frame, [M].

    NaN where the recorded arm stood still (:func:`still_threshold`) or is unknown; 0 where the prediction does not
    move though the recorded arm does.

    Args:
        predicted: [M, 3].
        recorded: [M, 3].
    """
    lengths = np.linalg.norm(recorded, axis=1)
    moving = np.nan_to_num(lengths) > max(still_threshold(recorded), 1e-12)
    predicted_lengths = np.linalg.norm(predicted, axis=1)
    dot, product = (predicted * recorded).sum(axis=1), lengths * predicted_lengths
    moves = moving & (np.nan_to_num(predicted_lengths) > 1e-15)
    cosines = np.divide(dot, product, out=np.zeros(len(dot)), where=moves)
    return np.where(moving, cosines, np.nan)


def is_closed(values: FloatArray, open_value: float, closed_value: float, threshold: float = 0.5) -> FloatArray:
    """1 where a gripper number means closed, 0 where open, NaN where unknown, [M].

    The opening runs from 0 at ``closed_value`` to 1 at ``open_value``; open is above ``threshold``, as in control.
    """
    opening = (values - closed_value) / (open_value - closed_value)
    return np.where(np.isfinite(values), (opening <= threshold).astype(float), np.nan)


@dataclass(frozen=True)
class Confusion:
    """Counts of gripper states; ``closed`` is the positive class."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @property
    def accuracy(self) -> float:
        """Share of frames with the right state."""
        total = self.true_positive + self.false_positive + self.false_negative + self.true_negative
        return (self.true_positive + self.true_negative) / total if total else float("nan")

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; NaN where the gripper was closed in neither."""
        return f1(self.true_positive, self.false_positive, self.false_negative)


def f1(true_positive: float, false_positive: float, false_negative: float) -> float:
    """F1 from counts; NaN where there is nothing to find and nothing was found."""
    total = 2 * true_positive + false_positive + false_negative
    return 2 * true_positive / total if total else float("nan")


def confusion(predicted: FloatArray, recorded: FloatArray) -> Confusion:
    """Compare gripper states [M] as :func:`is_closed` gives them."""
    known = np.isfinite(predicted) & np.isfinite(recorded)
    a, b = predicted[known] > 0.5, recorded[known] > 0.5
    return Confusion(int((a & b).sum()), int((a & ~b).sum()), int((~a & b).sum()), int((~a & ~b).sum()))


@dataclass(frozen=True)
class Events:
    """Opening and closing of the gripper: how many, how many found, and how late.

    Attributes:
        recorded: Number of recorded events.
        predicted: Number of predicted ones.
        matched: Pairs of the same kind within the window.
        delays: Float64 [matched], predicted minus recorded time in seconds.
    """

    recorded: int
    predicted: int
    matched: int
    delays: FloatArray

    @property
    def f1(self) -> float:
        """Harmonic mean of found and right events; NaN where there is none at all."""
        return f1(self.matched, self.predicted - self.matched, self.recorded - self.matched)


def switches(closed: FloatArray, times: FloatArray, episodes: IntArray) -> list[tuple[float, bool, int]]:
    """When the gripper changes: (time, closes, episode) of each event; unknown states are passed over."""
    known = np.flatnonzero(np.isfinite(closed))
    if known.size < 2:
        return []
    before, after = known[:-1], known[1:]
    changed = (closed[before] != closed[after]) & (episodes[before] == episodes[after])
    return [(float(times[i]), bool(closed[i] > 0.5), int(episodes[i])) for i in after[changed]]


def match_events(
    predicted: FloatArray, recorded: FloatArray, times: FloatArray, episodes: IntArray, window: float = 1.0
) -> Events:
    """Pair predicted with recorded gripper events, the nearest in time first.

    Args:
        predicted: [M], as :func:`is_closed`.
        recorded: [M], as :func:`is_closed`.
        times: [M] seconds.
        episodes: [M].
        window: Seconds within which two events of a kind can belong together.
    """
    found, wanted = switches(predicted, times, episodes), switches(recorded, times, episodes)
    pairs = sorted(
        (abs(a[0] - b[0]), i, j)
        for i, a in enumerate(found)
        for j, b in enumerate(wanted)
        if a[1:] == b[1:] and abs(a[0] - b[0]) <= window
    )
    used_found: set[int] = set()
    used_wanted: set[int] = set()
    delays = []
    for _, i, j in pairs:
        if i not in used_found and j not in used_wanted:
            used_found.add(i)
            used_wanted.add(j)
            delays.append(found[i][0] - wanted[j][0])
    return Events(len(wanted), len(found), len(delays), np.array(sorted(delays)))


def saturation(normalized: FloatArray, low: float = -1.0, high: float = 1.0) -> tuple[IntArray, IntArray]:
    """How often each number lies at the border of its range or beyond it: counts (at or beyond, beyond), [D] each.

    Args:
        normalized: [M, D], nominally in [low, high]; an OpenVLA action at the first or last bin centre (1/255 from
            the border) counts as at the border.
        low: Lower end of the range.
        high: Upper end of the range.
    """
    edge = 0.5 * (high - low) * EDGE
    at = (normalized <= low + edge) | (normalized >= high - edge)
    beyond = (normalized < low - 1e-9) | (normalized > high + 1e-9)
    return at.sum(axis=0).astype(np.int64), beyond.sum(axis=0).astype(np.int64)


def jerk(motion: FloatArray, times: FloatArray, episodes: IntArray, order: int = 2) -> float:
    """Root mean square of the jerk, in the motion's unit per second cubed.

    Args:
        motion: [M, N]. Displacements per step for ``order`` 2 (their second difference is the third of the
            position), positions for ``order`` 3.
        times: [M] seconds; the median step is taken as the period.
        episodes: [M]; differences across borders are left out.
        order: Number of differences.
    """
    steps = np.diff(times)[np.diff(episodes) == 0]
    steps = steps[steps > 0]
    if not steps.size or len(motion) <= order:
        return float("nan")
    differences = np.diff(motion, n=order, axis=0)
    inside = episodes[order:] == episodes[:-order]
    squares = (differences[inside] ** 2).sum(axis=1)
    squares = squares[np.isfinite(squares)]
    return float(np.sqrt(squares.mean()) / np.median(steps) ** 3) if squares.size else float("nan")


def idle_fraction(translation: FloatArray, threshold: float) -> float:
    """Share of steps [M, 3] that are shorter than ``threshold``; unknown ones are left out."""
    lengths = np.linalg.norm(translation, axis=1)
    lengths = lengths[np.isfinite(lengths)]
    return float((lengths <= threshold).mean()) if lengths.size else float("nan")


def percentiles(values: FloatArray | Sequence[float], points: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """``{"p50": ..., "p90": ..., "p99": ..., "count": ...}`` of what is finite; NaN where nothing is."""
    data = np.asarray(values, float)
    data = data[np.isfinite(data)]
    figures = np.percentile(data, points) if data.size else np.full(len(points), np.nan)
    return {
        **{f"p{point:g}": float(figure) for point, figure in zip(points, figures, strict=True)},
        "count": data.size,
    }
