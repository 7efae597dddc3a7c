"""Normalises states and actions by z-score or quantiles, with openpi's or LeRobot's formulas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros_models.checkpoint_files import read_statistics

Array = NDArray[np.floating[Any]]

OPENPI_EPS = 1e-6
LEROBOT_EPS = 1e-8
PADDING = 1e-4
"""Statistics of padding are zeros; openpi's epsilon and its quantiles, from bins, differ from them by less."""

_BOUNDS = {
    "z_score": ("mean", "std"),
    "quantile": ("q01", "q99"),
    "decile": ("q10", "q90"),
    "min_max": ("min", "max"),
}
"""Statistics of each form of normalisation: mean and standard deviation, or the bounds that become -1 and 1."""


@dataclass(frozen=True, eq=False)
class Learned:
    """The statistics with which a checkpoint normalises one feature, in the units of its training."""

    names: tuple[tuple[str, str], ...]  # of the statistics of each number, such as ``q01`` and ``q99``
    first: Array  # [N], or [T, N] for each action of a chunk
    second: Array
    used: NDArray[np.bool_]  # bool [N], False for numbers that are not normalised


@dataclass(frozen=True, eq=False)
class LearnedStatistics:
    """A checkpoint's statistics, and how it converts the robot's numbers before they are normalised."""

    layout: str  # of the file: a key of the table in vla_ros_lab.training.layouts
    state: Learned | None  # None if the policy takes no state
    action: Learned
    # Converts a chunk [K, D] and the state [N] at its beginning; None if both are normalised as they are.
    convert_actions: Callable[[Array, Array], Array] | None = None
    convert_state: Callable[[Array], Array] | None = None
    data_set: str = ""  # name of the statistics, if the file has those of several data sets
    # Of GR00T, the parts of the state and of the action: name, numbers, and whether they are relative to the state.
    parts: tuple[tuple[tuple[str, int, bool], ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Normalization:
    """Normalises one feature.

    Dimensions without statistics are unchanged, and surplus statistics are ignored. Values are not clipped. The
    order of operations is that of the published code, so that a state at ``q01`` becomes exactly -1 and falls into
    the first bin of the prompt, not below it.
    """

    offset: Array  # [N], mean or 1st percentile
    forward: Array  # [N], divisor in normalize: standard deviation or range, with an epsilon
    back: Array  # [N], factor in unnormalize; without the epsilon for LeRobot's z-score
    quantile: bool = False  # True maps the range to [-1, 1]
    names: tuple[str, str] = ("", "")  # of the statistics, as files have them

    @property
    def middle(self) -> Array:
        """Middle of the training data [N]: the mean, or the middle between the quantiles."""
        return self.offset + self.back / 2 if self.quantile else self.offset

    @property
    def largest(self) -> Array:
        """Larger magnitude of the two bounds of the training data [N]; empty for a z-score, which has none."""
        ends = np.abs([self.offset, self.offset + self.back])
        return np.max(ends, axis=0) if self.quantile else np.zeros(0)

    @property
    def used(self) -> int:
        """Numbers before the padding at the end, whose statistics are those of zeros or change nothing."""
        low, span = self.offset, self.back
        unchanged = (low == -1) & np.isclose(span, 2) if self.quantile else (low == 0) & np.isclose(span, 1)
        kept = np.flatnonzero(~(unchanged | (np.abs([low, span]) < PADDING).all(axis=0)))
        return int(kept[-1]) + 1 if kept.size else 0

    @property
    def learned(self) -> Learned:
        """The statistics, without the epsilon of the formulas."""
        ends = self.offset, self.offset + self.back if self.quantile else self.back
        return Learned((self.names,) * len(self.offset), *ends, np.ones(len(self.offset), np.bool_))

    def normalize(self, values: Array) -> Array:
        """Normalise [..., D]; the result has the statistics' data type."""
        count, result = self._prepare(values)
        part = (result[..., :count] - self.offset[:count]) / self.forward[:count]
        result[..., :count] = part * 2 - 1 if self.quantile else part
        return result

    def unnormalize(self, values: Array) -> Array:
        count, result = self._prepare(values)
        part = result[..., :count]
        if self.quantile:
            part += 1
            part /= 2
        part *= self.back[:count]
        part += self.offset[:count]
        return result

    def _prepare(self, values: Array) -> tuple[int, Array]:
        return min(values.shape[-1], len(self.offset)), np.array(values, dtype=self.offset.dtype)


def zero_padded(values: Array, size: int) -> NDArray[np.float32]:
    """Return ``values`` [N] as float32 [size] with zeros at the end; np.pad takes 40 us."""
    found = np.zeros(size, np.float32)
    found[: len(values)] = values
    return found


def make_normalization(
    form: str, statistics: Mapping[str, Any], where: str, eps: float | None = None
) -> Normalization:
    """Make the normalisation of one feature from its statistics.

    ``form`` is ``none`` or a key of :data:`_BOUNDS`, which names the statistics it needs. ``where`` names the file
    and the feature in messages. ``eps`` selects LeRobot's formulas in float32 with this epsilon; without it,
    openpi's in float64.
    """
    dtype: Any = np.float64 if eps is None else np.float32
    if form == "none":
        nothing = np.zeros(0, dtype)
        return Normalization(nothing, nothing, nothing)
    first, second = read_statistics(statistics, _BOUNDS[form], where, dtype)
    if form == "z_score":
        forward = second + dtype(OPENPI_EPS if eps is None else eps)
        return Normalization(first, forward, forward if eps is None else second, names=_BOUNDS[form])
    span = second - first
    if eps is None:
        span += OPENPI_EPS
    else:
        span[span == 0] = eps
    return Normalization(first, span, span, quantile=True, names=_BOUNDS[form])
