"""How far a policy is ahead of guessing: skill scores, and the frames at which the recorded motion turns.

A skill score is 1 - E / E_guess, with E the mean squared error of the translation (joint policies: of all joints;
Murphy 1988): 1 is perfect, 0 no better than the guess, below 0 worse. It is fair to every guess because all are
judged by the same error on the same frames. Rotations are left out: in most recordings they are small corrections,
and no factor between metres and radians is right for every tool; ``dimensions`` has their figures.

Turns show what a score over all frames hides: who repeats the last recorded motion is right wherever a motion goes
on, and wrong exactly where something had to be seen. A policy that is given past joint states can learn just that
("copycat", Wen et al. 2020), and a replay, which shows it the recorded past, would praise it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.replay import bootstrap, metrics
from vla_ros.types import ActionSpec, ControlMode, FloatArray, IntArray

TURN_DEGREES = 30.0
"""A recorded translation that differs by more from the one before is a turn; so is setting off."""


def columns_of(spec: ActionSpec) -> list[int]:
    """The numbers that the error counts: translation, or every joint."""
    if spec.control_mode is ControlMode.END_EFFECTOR_DELTA:
        return [0, 1, 2]
    return [index for index in range(spec.dimension) if index != spec.gripper_index]


def squared_errors(predicted: FloatArray, recorded: FloatArray, columns: Sequence[int]) -> FloatArray:
    """Squared error of each frame, mean over what is known of ``columns``, [M]."""
    return metrics.mean((predicted - recorded)[:, list(columns)] ** 2, axis=1)


def scores(
    predicted: FloatArray,
    recorded: FloatArray,
    guesses: Mapping[str, FloatArray],
    columns: Sequence[int],
    episodes: IntArray,
) -> tuple[dict[str, float], dict[str, list[float] | None]]:
    """Skill against each guess, and its 95 % interval over episodes (None for a single one).

    Args:
        predicted: Float64 [M, D].
        recorded: Float64 [M, D].
        guesses: Name to float64 [M, D].
        columns: As :func:`columns_of`.
        episodes: Int64 [M].
    """
    own = squared_errors(predicted, recorded, columns)
    found: dict[str, float] = {}
    ends: dict[str, list[float] | None] = {}
    for name, guess in guesses.items():
        pair = np.nan_to_num(np.stack([own, squared_errors(guess, recorded, columns)], axis=1))
        sums = bootstrap.per_episode(pair, episodes)
        found[name] = float(_score(sums.sum(axis=0, keepdims=True))[0])
        interval = bootstrap.interval(sums, _score)
        ends[name] = list(interval) if interval else None
    return found, ends


def _score(sums: FloatArray) -> FloatArray:
    result: FloatArray = np.full(len(sums), np.nan)
    return 1.0 - np.divide(sums[:, 0], sums[:, 1], out=result, where=sums[:, 1] > 1e-18)


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
