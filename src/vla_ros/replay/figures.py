"""From the samples of all bags to the figures of the JSON file; docs/replay.md explains each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.replay import baselines, bootstrap, metrics, skill
from vla_ros.replay import samples as samples_of
from vla_ros.replay.frames import Frames, gather
from vla_ros.replay.samples import Samples
from vla_ros.replay.truth import RULES
from vla_ros.types import ActionSpec, ControlMode, FloatArray, IntArray

SCHEMA = "vla_ros/replay/1"
END_EFFECTOR = ("dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper")


def dimension_names(spec: ActionSpec, command_names: Sequence[str]) -> list[str]:
    """What each number of an action is called."""
    if spec.control_mode is ControlMode.END_EFFECTOR_DELTA and spec.dimension == 7 and spec.gripper_index == 6:
        return list(END_EFFECTOR)
    names = iter(command_names)
    return [
        "gripper" if index == spec.gripper_index else next(names, f"[{index}]") for index in range(spec.dimension)
    ]


def quality(predicted: FloatArray, recorded: FloatArray, spec: ActionSpec, config: Config) -> dict[str, float]:
    """The three headline figures: ``mae``, ``direction_cosine``, ``gripper_f1``."""
    is_pose = spec.control_mode is ControlMode.END_EFFECTOR_DELTA
    cosines = metrics.direction_cosines(predicted[:, :3], recorded[:, :3]) if is_pose else np.full(1, np.nan)
    closed, wanted = _grippers(predicted, recorded, spec, config)
    return {
        "mae": _mean(metrics.mae(predicted, recorded)),
        "motion_mae": _mean(metrics.mae(predicted, recorded)[_motion(spec)]),
        "direction_cosine": _mean(cosines),
        "gripper_f1": metrics.confusion(closed, wanted).f1,
    }


def _mean(values: FloatArray) -> float:
    return float(metrics.mean(values, axis=None))


def _motion(spec: ActionSpec) -> list[int]:
    return [index for index in range(spec.dimension) if index != spec.gripper_index]


def _grippers(
    predicted: FloatArray, recorded: FloatArray, spec: ActionSpec, config: Config
) -> tuple[FloatArray, FloatArray]:
    """Predicted and recorded gripper states, 1 for closed."""
    if spec.gripper_index is None:
        nothing = np.full(len(predicted), np.nan)
        return nothing, nothing
    gripper = config.gripper
    convention = (gripper.open_value, gripper.closed_value, gripper.threshold)
    column = spec.gripper_index
    return metrics.is_closed(predicted[:, column], *convention), metrics.is_closed(recorded[:, column], *convention)


def intervals(frames: Frames, rows: IntArray, spec: ActionSpec, config: Config) -> dict[str, list[float] | None]:
    """95 % bootstrap intervals over episodes of the headline figures; None where there are too few episodes."""
    predicted, recorded, episodes = frames.predicted[rows], frames.recorded[rows], frames.episodes[rows]
    errors = np.abs(predicted - recorded)
    known = np.isfinite(errors)
    dimensions = errors.shape[1]
    is_pose = spec.control_mode is ControlMode.END_EFFECTOR_DELTA
    nothing = np.full(len(rows), np.nan)
    cosines = metrics.direction_cosines(predicted[:, :3], recorded[:, :3]) if is_pose else nothing
    closed, wanted = _grippers(predicted, recorded, spec, config)
    both = np.isfinite(closed) & np.isfinite(wanted)
    counts = np.stack([both & (closed > 0) & (wanted > 0), both & ((closed > 0) ^ (wanted > 0))], axis=1)
    columns = np.concatenate(
        (
            np.where(known, errors, 0.0),
            known,
            np.stack([np.nan_to_num(cosines), np.isfinite(cosines)], axis=1),
            counts,
        ),
        axis=1,
    ).astype(float)
    sums = bootstrap.per_episode(columns, episodes)

    def mae(s: FloatArray) -> FloatArray:
        total, count = s[:, :dimensions], s[:, dimensions : 2 * dimensions]
        each = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
        return metrics.mean(each, axis=1)

    def ratio(s: FloatArray, top: int, bottom: int) -> FloatArray:
        result: FloatArray = np.full(len(s), np.nan)
        return np.divide(s[:, top], s[:, bottom], out=result, where=s[:, bottom] > 0)

    def gripper_f1(s: FloatArray) -> FloatArray:
        hit, wrong = 2 * s[:, 2 * dimensions + 2], s[:, 2 * dimensions + 3]
        result: FloatArray = np.full(len(s), np.nan)
        return np.divide(hit, hit + wrong, out=result, where=hit + wrong > 0)

    found = {
        "mae": bootstrap.interval(sums, mae),
        "direction_cosine": bootstrap.interval(sums, lambda s: ratio(s, 2 * dimensions, 2 * dimensions + 1)),
        "gripper_f1": bootstrap.interval(sums, gripper_f1),
    }
    return {name: list(ends) if ends else None for name, ends in found.items()}


def guesses(frames: Frames, rows: IntArray, spec: ActionSpec, config: Config) -> dict[str, FloatArray]:
    """What the three baselines answer on the same frames, float64 [M, D] each."""
    recorded, episodes = frames.recorded[rows], frames.episodes[rows]
    zero = baselines.zero_action(recorded, spec.gripper_index, config.gripper.open_value)
    first = zero[0] if len(zero) else np.zeros(spec.dimension)
    return {
        "zero": zero,
        "hold_last": baselines.hold_last(recorded, episodes, first),
        "mean_action": baselines.mean_action(recorded),
    }


def ahead(frames: Frames, rows: IntArray, spec: ActionSpec, config: Config) -> dict[str, Any]:
    """The baselines' figures, the policy's skill against each, and who is right where the motion turns."""
    predicted, recorded, episodes = frames.predicted[rows], frames.recorded[rows], frames.episodes[rows]
    guessed = guesses(frames, rows, spec, config)
    score, ends = skill.scores(predicted, recorded, guessed, skill.columns_of(spec), episodes)
    is_pose = spec.control_mode is ControlMode.END_EFFECTOR_DELTA
    return {
        "baselines": {name: quality(guess, recorded, spec, config) for name, guess in guessed.items()},
        "skill": {**score, "intervals": ends},
        "turns": skill.at_turns(predicted, recorded, guessed, episodes) if is_pose else None,
    }


def dimensions(frames: Frames, rows: IntArray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of each number of the action."""
    predicted, recorded = frames.predicted[rows], frames.recorded[rows]
    at, beyond = metrics.saturation(frames.normalized)
    told = int(np.isfinite(frames.normalized).any(axis=1).sum())
    columns = {
        "mae": metrics.mae(predicted, recorded),
        "rmse": metrics.rmse(predicted, recorded),
        "bias": metrics.bias(predicted, recorded),
        "correlation": metrics.correlation(predicted, recorded),
        "predicted_std": np.sqrt(metrics.mean((frames.predicted - metrics.mean(frames.predicted)) ** 2)),
        "recorded_std": np.sqrt(metrics.mean((recorded - metrics.mean(recorded)) ** 2)),
    }
    return [
        {
            "name": name,
            **{key: float(values[index]) for key, values in columns.items()},
            "saturated": int(at[index]) / told if told else math.nan,
            "saturated_wrongly": _saturated_wrongly(frames, rows, index),
            "out_of_range": int(beyond[index]),
        }
        for index, name in enumerate(names)
    ]


