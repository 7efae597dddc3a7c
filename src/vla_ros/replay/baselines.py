"""Three ways of predicting without looking: what a policy must beat before its figures mean anything."""

from __future__ import annotations

import numpy as np

from vla_ros.replay import metrics
from vla_ros.types import FloatArray, IntArray


def zero_action(recorded: FloatArray, gripper_index: int | None, open_value: float) -> FloatArray:
    """No motion at all, the gripper open, [M, D]."""
    result = np.zeros_like(recorded)
    if gripper_index is not None:
        result[:, gripper_index] = open_value
    return result


def hold_last(recorded: FloatArray, episodes: IntArray, first: FloatArray) -> FloatArray:
    """The action that was *recorded* one step earlier, [M, D]; ``first`` [D] where an episode begins.

    The strongest of the three: it is told the answer a moment later than it is asked. It shows how much of a
    figure is owed to motions being smooth.
    """
    result = np.empty_like(recorded)
    if len(recorded):
        result[1:] = recorded[:-1]
        begins = np.concatenate(([True], np.diff(episodes) != 0))
        result[begins] = first
        unknown = ~np.isfinite(result)
        result[unknown] = np.broadcast_to(first, result.shape)[unknown]
    return result


def mean_action(recorded: FloatArray) -> FloatArray:
    """The mean of all recorded actions, every time, [M, D] (0 where a number is never known)."""
    return np.broadcast_to(np.nan_to_num(metrics.mean(recorded)), recorded.shape).copy()
