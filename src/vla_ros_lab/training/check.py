"""Compares a data set with a checkpoint before anything is trained, and finds what looks wrong.

Limits are those at which a person should look; what they do not notice may still be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_ros.config import Config
from vla_ros.contract.components import MOTIONS, Component
from vla_ros.contract.gripper import gripper_ends
from vla_ros.houses import NOTE, WRONG, Finding
from vla_ros.types import FloatArray
from vla_ros_lab.training import cameras, statistics
from vla_ros_lab.training.episodes import EpisodeSamples, RecordedEpisode
from vla_ros_models.normalization import Learned, LearnedStatistics

_SIGMAS = 4.0  # by which the middle or, as a factor, the spread of a number may differ from the checkpoint's
_NARROW = 0.02  # share of the checkpoint's spread below which a number hardly moves
_TAIL = 2.326  # standard deviations of a normal distribution at its 1st and 99th percentile
_DEGREES = 180 / np.pi
_IDLE_S, _IDLE_SHARE = 0.5, 0.1  # of an episode's start, and of all frames
_STILL = 0.01  # share of a number's range that is no motion
_RATE = 0.05
_RELATIVE = frozenset(("joint_delta", "joint_velocity", "tip_delta"))
_MOST_NAMED = 3


@dataclass(frozen=True)
class NumberRow:
    """One number of the state or the action, in the units of the checkpoint's training."""

    feature: str  # ``state`` or ``action``
    number: int
    name: str
    unit: str  # "" if unknown
    statistics: tuple[str, str]  # such as ``q01`` and ``q99``
    data: tuple[float, float]
    checkpoint: tuple[float, float] | None  # None if the checkpoint does not normalise the number
    # Where the checkpoint's statistics put the data's 1st and 99th percentile.
    normalized: tuple[float, float] | None
    sigmas: float = 0.0  # from the checkpoint's middle to the data's
    factor: float = 1.0  # of the data's spread to the checkpoint's

    @property
    def is_off(self) -> bool:
        """True if the number is not where the checkpoint's training had it."""
        return self.sigmas > _SIGMAS or self.factor > _SIGMAS


@dataclass(frozen=True)
class Comparison:
    """What ``--check`` tells."""

    summary: Mapping[str, Any]  # episodes, frames, rate, instructions, images
    rows: Sequence[NumberRow]
    findings: Sequence[Finding]
    choice: str  # ``checkpoint`` or ``data``: the statistics that training will use
    why: str

    @property
    def wrong(self) -> list[Finding]:
        return [one for one in self.findings if one.level == WRONG]


def check(
    samples: EpisodeSamples, learned: LearnedStatistics | None, config: Config, choice: str = "auto"
) -> Comparison:
    """Compare the data with the checkpoint; ``choice`` is ``checkpoint``, ``data`` or ``auto``."""
    found = statistics.of_data(samples, learned) if learned else {}
    rows = [] if learned is None else list(_rows(samples, learned, found))
    findings = [
        *_left_out(samples),
        *_amount(samples),
        *_numbers(rows),
        *_gripper(samples, config),
        *_rate(samples),
        *_episodes(samples),
        *cameras.examine(samples),
    ]
    if learned is None:
        findings.append(Finding("statistics", "this policy does not say with which it normalises", NOTE))
    elif learned.convert_actions and statistics.is_relative(learned.convert_actions, samples):
        findings.append(Finding("action", "relative to the state where a chunk begins, as in its training", NOTE))
    return Comparison(_summary(samples), rows, findings, *choose_statistics(rows, choice))


def choose_statistics(rows: Sequence[NumberRow], choice: str) -> tuple[str, str]:
    """Return the statistics to train with, and why."""
    if choice != "auto":
        return choice, f"--statistics {choice}"
    if not rows:
        return "data", "the checkpoint states none"
    off = [f"{row.feature} {row.number}" for row in rows if row.is_off]
    if off:
        return (
            "data",
            f"the checkpoint's do not fit {', '.join(off[:_MOST_NAMED])}{' ...' * (len(off) > _MOST_NAMED)}",
        )
    return "checkpoint", "the data lie where its training had them, so its numbers keep their meaning"