def _saturated_wrongly(frames: Frames, rows: IntArray, column: int) -> float:
    """Share of compared frames at the end of the range though something else was recorded.

    An expert that moves as fast as it may is at the end of the range too, and rightly so: an answer within a
    quarter of the recorded spread counts as the same.
    """
    recorded = frames.recorded[rows, column]
    known = np.isfinite(recorded) & np.isfinite(frames.normalized[rows, column])
    if not known.any():
        return math.nan
    spread = float(np.std(recorded[known]))
    normalized = frames.normalized[rows, column][known]
    at = np.abs(normalized) >= 1 - metrics.EDGE
    off = np.abs(frames.predicted[rows, column] - recorded)[known] > max(0.25 * spread, 1e-9)
    return float((at & off).mean())


def gripper(frames: Frames, rows: IntArray, spec: ActionSpec, config: Config) -> dict[str, Any]:
    """Accuracy, F1 and the timing of opening and closing."""
    closed, wanted = _grippers(frames.predicted[rows], frames.recorded[rows], spec, config)
    counts = metrics.confusion(closed, wanted)
    events = metrics.match_events(closed, wanted, frames.times[rows], frames.episodes[rows])
    return {
        "accuracy": counts.accuracy,
        "f1": counts.f1,
        "closed_predicted": _mean(closed),
        "closed_recorded": _mean(wanted),
        "predicted_range": _range(frames.predicted[rows], spec.gripper_index),
        "recorded_range": _range(frames.recorded[rows], spec.gripper_index),
        "fingers": {
            "when_closed": _mean(frames.openings[rows][wanted == 1]),
            "when_open": _mean(frames.openings[rows][wanted == 0]),
        },
        "events": {
            "recorded": events.recorded,
            "predicted": events.predicted,
            "matched": events.matched,
            "f1": events.f1,
            "delay_s": {"mean": _mean(events.delays), **metrics.percentiles(events.delays, (10, 50, 90))},
        },
    }


