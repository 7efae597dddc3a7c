"""Normalises states and actions by z-score or quantiles, with openpi's or LeRobot's formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import CheckpointError

Array = NDArray[np.floating[Any]]

FORMS = ("none", "z_score", "quantile")
OPENPI_EPS = 1e-6
LEROBOT_EPS = 1e-8


@dataclass(frozen=True, eq=False)
class Normalization:
    """How one feature is normalised.

    If a robot has more numbers than the statistics, the rest passes unchanged; if it has fewer, the statistics are
    truncated. Nothing is clipped. The order of operations is the reference's: a state at ``q01`` is -1 and falls
    into the first bin of the prompt, not below it.
    """

    offset: Array  # [N], mean or 1st percentile
    forward: Array  # [N], standard deviation or range, with an epsilon; divides
    back: Array  # [N], multiplies on the way back; LeRobot's z-score leaves its epsilon out there
    quantile: bool = False  # True maps the range to [-1, 1]

    def normalize(self, values: Array) -> Array:
        """Normalise [..., D]; the result has the statistics' data type."""
        count, result = self._prepare(values)
        part = (result[..., :count] - self.offset[:count]) / self.forward[:count]
        result[..., :count] = part * 2 - 1 if self.quantile else part
        return result

    def unnormalize(self, values: Array) -> Array:
        """Undo :meth:`normalize`."""
        count, result = self._prepare(values)
        part = (result[..., :count] + 1) / 2 if self.quantile else result[..., :count]
        result[..., :count] = part * self.back[:count] + self.offset[:count]
        return result

    def _prepare(self, values: Array) -> tuple[int, Array]:
        return min(values.shape[-1], len(self.offset)), np.array(values, dtype=self.offset.dtype)


def make_normalization(
    form: str, statistics: Mapping[str, Any], where: str, lerobot: bool = False
) -> Normalization:
    """Make the normalisation of one feature from its statistics.

    ``z_score`` needs ``mean`` and ``std``, ``quantile`` ``q01`` and ``q99``. ``where`` names file and feature in
    messages; ``lerobot`` takes LeRobot's epsilons and float32 in place of openpi's and float64.
    """
    dtype: Any = np.float32 if lerobot else np.float64
    if form == "none":
        nothing = np.zeros(0, dtype)
        return Normalization(nothing, nothing, nothing)
    names = ("mean", "std") if form == "z_score" else ("q01", "q99")
    missing = [name for name in names if name not in statistics]
    if missing:
        raise CheckpointError(f"{where}: normalising by {form} needs {missing}; found {sorted(statistics)}")
    try:
        first, second = (np.array(statistics[name], dtype) for name in names)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {names} are not lists of numbers ({error})") from error
    if first.ndim != 1 or not first.size or first.shape != second.shape:
        raise CheckpointError(f"{where}: {names} have shapes {first.shape} and {second.shape}, expected one length")
    if not np.isfinite([first, second]).all():
        raise CheckpointError(f"{where}: {names} contain NaN or Inf")
    if (second < (0 if form == "z_score" else first)).any():
        raise CheckpointError(f"{where}: a negative std or a q99 below its q01")
    if form == "z_score":
        forward = second + dtype(LEROBOT_EPS if lerobot else OPENPI_EPS)
        return Normalization(first, forward, second if lerobot else forward)
    span = second - first
    if lerobot:
        span[span == 0] = LEROBOT_EPS
    else:
        span += OPENPI_EPS
    return Normalization(first, span, span, quantile=True)
