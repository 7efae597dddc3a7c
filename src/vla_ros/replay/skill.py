"""How far a policy is ahead of guessing: skill scores, and the frames at which the recorded motion turns.

A skill score is 1 - E / E_guess, with E the mean squared error of the motion, each number in units of its recorded
variance (Murphy 1988): 1 is perfect, 0 no better than the guess, below 0 worse. It is fair to every guess because
all are judged by the same error on the same frames.

Turns show what a score over all frames hides: who repeats the last recorded motion is right wherever a motion goes
on, and wrong exactly where something had to be seen. A policy that is given past joint states can learn just that
("copycat", Wen et al. 2020), and a replay, which shows it the recorded past, would praise it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.replay import bootstrap, metrics
from vla_ros.types import FloatArray, IntArray

TURN_DEGREES = 30.0
"""A recorded translation that differs by more from the one before is a turn; so is setting off."""

_NEGLIGIBLE = 0.02
"""Numbers that vary less than this share of the most varying one are left out: their errors are rounding."""


def weights(recorded: FloatArray, motion: Sequence[int]) -> FloatArray:
    """One over the recorded variance of each number, [D]; 0 for the gripper and what hardly varies.

    Args:
        recorded: Float64 [M, D], NaN where unknown.
        motion: Columns besides the gripper.
    """
    variance = np.nan_to_num(metrics.mean((recorded - metrics.mean(recorded)) ** 2))
    counted = np.zeros(recorded.shape[1], bool)
    counted[list(motion)] = True
    counted &= variance > max(_NEGLIGIBLE**2 * variance[list(motion)].max(initial=0.0), 1e-18)
    return np.where(counted, 1.0 / np.where(counted, variance, 1.0), 0.0)


def squared_errors(predicted: FloatArray, recorded: FloatArray, weight: FloatArray) -> FloatArray:
    """Squared error of each frame in recorded variances, mean over what is counted and known, [M]."""
    counted = weight > 0
    return metrics.mean((predicted - recorded)[:, counted] ** 2 * weight[counted], axis=1)


def scores(
    predicted: FloatArray,
    recorded: FloatArray,
    guesses: Mapping[str, FloatArray],
    motion: Sequence[int],
    episodes: IntArray,
) -> tuple[dict[str, float], dict[str, list[float] | None]]:
    """Skill against each guess, and its 95 % interval over episodes (None for a single one).

    Args:
        predicted: Float64 [M, D].
        recorded: Float64 [M, D].
        guesses: Name to float64 [M, D].
        motion: Columns besides the gripper.
        episodes: Int64 [M].
    """
    weight = weights(recorded, motion)
    own = squared_errors(predicted, recorded, weight)
    found: dict[str, float] = {}
    ends: dict[str, list[float] | None] = {}
    for name, guess in guesses.items():
        pair = np.nan_to_num(np.stack([own, squared_errors(guess, recorded, weight)], axis=1))
        sums = bootstrap.per_episode(pair, episodes)
        found[name] = float(_score(sums.sum(axis=0, keepdims=True))[0])
        interval = bootstrap.interval(sums, _score)
        ends[name] = list(interval) if interval else None
    return found, ends


def _score(sums: FloatArray) -> FloatArray:
    result: FloatArray = np.full(len(sums), np.nan)
    return 1.0 - np.divide(sums[:, 0], sums[:, 1], out=result, where=sums[:, 1] > 1e-12)


def turns(translation: FloatArray, episodes: IntArray) -> IntArray:
    """Rows at which the recorded arm sets off or turns by more than :data:`TURN_DEGREES`.

    Args:
        translation: Recorded, float64 [M, 3].
        episodes: Int64 [M].
    """
    if len(translation) < 2:
        return np.zeros(0, np.int64)
    lengths = np.nan_to_num(np.linalg.norm(translation, axis=1))
    moving = lengths > max(metrics.still_threshold(translation), 1e-12)
    dot = np.nan_to_num((translation[1:] * translation[:-1]).sum(axis=1))
    product = lengths[1:] * lengths[:-1]
    cosines = np.divide(dot, product, out=np.zeros(len(dot)), where=product > 1e-18)
    turned = ~moving[:-1] | (cosines < np.cos(np.radians(TURN_DEGREES)))
    known = np.isfinite(translation[:-1]).all(axis=1) & (episodes[1:] == episodes[:-1])
    return np.flatnonzero(moving[1:] & known & turned) + 1


def at_turns(
    predicted: FloatArray, recorded: FloatArray, guesses: Mapping[str, FloatArray], episodes: IntArray
) -> dict[str, Any]:
    """Direction cosines where the recorded motion turns: ``count``, ``direction_cosine``, one for each guess.

    Args:
        predicted: Float64 [M, D], translation first.
        recorded: Float64 [M, D].
        guesses: Name to float64 [M, D].
        episodes: Int64 [M].
    """
    rows = turns(recorded[:, :3], episodes)

    def cosine(actions: FloatArray) -> float:
        return float(metrics.mean(metrics.direction_cosines(actions[:, :3], recorded[:, :3])[rows], axis=None))

    return {
        "count": len(rows),
        "direction_cosine": cosine(predicted),
        "baselines": {name: cosine(guess) for name, guess in guesses.items()},
    }