def _range(actions: FloatArray, column: int | None) -> list[float]:
    """Smallest and largest gripper number."""
    known = actions[:, column] if column is not None else np.zeros(0)
    known = known[np.isfinite(known)]
    return [float(known.min()), float(known.max())] if known.size else [math.nan, math.nan]


def motion(frames: Frames, rows: IntArray, spec: ActionSpec) -> dict[str, float]:
    """Jerk and idleness, predicted beside recorded."""
    is_position = spec.control_mode is ControlMode.JOINT_POSITION
    is_pose = spec.control_mode is ControlMode.END_EFFECTOR_DELTA
    columns = [0, 1, 2] if is_pose else _motion(spec)
    times, episodes = frames.times[rows], frames.episodes[rows]
    result = {}
    still = metrics.still_threshold(frames.recorded[rows][:, columns])
    for name, actions in (("predicted", frames.predicted[rows]), ("recorded", frames.recorded[rows])):
        moved = actions[:, columns]
        result[f"jerk_{name}"] = metrics.jerk(moved, times, episodes, 3 if is_position else 2)
        result[f"idle_{name}"] = math.nan if is_position else metrics.idle_fraction(moved, still)
    return result


def latency(samples: Sequence[Samples]) -> dict[str, dict[str, float]]:
    """Percentiles of each stage over all frames but each bag's first, which warms up."""
    stages: dict[str, list[FloatArray]] = {}
    for bag in samples:
        for name, values in bag.stages_ms.items():
            stages.setdefault(name, []).append(values[1:] if len(values) > 1 else values)
    return {name: metrics.percentiles(np.concatenate(values)) for name, values in stages.items()}


def episodes_of(samples: Sequence[Samples], spec: ActionSpec, config: Config) -> list[dict[str, Any]]:
    """Figures of each episode."""
    result = []
    for bag in samples:
        for episode, instruction in enumerate(bag.instructions):
            rows = np.flatnonzero(bag.episodes == episode)
            if not rows.size:
                continue
            seconds = (bag.times[rows] - bag.times[rows[0]]) * 1e-9
            figures = quality(bag.predicted[rows], bag.recorded[rows], spec, config)
            result.append(
                {
                    "bag": bag.bag,
                    "instruction": instruction,
                    "frames": int(rows.size),
                    "start_s": float((bag.times[rows[0]] - bag.times[0]) * 1e-9),
                    "seconds": float(seconds[-1]),
                    **figures,
                }
            )
    return result


