"""Computes the figures of the JSON file from the samples of all bags; docs/replay.md explains each figure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray
from vla_ros_lab.replay import metrics, skill
from vla_ros_lab.replay.compare import SCHEMA
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.prepare import step_seconds
from vla_ros_lab.replay.samples import Samples, commanded, gather
from vla_ros_lab.replay.truth import RULES

END_EFFECTOR = ("dx", "dy", "dz", "droll", "dpitch", "dyaw")


def dimension_names(spec: PolicySpec, joints: Iterable[str]) -> list[str]:
    """Return the names of an action's numbers, with the arm's name if there are several.

    ``joints`` are the commanded joints, in order.
    """
    left, several = iter(joints), len({part.arm for part in spec.action}) > 1
    names: list[str] = []
    for part, columns in spec.columns():
        labels = {"tip_delta": END_EFFECTOR, "gripper": ("gripper",)}.get(part.quantity)
        for place, index in enumerate(range(columns.start, columns.stop)):
            name = labels[place] if labels else next(left, f"[{index}]")
            names.append(f"{part.arm} {name}" if labels and several else name)
    return names


@dataclass(frozen=True)
class Comparer:
    """Compares a policy's predicted actions with the recorded actions."""

    spec: PolicySpec
    config: Config

    def cosines(self, predicted: FloatArray, recorded: FloatArray) -> FloatArray:
        """Return the direction cosine of each frame and arm, [M, A]; A is 0 if actions have no direction."""
        arms = skill.translations(self.spec)
        cosines = [metrics.direction_cosines(predicted[:, at], recorded[:, at]) for at in arms]
        return np.array(cosines).reshape(len(arms), len(predicted)).T

    def closed(self, actions: FloatArray) -> FloatArray:
        """Return the state of each gripper, [M, G]: 1 closed, 0 open, NaN unknown."""
        return metrics.is_closed(actions[:, list(self.spec.grippers)], self.config.gripper)

    def quality(self, predicted: FloatArray, recorded: FloatArray) -> dict[str, float]:
        errors = metrics.mae(predicted, recorded)
        return {
            "mae": _mean(errors),
            "motion_mae": _mean(errors[skill.motion_columns(self.spec)]),
            "direction_cosine": _mean(self.cosines(predicted, recorded)),
            "gripper_f1": metrics.gripper_scores(self.closed(predicted), self.closed(recorded))[1],
        }

    def intervals(self, frames: Samples) -> dict[str, list[float] | None]:
        """Return 95 % bootstrap intervals over episodes; None for a single episode."""
        return {name: skill.interval(*pair, frames.episodes) for name, pair in self._sums(frames).items()}

    def differences(self, first: Samples, second: Samples) -> dict[str, list[float] | None]:
        """Return such intervals of the second's figures minus the first's, of the same frames."""
        pairs, others = self._sums(first), self._sums(second)
        return {name: skill.paired_interval(pairs[name], others[name], first.episodes) for name in pairs}

    def _sums(self, frames: Samples) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Return what is summed above and below the fraction of each figure, [M, S] each."""
        errors = np.abs(frames.predicted - frames.recorded)
        cosines = self.cosines(frames.predicted, frames.recorded)
        closed, wanted = self.closed(frames.predicted), self.closed(frames.recorded)
        both, differ = 2.0 * np.nansum(closed * wanted, axis=1), np.nansum(np.abs(closed - wanted), axis=1)
        return {
            "mae": (errors, np.isfinite(errors)),
            "direction_cosine": (cosines, np.isfinite(cosines)),
            "gripper_f1": (both[:, None], (both + differ)[:, None]),
        }

    def ahead(self, frames: Samples) -> dict[str, Any]:
        """Return the baselines' figures, the policy's skill against each, and cosines at turns."""
        predicted, recorded, episodes = frames.predicted, frames.recorded, frames.episodes
        guesses = skill.baselines(recorded, episodes, self.spec.grippers, self.config.gripper.open_value)
        arms = skill.translations(self.spec)
        score, ends = skill.scores(predicted, recorded, guesses, skill.columns_of(self.spec), episodes)
        return {
            "baselines": {name: self.quality(guess, recorded) for name, guess in guesses.items()},
            "skill": {**score, "intervals": ends},
            "turns": skill.at_turns(predicted, recorded, guesses, episodes, arms) if arms else None,
        }

    def gripper(self, frames: Samples) -> dict[str, Any]:
        """Return the accuracy and F1 of the grippers, and the timing of opening and closing."""
        closed, wanted = self.closed(frames.predicted), self.closed(frames.recorded)
        accuracy, f1 = metrics.gripper_scores(closed, wanted)
        events = metrics.match_events(closed, wanted, frames.seconds, frames.episodes)
        return {
            "accuracy": accuracy,
            "f1": f1,
            "closed_predicted": _mean(closed),
            "closed_recorded": _mean(wanted),
            "predicted_range": self._gripper_range(frames.predicted),
            "recorded_range": self._gripper_range(frames.recorded),
            "fingers": {
                "when_closed": _mean(frames.openings[wanted == 1]),
                "when_open": _mean(frames.openings[wanted == 0]),
            },
            "events": {
                "recorded": events.recorded,
                "predicted": events.predicted,
                "matched": len(events.delays),
                "f1": events.f1,
                "delay_s": {
                    "mean": _mean(events.delays),
                    **metrics.percentile_figures(events.delays, (10, 50, 90)),
                },
            },
        }

    def _gripper_range(self, actions: FloatArray) -> list[float]:
        values = actions[:, list(self.spec.grippers)]
        values = values[np.isfinite(values)]
        return [float(values.min()), float(values.max())] if values.size else [math.nan, math.nan]

    def motion(self, frames: Samples) -> dict[str, float]:
        """Return the jerk and the share of idle steps of predicted and recorded motion."""
        is_position = self.spec.motion == "joint_position"
        columns = skill.columns_of(self.spec)
        still = metrics.still_threshold(frames.recorded[:, columns])
        result = {}
        for name, actions in (("predicted", frames.predicted), ("recorded", frames.recorded)):
            moved = actions[:, columns]
            order = 3 if is_position else 2
            result[f"jerk_{name}"] = metrics.jerk(moved, frames.seconds, frames.episodes, order)
            result[f"idle_{name}"] = math.nan if is_position else metrics.idle_share(moved, still)
        return result

    def episodes(self, bags: Sequence[Samples]) -> list[dict[str, Any]]:
        return [
            {
                "bag": bag.bag,
                "instruction": instruction,
                "frames": len(rows),
                "start_s": float(bag.seconds[rows[0]]),
                "seconds": float(bag.seconds[rows[-1]] - bag.seconds[rows[0]]),
                **self.quality(bag.predicted[rows], bag.recorded[rows]),
            }
            for bag in bags
            for episode, instruction in enumerate(bag.instructions)
            if (rows := np.flatnonzero(bag.episodes == episode)).size
        ]


def _mean(values: FloatArray) -> float:
    return float(metrics.mean(values, axis=None))


def dimensions(frames: Samples, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each action dimension over all frames with a result."""
    rows = frames.compared
    predicted, recorded = frames.predicted[rows], frames.recorded[rows]
    known = np.isfinite(frames.normalized).any(axis=1, keepdims=True)
    # A number at the end of its range is right if it is within a quarter of the recorded standard deviation.
    off = np.abs(predicted - recorded) > np.maximum(0.25 * np.nan_to_num(metrics.std(recorded)), 1e-9)
    scaled = frames.normalized[rows]
    wrong = np.where(np.isfinite(recorded + scaled), metrics.at_edge(scaled) & off, np.nan)
    columns = {
        "mae": metrics.mae(predicted, recorded),
        "rmse": metrics.rmse(predicted, recorded),
        "bias": metrics.mean(predicted - recorded),
        "correlation": metrics.correlation(predicted, recorded),
        "predicted_std": metrics.std(frames.predicted),
        "recorded_std": metrics.std(recorded),
        "saturated": metrics.mean(np.where(known, metrics.at_edge(frames.normalized), np.nan)),
        "saturated_wrongly": metrics.mean(wrong),
    }
    beyond = np.count_nonzero(np.abs(frames.normalized) > 1 + 1e-9, axis=0)
    figures = [{key: float(values[index]) for key, values in columns.items()} for index in range(len(names))]
    rows_of = zip(names, figures, beyond.tolist(), strict=False)
    return [{"name": name, **row, "out_of_range": out} for name, row, out in rows_of]