def _summary(samples: EpisodeSamples) -> dict[str, Any]:
    tasks = dict.fromkeys(one.task for one in samples.data)
    frames = sum(len(one.actions) for one in samples.data)
    return {
        "episodes": len(samples.data),
        "frames": frames,
        "samples": len(samples),
        "rate_hz": samples.rate_hz,
        "seconds": frames / samples.rate_hz,
        "instructions": list(tasks),
        "images": list(samples.binding.cameras),
        "corrections": sum(one.corrected for one in samples.data),
        "chunk": samples.spec.horizon,
    }


def units_of(components: Sequence[Component], size: int) -> list[str]:
    """Return the unit of each of ``size`` numbers, "" where it is unknown."""
    sizes = [component.size(0) for component in components]
    open_ones, left = sizes.count(0), size - sum(sizes)
    if not components or (open_ones and left % open_ones) or (left and not open_ones):
        return [""] * size
    share = left // open_ones if open_ones else 0
    units = []
    for component, count in zip(components, sizes, strict=True):
        unit = "" if component.quantity in ("tip_rotation", "tip_delta") else component.form
        units += [unit] * (count or share)
    return units


def _rows(
    samples: EpisodeSamples, learned: LearnedStatistics, found: Mapping[str, statistics.Figures]
) -> Iterator[NumberRow]:
    parts = {
        "state": [part for one in samples.spec.state for part in one.components],
        "action": samples.spec.action,
    }
    for feature, one in (("state", learned.state), ("action", learned.action)):
        if one is None or feature not in found:
            continue
        count = found[feature]["mean"].shape[-1]
        names, units = samples.names[feature], units_of(parts[feature], count)
        for number in range(count):
            name = names[number] if number < len(names) else ""
            yield _row(feature, number, name, units[number], found[feature], one)


def _row(feature: str, number: int, name: str, unit: str, found: statistics.Figures, learned: Learned) -> NumberRow:
    data = {key: values[..., number] for key, values in found.items() if key != "count"}
    if number >= len(learned.names) or not learned.used[number]:
        low, high = ("q01", "q99")
        return NumberRow(
            feature, number, name, unit, (low, high), (_least(data[low]), _most(data[high])), None, None
        )
    names = learned.names[number]
    first, second = learned.first[..., number], learned.second[..., number]
    middle, spread = _middle(first, second, names)
    own, width = _middle(data[names[0]], data[names[1]], names)
    if names == ("mean", "std"):
        ends = [(data[key] - first) / np.maximum(second, 1e-8) for key in ("q01", "q99")]
        shown = float(np.mean(data["mean"])), float(np.mean(data["std"]))
        theirs = float(np.mean(first)), float(np.mean(second))
    else:
        ends = [2 * (data[key] - first) / np.maximum(second - first, 1e-8) - 1 for key in ("q01", "q99")]
        shown, theirs = (_least(data[names[0]]), _most(data[names[1]])), (_least(first), _most(second))
    known = spread > 1e-6 * np.maximum(1, np.abs(middle))  # a number that never moved has no scale
    sigmas = np.where(known, np.abs(own - middle) / np.where(known, spread, 1), 0)
    factor = np.where(known, width / np.where(known, spread, 1), np.where(width > 1e-3, np.inf, 1))
    return NumberRow(
        feature,
        number,
        name,
        unit,
        names,
        shown,
        theirs,
        (_least(ends[0]), _most(ends[1])),
        _most(sigmas),
        _most(factor),
    )


def _middle(first: Any, second: Any, names: tuple[str, str]) -> tuple[Any, Any]:
    """Return the middle of a number and its standard deviation, or what that would be of bounds."""
    return (first, second) if names == ("mean", "std") else ((first + second) / 2, (second - first) / 2 / _TAIL)


def _least(values: Any) -> float:
    return float(np.min(values))


def _most(values: Any) -> float:
    return float(np.max(values))


def _left_out(samples: EpisodeSamples) -> Iterator[Finding]:
    for what, count in samples.notes.most_common():
        wrong = "NaN" in what or what.startswith("a bag:")
        yield Finding("left out", f"{what} ({count})", WRONG if wrong else NOTE)
    for remark in samples.remarks:
        yield Finding("recording", remark, NOTE)


