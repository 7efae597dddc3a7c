"""Compares a measured motion with the path of the policy ``wiggle``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.policies.wiggle import offset
from vla_ros.types import FloatArray

_LATEST = 1.0  # s; the path may start this long before or after the first measured motion
_GRID = 0.01  # s; spacing of the path's points and of the delays to try


@dataclass(frozen=True)
class Fit:
    """Differences between a measured motion and the path; distances are the worst joint's, in rad."""

    off: float  # largest distance from the nearest point of the path, whatever the time of that point
    # Root mean square distance from the path at the same time, for the constant delay that fits best (the age of
    # the command and the delay of the controller).
    late: float
    reached: FloatArray  # share of the amplitude that each joint [N] reached in both directions
    order: list[int]  # joints in the order in which they reached their largest deflection


def fit(times: Sequence[float], positions: FloatArray, amplitude: float, seconds: float) -> Fit:
    """Compare one round of the path with a measured motion.

    Args:
        times: Times of the measurements, s, from rest until the end of the round.
        positions: Measured positions [T, N], rad.
        amplitude: The policy's amplitude, rad.
        seconds: Time that the policy spends on each joint, s.
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


def follow(
    states: Callable[[], Sequence[tuple[float, Sequence[float]]]],
    until: Callable[[Callable[[], bool]], object],
    amplitude: float,
    seconds: float,
    near: float,
) -> list[Fit]:
    """Fit rounds until each joint has reached both peaks and one round has stayed within ``near`` amplitudes.

    A starved node holds while the path continues, so a round may lack peaks. ``states`` returns the times and
    positions so far, beginning at rest; ``until`` waits for a condition. Raises AssertionError after 12 rounds.
    """
    rest, found = np.asarray(states()[0][1]), list[Fit]()
    lasts = seconds * (len(rest) + 1)  # every joint, then the gripper

    def is_away(positions: Sequence[float]) -> bool:
        return bool(np.abs(rest - positions).max() > 0.2 * amplitude)

    until(lambda: is_away(states()[-1][1]))
    began = next(at for at, positions in states() if is_away(positions))
    while not found or not (
        any(each.off < near * amplitude and each.order == sorted(each.order) for each in found)
        and np.max([each.reached for each in found], axis=0).min() > 0.6
    ):
        begin = began + lasts * len(found)
        assert len(found) < 12, found
        until(lambda: states()[-1][0] > began + lasts * (len(found) + 1))
        path = [(begin, rest), *(each for each in states() if begin < each[0] < begin + lasts)]
        times, positions = zip(*path, strict=True)
        found.append(fit(times, np.array(positions), amplitude, seconds))
    return found
