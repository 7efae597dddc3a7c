"""Compares a policy with simple baselines: skill scores, turns, and intervals over episodes.

A skill score (Murphy 1988) is 1 - E / E_guess, where E is the mean squared error of the translation or of all
joints: 1 is perfect, 0 is no better than the guess. Rotations are left out, because most are small corrections and
no factor between metres and radians is right for every tool. docs/replay.md ("Baselines") explains why turns are
counted separately.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray, IntArray
from vla_ros_lab.replay import metrics

TURN_DEGREES = 30.0
"""A recorded translation whose direction changes by more than this is a turn; so is a start from rest."""

RESAMPLES = 2000

Guesses = Mapping[str, FloatArray]
"""Name of a baseline to its actions [M, D]."""


def baselines(
    recorded: FloatArray, episodes: IntArray, grippers: Sequence[int], open_value: float
) -> dict[str, FloatArray]:
    """Return the actions [M, D] of three baselines that ignore the image.

    ``zero`` never moves and keeps every gripper open. ``hold_last`` repeats the action recorded one step earlier,
    which policies do not receive (at the start of an episode, it equals ``zero``). ``mean_action`` is the mean
    recorded action.
    """
    zero = np.zeros_like(recorded)
    zero[:, list(grippers)] = open_value
    held = np.concatenate((zero[:1], recorded[:-1]))
    held[np.diff(episodes, prepend=-1) != 0] = np.nan
    average = np.broadcast_to(np.nan_to_num(metrics.mean(recorded)), recorded.shape).copy()
    return {"zero": zero, "hold_last": np.where(np.isfinite(held), held, zero), "mean_action": average}


def motion_columns(spec: PolicySpec) -> list[int]:
    """Return the indices of all action dimensions except the gripper's."""
    return [index for index in range(spec.dimension) if index not in spec.grippers]


def translations(spec: PolicySpec) -> list[list[int]]:
    """Return the indices of each arm's translation; none if actions are not deltas and so have no direction."""
    if spec.motion != "tip_delta":
        return []
    return [[at.start, at.start + 1, at.start + 2] for part, at in spec.columns() if part.quantity == "tip_delta"]


def columns_of(spec: PolicySpec) -> list[int]:
    """Return the indices of the dimensions that count for the error: translations, or all joints."""
    return [column for arm in translations(spec) for column in arm] or motion_columns(spec)


def squared_errors(predicted: FloatArray, recorded: FloatArray, columns: Sequence[int]) -> FloatArray:
    """Return each frame's mean squared error over the known values of ``columns``, [M]."""
    return metrics.mean((predicted - recorded)[:, list(columns)] ** 2, axis=1)


def interval(top: FloatArray, bottom: FloatArray, episodes: IntArray) -> list[float] | None:
    """Return the 95 % bootstrap percentile interval (Efron 1979) of a ratio of sums, averaged over S columns.

    Resamples whole episodes, because frames of one episode are not independent. ``top`` and ``bottom`` are [M, S];
    NaN counts as 0. The same data always give the same interval. Returns None for fewer than two episodes.
    """
    return _ends(resampled(top, bottom, episodes))


def paired_interval(
    first: tuple[FloatArray, FloatArray], second: tuple[FloatArray, FloatArray], episodes: IntArray
) -> list[float] | None:
    """Return the interval of the second ratio minus the first, of the same frames, as :func:`interval`."""
    return _ends(resampled(*second, episodes) - resampled(*first, episodes))


def resampled(top: FloatArray, bottom: FloatArray, episodes: IntArray) -> FloatArray:
    """Return the ratios of all resamples, the same episodes at every call; empty for fewer than two episodes."""
    _, starts = np.unique(episodes, return_index=True)
    if (count := len(starts)) < 2:
        return np.zeros(0)
    sums = np.add.reduceat(np.nan_to_num(np.stack([top, bottom])), starts, axis=1)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    tops, bottoms = drawn @ sums
    return metrics.mean(metrics.ratio(tops, bottoms, 1e-18), axis=1)


def _ends(figures: FloatArray) -> list[float] | None:
    figures = figures[np.isfinite(figures)]
    return [float(end) for end in np.percentile(figures, [2.5, 97.5])] if figures.size else None


def scores(
    predicted: FloatArray, recorded: FloatArray, guesses: Guesses, columns: Sequence[int], episodes: IntArray
) -> tuple[dict[str, float], dict[str, list[float] | None]]:
    """Return the skill against each guess [M, D] in ``columns``, and its 95 % interval over episodes."""
    own = squared_errors(predicted, recorded, columns)
    skills: dict[str, float] = {}
    ends: dict[str, list[float] | None] = {}
    for name, guess in guesses.items():
        other = squared_errors(guess, recorded, columns)
        mine, theirs = np.nansum([own, other], axis=1)
        skills[name] = 1.0 - float(metrics.ratio(mine, theirs, 1e-18))
        between = interval(own[:, None], other[:, None], episodes)
        ends[name] = [1.0 - between[1], 1.0 - between[0]] if between else None
    return skills, ends


def turns(translation: FloatArray, episodes: IntArray) -> IntArray:
    """Return the rows at which a recorded motion [M, 3] starts from rest or turns (:data:`TURN_DEGREES`)."""
    lengths = np.nan_to_num(np.linalg.norm(translation, axis=1))
    moving = lengths > metrics.still_threshold(translation)
    dot = np.nan_to_num((translation[1:] * translation[:-1]).sum(axis=1))
    cosines = np.nan_to_num(metrics.ratio(dot, lengths[1:] * lengths[:-1], 1e-18))
    turned = ~moving[:-1] | (cosines < np.cos(np.radians(TURN_DEGREES)))
    known = np.isfinite(translation[:-1]).all(axis=1) & (episodes[1:] == episodes[:-1])
    return np.flatnonzero(moving[1:] & known & turned) + 1


def at_turns(
    predicted: FloatArray, recorded: FloatArray, guesses: Guesses, episodes: IntArray, arms: Sequence[list[int]]
) -> dict[str, Any]:
    """Return the number of turns, and the direction cosines of the policy and of each guess at the turns.

    ``arms`` are the columns of each arm's translation.
    """
    rows = [turns(recorded[:, at], episodes) for at in arms]

    def cosine(actions: FloatArray) -> float:
        pairs = zip(arms, rows, strict=True)
        cosines = [metrics.direction_cosines(actions[:, at], recorded[:, at])[turned] for at, turned in pairs]
        return float(metrics.mean(np.concatenate(cosines), axis=None))

    guessed = {name: cosine(guess) for name, guess in guesses.items()}
    return {"count": sum(map(len, rows)), "direction_cosine": cosine(predicted), "baselines": guessed}