def _times(bags: Sequence[Samples], frames: Samples, period_ms: float) -> dict[str, Any]:
    """Return latencies by stage, deadlines, ages and throughput.

    Latencies and deadlines leave out each bag's first frame, which is a warm-up.
    """
    stages: dict[str, list[FloatArray]] = {}
    for bag in bags:
        for name, values in bag.stages_ms.items():
            stages.setdefault(name, []).append(values[1:] if len(values) > 1 else values)
    totals = np.concatenate([bag.stages_ms.get("total", np.zeros(0))[1:] for bag in bags])
    missed = int((totals > period_ms).sum())
    share = missed / len(totals) if len(totals) else math.nan
    rate = len(frames.times) / frames.wall_s if frames.wall_s else math.nan
    return {
        "latency_ms": {name: metrics.percentile_figures(np.concatenate(values)) for name, values in stages.items()},
        "deadline": {"period_ms": period_ms, "missed": missed, "share": share},
        "frame_age_ms": metrics.percentile_figures(frames.age_ms),
        "throughput": {"frames_per_second": rate, "wall_s": frames.wall_s},
    }


def _truth(bags: Sequence[Samples], tolerance_s: float) -> dict[str, Any]:
    rules = sorted({bag.rule for bag in bags})
    return {
        "source": sorted({bag.topics.get("truth", "none") for bag in bags}),
        "rule": rules,
        "meaning": [RULES[rule] for rule in rules],
        "tolerance_s": tolerance_s,
        "problems": sorted({bag.problem for bag in bags if bag.problem}),
    }