def _amount(samples: EpisodeSamples) -> Iterator[Finding]:
    frames, horizon = sum(len(one.actions) for one in samples.data), samples.spec.horizon
    if frames <= horizon:
        found = f"{frames} frame{'s' * (frames != 1)} in all, and a chunk has {horizon} actions"
        yield Finding("amount", found, WRONG, "record demonstrations: tens of episodes of a task")
    short = [one for one in samples.data if len(one.actions) < horizon]
    if short:
        lost = "give no sample" if samples.whole_chunks else "are filled with their last action"
        found = f"{len(short)} of {len(samples.data)} are shorter than a chunk of {horizon} actions and {lost}"
        yield Finding("episodes", f"{found}: {_named(short)}", WRONG, "record longer episodes, or leave these out")
    if silent := [one for one in samples.data if not one.task.strip()]:
        yield Finding("instruction", f"none in {_named(silent)}", WRONG, "name it with --instruction TEXT")
    if not any(_moves(samples, one).any() for one in samples.data):
        yield Finding(
            "motion", "neither the arm nor an action moves in any episode", WRONG, "record demonstrations"
        )


def _named(episodes: Sequence[RecordedEpisode]) -> str:
    more = len(episodes) - _MOST_NAMED
    return ", ".join(one.name for one in episodes[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _numbers(rows: Sequence[NumberRow]) -> Iterator[Finding]:
    for feature in ("state", "action"):
        own = [row for row in rows if row.feature == feature and row.checkpoint]
        angles = [row for row in own if not _is_gripper(row.name)]
        factors = np.array([row.factor for row in angles if np.isfinite(row.factor) and row.factor > 0])
        ratio = float(np.median(factors)) if len(factors) else 1.0
        largest = max((abs(end) for row in angles for end in row.data), default=0.0)
        theirs = max((abs(end) for row in angles for end in row.checkpoint or ()), default=0.0)
        numbers = [row for row in own if row.is_off]
        units = ("degrees", "radians", "rad") if ratio > 1 else ("radians", "degrees", "deg")
        apart = max(ratio, 1 / max(ratio, 1e-9))
        if _DEGREES / 3 < apart < 3 * _DEGREES and max(largest, theirs) > 2 * np.pi > min(largest, theirs):
            found = f"{units[0]}, where the checkpoint has {units[1]} ({ratio:.3g} times as far)"
            yield Finding(
                feature, found, WRONG, f"export the bags again, or name the components, with [{units[2]}]"
            )
            numbers = [row for row in numbers if row not in angles]
        for row in numbers:
            yield Finding(feature, f"{row.number} {row.name}: {_off(row)}", WRONG, _ADVICE)
        still = [row for row in own if not row.is_off and row.factor < _NARROW]
        if still and len(still) < len(own):
            named = ", ".join(f"{row.number} {row.name}".strip() for row in still[:_MOST_NAMED])
            yield Finding(feature, f"{len(still)} of {len(own)} numbers hardly move ({named})", NOTE)


_ADVICE = "unit, order of the numbers or another robot; if it is meant, --statistics data"


def _off(row: NumberRow) -> str:
    data, theirs = (" .. ".join(f"{end:.4g}" for end in ends) for ends in (row.data, row.checkpoint or ()))
    apart = (
        f"{row.sigmas:.3g} standard deviations away" if row.sigmas > _SIGMAS else f"{row.factor:.3g} times as wide"
    )
    return f"{' and '.join(row.statistics)} are {data}, the checkpoint's {theirs}: {apart}"


def _is_gripper(name: str) -> bool:
    return any(word in name.lower() for word in ("gripper", "finger", "hand", "jaw"))


def _gripper(samples: EpisodeSamples, config: Config) -> Iterator[Finding]:
    """Compare each gripper's number of the action with its measured opening: which is the one a frame later."""
    spec, names = samples.spec, samples.names
    arms = {arm.name: arm.gripper for arm in config.arms}
    measured = [index for index, name in enumerate(names["state"]) if _is_gripper(name)]
    commanded = [index for index, name in enumerate(names["action"]) if _is_gripper(name)]
    signs = np.sign([float(np.diff(part.range)[0]) for part in _parts(samples) if part.range] or [1.0])
    for column, one in zip(commanded, measured if spec.state else (), strict=False):
        part = next((part for part, place in _columns(samples) if place.start == column), None)
        closed, opened = gripper_ends(part, arms[part.arm]) if part is not None and part.arm in arms else (0.0, 1.0)
        pairs = [(each.actions[:-1, column], statistics.state_of(each, samples)[1:, one]) for each in samples.data]
        action, state = (np.concatenate(side) for side in zip(*pairs, strict=True))
        if min(np.std(action), np.std(state)) < 1e-6:
            continue
        agreement = float(np.corrcoef(action * np.sign(opened - closed), state * signs[0])[0, 1])
        if agreement < -0.3:
            name = f"action {column} {names['action'][column]}"
            found = f"{name} opens when the gripper closes (correlation {agreement:.2f})"
            fix = "swap gripper.open_value and closed_value, or the ends of its range in features"
            yield Finding("gripper", f"inverted: {found}", WRONG, fix)


def _parts(samples: EpisodeSamples) -> list[Component]:
    return [part for one in samples.spec.state for part in one.components if part.quantity == "gripper"]


def _columns(samples: EpisodeSamples) -> Sequence[tuple[Component, slice]]:
    return samples.binding.columns or (samples.spec.columns() if samples.spec.action else ())


def _rate(samples: EpisodeSamples) -> Iterator[Finding]:
    wanted, own = samples.spec.rate_hz, samples.rate_hz
    if wanted is None:
        yield Finding("rate", f"the data have {own:g} Hz; the checkpoint does not say its own", NOTE)
    elif abs(own - wanted) > _RATE * wanted:
        found = f"the data have {own:g} Hz, the policy's step is {1 / wanted:.3g} s ({wanted:g} Hz)"
        yield Finding("rate", found, WRONG, f"export again with --fps {wanted:g}")


def _moves(samples: EpisodeSamples, episode: RecordedEpisode) -> NDArray[np.bool_]:
    """Return in which frames [T] the arm is elsewhere than at the episode's beginning, or an action moves it."""
    quantities = {part.quantity for part in samples.spec.action} & set(MOTIONS)
    if samples.spec.state:
        return _beyond(np.abs((state := statistics.state_of(episode, samples)) - state[:1]), state)
    if quantities <= _RELATIVE and quantities:
        return _beyond(np.abs(episode.actions), episode.actions)
    return _beyond(np.abs(episode.actions - episode.actions[:1]), episode.actions)


def _beyond(moved: FloatArray, values: FloatArray) -> NDArray[np.bool_]:
    span = np.ptp(values, axis=0)
    found: NDArray[np.bool_] = ((moved > _STILL * span) & (span > 1e-6)).any(axis=1)
    return found


def _episodes(samples: EpisodeSamples) -> Iterator[Finding]:
    idle = []
    for one in samples.data:
        moving = _moves(samples, one)
        idle.append(int(np.argmax(moving)) if moving.any() else len(moving))
    frames = sum(len(one.actions) for one in samples.data)
    late = [one for one, count in zip(samples.data, idle, strict=True) if count > _IDLE_S * samples.rate_hz]
    if late and (sum(idle) > _IDLE_SHARE * frames or 2 * len(late) > len(idle)):
        median = float(np.median(idle)) / samples.rate_hz
        found = f"idle starts: the arm stands for {median:.3g} s (median), {sum(idle) / frames:.0%} of all frames"
        yield Finding("episodes", f"{found}: {_named(late)}", WRONG, "a policy learns to stand still: cut them off")
    won = [one for one in samples.data if one.label == "success"]
    still = [one for one in won if not _moves(samples, one).any()]
    column = next((index for index, name in enumerate(samples.names["action"]) if _is_gripper(name)), None)
    if column is not None and len(won) > 2:
        used = [bool(np.ptp(one.actions[:, column]) > 1e-6) for one in won]
        if sum(used) >= 0.8 * len(won):
            still += [one for one, each in zip(won, used, strict=True) if not each and one not in still]
    usual = float(np.median([len(one.actions) for one in won])) if won else 0.0
    still += [one for one in won if 4 * len(one.actions) < usual and one not in still]
    if still:
        found = f"{len(still)} of {len(won)} with the label success hardly move, use no gripper or end early"
        yield Finding(
            "labels", f"{found}: {_named(still)}", WRONG, "look at them; label failures failure or discard"
        )
