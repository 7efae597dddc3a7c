"""Exact statistics of a data set, in the units and the space that a checkpoint normalises.

LeRobot 0.6.1 averages the quantiles of episodes, its successor takes their envelope, and openpi reads them from a
histogram over chunks without the last partial batch; here, every frame counts once (OpenVLA-OFT's formula).
Relative actions have one value for each frame and step of a chunk, without what is after an episode's end (of more
than 50 million numbers, every k-th frame counts).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.types import FloatArray
from vla_ros_lab.training.episodes import EpisodeSamples, RecordedEpisode, chunk
from vla_ros_models.normalization import LearnedStatistics

Figures = Mapping[str, FloatArray]
"""``mean``, ``std``, ``min``, ``max``, ``q01``, ``q10``, ``q50``, ``q90``, ``q99`` [N] or [K, N], and ``count``."""

_MOST = 50_000_000  # numbers of relative chunks; of more, every k-th frame counts
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def exact(values: FloatArray) -> Figures:
    """Return the statistics of ``values`` [F, N] or [F, K, N] over F; NaN is left out."""
    quantiles = np.nanquantile(values, list(_QUANTILES.values()), axis=0)
    return {
        "mean": np.nanmean(values, axis=0),
        "std": np.nanstd(values, axis=0),
        "min": np.nanmin(values, axis=0),
        "max": np.nanmax(values, axis=0),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
        "count": np.array([len(values)], np.float64),
    }


def state_of(episode: RecordedEpisode, samples: EpisodeSamples) -> FloatArray:
    """Return an episode's state vectors, joined in the policy's order, [T, N]; the newest of several times."""
    parts = [episode.state[one.key] for one in samples.spec.state]
    newest = [part[:, -1] if part.ndim == 3 else part for part in parts]
    return np.concatenate([np.zeros((len(episode.actions), 0)), *newest], axis=1)


def states(samples: EpisodeSamples, learned: LearnedStatistics | None = None) -> FloatArray:
    """Return all frames' states [F, N], converted as the checkpoint does before it normalises them."""
    found = np.concatenate([state_of(one, samples) for one in samples.data])
    convert = learned.convert_state if learned else None
    return found if convert is None else np.asarray(convert(found), np.float64)


def actions(samples: EpisodeSamples, learned: LearnedStatistics | None = None) -> FloatArray:
    """Return all frames' actions [F, N], or their chunks [F, K, N] if the checkpoint converts those.

    A chunk's actions after the episode's end are NaN.
    """
    convert = learned.convert_actions if learned else None
    if convert is None or not is_relative(convert, samples):
        found = [one.actions if convert is None else _converted(convert, one.actions, 0) for one in samples.data]
        return np.concatenate(found)
    count = sum(len(one.actions) for one in samples.data) * samples.spec.horizon * samples.spec.dimension
    return np.stack(list(_chunks(samples, convert, 1 + count // _MOST)))


def _converted(convert: Callable[..., Any], values: FloatArray, state: object) -> FloatArray:
    return np.asarray(convert(values, state), np.float64)


def is_relative(convert: Callable[..., Any], samples: EpisodeSamples) -> bool:
    """Return True if the numbers depend on the state at the beginning of a chunk."""
    first = samples.data[0]
    state = state_of(first, samples)[0]
    return not np.array_equal(convert(first.actions[:1], state), convert(first.actions[:1], state + 0.5))


def _chunks(samples: EpisodeSamples, convert: Callable[..., Any], every: int) -> Iterator[FloatArray]:
    for episode in samples.data:
        states = state_of(episode, samples)
        for frame in range(0, len(states), every):
            numbers, is_pad = chunk(episode.actions, frame, samples.spec.horizon)
            found = _converted(convert, numbers, states[frame])
            found[is_pad] = np.nan
            yield found


def over_steps(values: FloatArray, per_step: bool) -> FloatArray:
    """Return chunks [F, K, N] as they are, or as numbers [F * K, N] unless there are statistics of each step."""
    return values if per_step or values.ndim == 2 else values.reshape(-1, values.shape[-1])


def of_data(samples: EpisodeSamples, learned: LearnedStatistics) -> dict[str, Figures]:
    """Return the data's statistics of ``state``, if the policy takes one, and ``action``."""
    per_step = learned.action.first.ndim == 2 and len(learned.action.first) > 1
    found = {"action": exact(over_steps(actions(samples, learned), per_step))}
    return {"state": exact(states(samples, learned)), **found} if learned.state is not None else found


def in_layout(learned: LearnedStatistics, found: Mapping[str, Figures], episodes: int) -> Mapping[str, object]:
    """Return the content of the file in which the family stores statistics (``LearnedStatistics.layout``).

    ``openvla``: dataset_statistics.json; ``openpi``: norm_stats.json; ``lerobot``: tensors of the normaliser's and
    un-normaliser's files, by name; ``gr00t``: statistics.json, with one embodiment; ``gr00t_lerobot``: its entry,
    which is in an option ``raw_stats``, and such ``tensors``.
    """
    lists = {
        name: {key: values.tolist() for key, values in one.items() if key != "count"} for name, one in found.items()
    }
    if learned.layout == "openvla":
        count = int(found["action"]["count"][0])
        entry: dict[str, object] = {"action": {**lists["action"], "mask": learned.action.used.tolist()}}
        entry |= {"proprio": lists["state"]} if "state" in lists else {}
        return {learned.data_set: {**entry, "num_transitions": count, "num_trajectories": episodes}}
    if learned.layout == "openpi":
        kept = ("mean", "std", "q01", "q99")
        named = {"state": "state", "action": "actions"}
        return {"norm_stats": {named[name]: {key: one[key] for key in kept} for name, one in lists.items()}}
    named = {"state": "observation.state", "action": "action"}
    tensors = {
        f"{named[name]}.{key}": np.asarray(values, np.float32)
        for name, one in found.items()
        for key, values in one.items()
    }
    if learned.layout == "lerobot":
        return tensors
    parts = _in_parts(learned.parts, found)
    return {learned.data_set: parts} if learned.layout == "gr00t" else {"raw_stats": parts, "tensors": tensors}


def _in_parts(
    parts: Sequence[Sequence[tuple[str, int, bool]]], found: Mapping[str, Figures]
) -> Mapping[str, object]:
    result: dict[str, dict[str, object]] = {"state": {}, "action": {}, "relative_action": {}}
    for feature, each in zip(("state", "action"), parts, strict=True):
        start = 0
        for name, size, relative in each:
            columns, start = slice(start, start + size), start + size
            group = result["relative_action" if relative else feature]
            if feature in found:
                kept = {key: values for key, values in found[feature].items() if key != "count"}
                if not relative:  # the first action of every frame's chunk is each frame's own
                    kept = {key: values[0] if values.ndim == 2 else values for key, values in kept.items()}
                group[name] = {key: values[..., columns].tolist() for key, values in kept.items()}
    return result