def _bag(bag: Samples) -> dict[str, Any]:
    start = min([*bag.times[:1].tolist(), *(time for time, _ in bag.stops)], default=0)
    return {
        "path": bag.bag,
        "frames": len(bag.times),
        **{name: getattr(bag, name) for name in ("topics", "complete", "execution")},
        "losses": list(map(str, bag.losses)),
        "left_out": dict(bag.notes),
        "stops": [{"seconds": 1e-9 * (time - start), "why": why} for time, why in bag.stops],
    }


def summarize(bags: Sequence[Samples], spec: PolicySpec, config: Config, options: ReplayOptions) -> dict[str, Any]:
    """Return all figures except verdict, configuration and versions."""
    compare = Comparer(spec, config)
    counted = [commanded(bag, spec.grippers, config.gripper) for bag in bags]
    measured, frames = gather(bags), gather(counted)
    compared = frames.take(frames.compared)
    fingers = {finger for arm in config.arms for finger in arm.robot.gripper_joint_names}
    names = dimension_names(spec, (joint for joint in frames.commands if joint not in fingers))
    offsets = np.concatenate([(bag.stamps - bag.times)[bag.stamps != 0] for bag in bags])
    return {
        "schema": SCHEMA,
        "mode": "as_it_would_have_run" if options.speed else "open_loop",
        "speed": options.speed or None,
        **compare.quality(compared.predicted, compared.recorded),
        "rmse": _mean(metrics.rmse(compared.predicted, compared.recorded)),
        "intervals": compare.intervals(compared),
        **compare.ahead(compared),
        "dimensions": dimensions(frames, names),
        "gripper": compare.gripper(measured.take(frames.compared)),
        "motion": compare.motion(compared),
        **_times(bags, frames, 1e3 * step_seconds(config, spec)),
        "frames": {
            **{name: getattr(frames, name) for name in ("received", "skipped")},
            "used": len(frames.times),
            "compared": len(compared.times),
            "dropped": dict(frames.dropped),
            "images_prepared": frames.images,
            "every": options.every,
        },
        "stamp_offset_s": float(np.median(offsets)) * 1e-9 if offsets.size else math.nan,
        "commands": {
            "made": int(np.isfinite(list(frames.commands.values())).any(axis=0).sum()),
            **{name: dict(getattr(frames, name)) for name in ("refused", "limited")},
        },
        "episodes": compare.episodes(counted),
        "truth": _truth(bags, options.tolerance_s),
        "bags": [_bag(bag) for bag in bags],
        "interrupted": not all(bag.complete for bag in bags),
    }