def summarize(
    samples: Sequence[Samples], spec: ActionSpec, config: Config, *, speed: float, every: int, tolerance_s: float
) -> dict[str, Any]:
    """Everything but verdict, config and versions."""
    measured = gather(samples)
    counted = [samples_of.commanded(bag, spec.gripper_index, config.gripper) for bag in samples]
    frames = gather(counted)
    rows = frames.compared
    commands = next((bag.command_names for bag in samples if bag.command_names), ())
    names = dimension_names(spec, commands)
    period_ms = 1e3 / (config.control.rate_hz or spec.rate_hz or 30.0)
    totals = np.concatenate([bag.stages_ms.get("total", np.zeros(0))[1:] for bag in samples])
    missed = int((totals > period_ms).sum())
    wall = sum(bag.wall_s for bag in samples)
    answered = len(frames.times)
    rules = sorted({bag.rule for bag in samples})
    return {
        "schema": SCHEMA,
        "mode": "as_it_would_have_run" if speed else "open_loop",
        "speed": speed or None,
        **quality(frames.predicted[rows], frames.recorded[rows], spec, config),
        "rmse": _mean(metrics.rmse(frames.predicted[rows], frames.recorded[rows])),
        "intervals": intervals(frames, rows, spec, config),
        **ahead(frames, rows, spec, config),
        "dimensions": dimensions(frames, rows, names),
        "gripper": gripper(measured, rows, spec, config),
        "motion": motion(frames, rows, spec),
        "latency_ms": latency(samples),
        "deadline": {
            "period_ms": period_ms,
            "missed": missed,
            "share": missed / len(totals) if len(totals) else math.nan,
        },
        "frame_age_ms": metrics.percentiles(np.concatenate([bag.age_ms for bag in samples])),
        "frames": {
            "received": sum(bag.received for bag in samples),
            "used": answered,
            "compared": int(rows.size),
            "skipped": sum(bag.skipped for bag in samples),
            "dropped": dict(_total(bag.dropped for bag in samples)),
            "pictures_prepared": sum(bag.pictures for bag in samples),
            "every": every,
        },
        "stamp_offset_s": _stamp_offset(samples),
        "commands": {
            "made": int(sum(np.isfinite(bag.commands).any(axis=1).sum() for bag in samples)),
            "refused": dict(_total(bag.refused for bag in samples)),
            "limited": dict(_total(bag.limited for bag in samples)),
        },
        "episodes": episodes_of(counted, spec, config),
        "truth": {
            "source": sorted({bag.topics.get("truth", "none") for bag in samples}),
            "rule": rules,
            "meaning": [RULES[rule] for rule in rules],
            "tolerance_s": tolerance_s,
            "problems": sorted({bag.problem for bag in samples if bag.problem}),
        },
        "throughput": {"frames_per_second": answered / wall if wall else math.nan, "wall_s": wall},
        "bags": [
            {
                "path": bag.bag,
                "topics": bag.topics,
                "frames": len(bag.times),
                "complete": bag.complete,
                "losses": [str(loss) for loss in bag.losses],
                "left_out": dict(bag.notes),
            }
            for bag in samples
        ],
        "interrupted": not all(bag.complete for bag in samples),
    }


def _stamp_offset(samples: Sequence[Samples]) -> float:
    """Median of the frames' stamps minus the recorder's times, in seconds; NaN where frames have no stamps."""
    offsets = [(bag.stamps - bag.times)[bag.stamps != 0] for bag in samples]
    joined = np.concatenate(offsets) if offsets else np.zeros(0)
    return float(np.median(joined)) * 1e-9 if joined.size else math.nan


def _total(counters: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def jsonable(value: Any) -> Any:
    """NaN and infinity as null (JSON has neither), numpy numbers as plain ones."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
