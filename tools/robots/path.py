"""Whether a measured motion is the path of the policy ``wiggle``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.policies.wiggle import offset
from vla_ros.types import FloatArray

_LATEST = 1.0  # s; by which the path may begin before or after the first measurement that has moved
_GRID = 0.01  # s


@dataclass(frozen=True)
class Fit:
    """How a measured motion compares with the path; distances are of the joint that is furthest away, in rad."""

    off: float  # largest distance from any point of the path, whatever the time
    # Root of the mean squared distance from where the path was at the time. The measured motion is later by a
    # constant, the command's age and the controller's own; it is the one that fits best.
    late: float
    reached: FloatArray  # share of the amplitude that each joint [N] reached to the less far side
    order: list[int]  # joints by when they were furthest away


def fit(times: Sequence[float], positions: FloatArray, amplitude: float, seconds: float) -> Fit:
    """Compare the first round of the path with what was measured.

    Args:
        times: Of the measurements, s, from rest to the end of the round.
        positions: What was measured [T, N], rad.
        amplitude: Of the policy, rad.
        seconds: Of the policy, for each joint.
    """
    at, moved = np.asarray(times), positions - positions[0]
    joints = moved.shape[1]
    first = at[int((np.abs(moved).max(axis=1) > 0.1 * amplitude).argmax())]

    def path(turns: FloatArray) -> FloatArray:
        return amplitude * np.array([offset(turn, joints) for turn in turns])

    def late(begin: float) -> float:
        turns = (at - begin) / seconds
        inside = (turns >= 0) & (turns <= joints)
        away = np.abs(moved[inside] - path(turns[inside])).max(axis=1)
        return float(np.sqrt((away**2).mean()))

    points = path(np.arange(0, joints, _GRID / seconds))
    off = max(float(np.abs(points - one).max(axis=1).min()) for one in moved)
    reached = np.minimum(moved.max(axis=0), -moved.min(axis=0)) / amplitude
    order = np.argsort(np.abs(moved).argmax(axis=0)).tolist()
    return Fit(off, min(map(late, np.arange(first - _LATEST, first + _LATEST, _GRID))), reached, order)
