"""The answered frames of all bags as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.replay.samples import Samples
from vla_ros.types import FloatArray, IntArray


@dataclass(frozen=True)
class Frames:
    """The answered frames of all bags in one: M rows; episodes are numbered through."""

    predicted: FloatArray
    recorded: FloatArray
    normalized: FloatArray
    times: FloatArray
    episodes: IntArray
    bags: IntArray
    openings: FloatArray

    @property
    def compared(self) -> IntArray:
        """Rows for which something was recorded."""
        return np.flatnonzero(np.isfinite(self.recorded).any(axis=1))


def gather(samples: Sequence[Samples]) -> Frames:
    """Join bags; times are seconds from each bag's first frame, plus all bags before it."""
    parts: dict[str, list[Any]] = {name: [] for name in Frames.__dataclass_fields__}
    first_episode, origin = 0, 0.0
    for index, bag in enumerate(samples):
        seconds = (bag.times - (bag.times[0] if len(bag.times) else 0)) * 1e-9 + origin
        parts["predicted"].append(bag.predicted)
        parts["recorded"].append(bag.recorded)
        parts["normalized"].append(bag.normalized)
        parts["times"].append(seconds)
        parts["episodes"].append(bag.episodes + first_episode)
        parts["bags"].append(np.full(len(bag.times), index))
        parts["openings"].append(bag.openings if len(bag.openings) else np.full(len(bag.times), np.nan))
        if len(bag.times):
            origin = float(seconds[-1]) + 1.0
            first_episode += int(bag.episodes[-1]) + 1
    return Frames(**{name: np.concatenate(arrays) for name, arrays in parts.items()})
