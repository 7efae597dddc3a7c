"""What to think of the figures, with reasons: the sentences at the top of the report.

The rules look for the failures that are silent on a robot: a picture upside down, another dataset's statistics, an
inverted gripper, a model that does not see. Each says what to look at next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.replay import metrics
from vla_ros.types import FloatArray

GOOD_COSINE, WEAK_COSINE = 0.8, 0.5
GOOD_GRIPPER, WEAK_GRIPPER = 0.9, 0.6
_CONSTANT = 1e-9
_AXES = "xyz"


@dataclass(frozen=True)
class Verdict:
    """The judgement.

    Attributes:
        level: ``good``, ``warn`` or ``bad``.
        headline: One sentence.
        reasons: What it rests on and what to do, the gravest first.
    """

    level: str
    headline: str
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"level": self.level, "headline": self.headline, "reasons": list(self.reasons)}


def judge(figures: Mapping[str, Any], predicted: FloatArray, recorded: FloatArray) -> Verdict:
    """The verdict on the figures of :func:`vla_ros.replay.figures.summarize`.

    Args:
        figures: As that function gives them.
        predicted: Float64 [M, D], the compared frames.
        recorded: Float64 [M, D].
    """
    bad = [*_broken(figures), *_accuracy(figures, predicted, recorded)]
    weak = [*_weak(figures), *_conduct(figures)]
    told = _losses(figures)
    if not figures["frames"]["used"]:
        return Verdict("bad", "No frame was answered.", (*bad, *weak, *told))
    if bad:
        return Verdict("bad", "Something is wrong: do not put this on an arm.", (*bad, *weak, *told))
    if not figures["frames"]["compared"]:
        reasons = (*figures["truth"]["problems"], *weak, *told)
        return Verdict("warn", "Speed was measured; there is nothing to compare the actions with.", reasons)
    if weak:
        return Verdict("warn", "Plausible, but not convincing.", (*_praise(figures), *weak, *told))
    return Verdict("good", "The policy does what was recorded.", (*_praise(figures), *told))


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def _praise(figures: Mapping[str, Any]) -> list[str]:
    lines = []
    cosine, gripper = figures["direction_cosine"], figures["gripper_f1"]
    blind = _blind_cosine(figures)
    if cosine > blind:
        lines.append(f"directions agree: cosine {cosine:.2f}, the best blind guess has {blind:.2f}")
    if not math.isnan(gripper):
        lines.append(f"the gripper agrees: F1 {gripper:.2f}")
    mae, mean = figures["motion_mae"], figures["baselines"]["mean_action"]["motion_mae"]
    if mae < mean:
        lines.append(f"the motion error is {100 * mae / mean:.0f} % of that of always giving the mean action")
    return lines


def _blind_cosine(figures: Mapping[str, Any]) -> float:
    """The best direction cosine of those who see and remember nothing; NaN where directions do not exist."""
    cosines = [figures["baselines"][name]["direction_cosine"] for name in ("zero", "mean_action")]
    return max((value for value in cosines if not math.isnan(value)), default=math.nan)


def _broken(figures: Mapping[str, Any]) -> list[str]:
    """Frames that got no answer."""
    frames, lines = figures["frames"], []
    tried = frames["used"] + sum(frames["dropped"].values())
    for reason, count in frames["dropped"].items():
        if count > 0.01 * tried:
            lines.append(f"{count} of {tried} frames got no answer: {reason}")
    return lines


def _accuracy(figures: Mapping[str, Any], predicted: FloatArray, recorded: FloatArray) -> list[str]:
    """What is wrong with the actions."""
    lines: list[str] = []
    if len(predicted) >= 10 and float(predicted.std(axis=0).max()) < _CONSTANT:
        changes = float(np.nan_to_num(recorded).std(axis=0).max()) > _CONSTANT
        if changes:
            lines.append(
                "the policy gives the same action for every frame: the picture may not reach the model (vision), "
                "or this policy does not look"
            )
            return lines
    if not figures["frames"]["compared"]:
        return lines
    mean = figures["baselines"]["mean_action"]
    # Hold-last is told the answer, so only the blind baselines are a floor.
    if figures["motion_mae"] > mean["motion_mae"]:
        lines.append(
            f"worse than the mean-action baseline (motion error {_number(figures['motion_mae'])} against "
            f"{_number(mean['motion_mae'])}): camera.orientation, policy.unnorm_key or control.delta_frame may be "
            "wrong"
        )
    lines += _direction(figures, predicted, recorded)
    lines += _scale(figures, predicted, recorded)
    lines += _gripper(figures)
    return lines


def _direction(figures: Mapping[str, Any], predicted: FloatArray, recorded: FloatArray) -> list[str]:
    cosine = figures["direction_cosine"]
    if math.isnan(cosine) or cosine >= WEAK_COSINE:
        return []
    lines = [
        f"predicted and recorded directions hardly agree (cosine {cosine:.2f}): is the picture upright "
        "(camera.orientation), is it the right camera, is the instruction what was done?"
    ]
    better = _other_axes(predicted[:, :3], recorded[:, :3])
    if better:
        lines.append(f"they would agree with axes ({better}): camera.orientation or control.delta_frame is wrong")
    return lines


def _other_axes(predicted: FloatArray, recorded: FloatArray) -> str:
    """The exchange or sign of axes under which directions agree well, or ""."""
    best, name = GOOD_COSINE, ""
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1, -1), repeat=3):
            if order == (0, 1, 2) and signs == (1, 1, 1):
                continue
            turned = predicted[:, order] * np.array(signs)
            cosine = float(metrics.mean(metrics.direction_cosines(turned, recorded), axis=None))
            if cosine > best:
                best = cosine
                name = ", ".join(
                    ("-" if sign < 0 else "") + _AXES[axis] for axis, sign in zip(order, signs, strict=True)
                )
    return name


def _scale(figures: Mapping[str, Any], predicted: FloatArray, recorded: FloatArray) -> list[str]:
    """Motions that are all too large or too small: another dataset's statistics or unit."""
    if math.isnan(figures["direction_cosine"]):
        return []
    sizes = [float(np.sqrt(metrics.mean(values[:, :3] ** 2, axis=None))) for values in (predicted, recorded)]
    if not sizes[1] > 0 or 0.2 < sizes[0] / sizes[1] < 5:
        return []
    return [
        f"predicted motions are {_number(sizes[0] / sizes[1])} times as large as recorded ones: "
        "policy.unnorm_key or control.translation_scale may be wrong"
    ]


def _gripper(figures: Mapping[str, Any]) -> list[str]:
    gripper = figures["gripper"]
    recorded, predicted, accuracy = gripper["closed_recorded"], gripper["closed_predicted"], gripper["accuracy"]
    if math.isnan(accuracy):
        return []
    mixed = 0.02 < recorded < 0.98
    if mixed and accuracy < 0.3:
        return [
            f"the gripper does the opposite (accuracy {accuracy:.2f}): gripper.open_value and "
            "gripper.closed_value may be exchanged"
        ]
    if mixed and (predicted < 0.002 or predicted > 0.998):
        word = "closes" if predicted < 0.5 else "opens"
        return [f"the gripper never {word}, though it did in the recording: look at its convention and range"]
    return []


def _weak(figures: Mapping[str, Any]) -> list[str]:
    lines = []
    cosine, gripper = figures["direction_cosine"], figures["gripper_f1"]
    if WEAK_COSINE <= cosine < GOOD_COSINE:
        lines.append(f"directions agree only partly (cosine {cosine:.2f}, a good policy has {GOOD_COSINE} or more)")
    blind = _blind_cosine(figures)
    if cosine <= blind:
        lines.append(
            f"directions agree no better (cosine {cosine:.2f}) than always going the mean way ({blind:.2f})"
        )
    if gripper < GOOD_GRIPPER:
        lines.append(f"the gripper agrees only partly (F1 {gripper:.2f}, a good policy has {GOOD_GRIPPER} or more)")
    lines += [
        f"{item['name']} is at the end of its range in {100 * item['saturated']:.0f} % of all frames"
        for item in figures["dimensions"]
        if item["saturated"] > 0.2 and item["name"] != "gripper"
    ]
    return lines


def _conduct(figures: Mapping[str, Any]) -> list[str]:
    """Deadlines, refusals, limits."""
    lines = []
    deadline, frames, commands = figures["deadline"], figures["frames"], figures["commands"]
    if deadline["share"] > 0.01:
        lines.append(
            f"{100 * deadline['share']:.0f} % of all answers took longer than the period of "
            f"{deadline['period_ms']:.0f} ms (control.rate_hz)"
        )
    if figures["mode"] != "open_loop" and frames["skipped"] > 0.5 * max(1, frames["received"]):
        lines.append(f"{frames['skipped']} of {frames['received']} frames were skipped because the policy was busy")
    for reason, count in commands["refused"].items():
        if count > 0.01 * frames["used"]:
            lines.append(f"{count} of {frames['used']} commands were refused: {reason}")
    return lines


def _losses(figures: Mapping[str, Any]) -> list[str]:
    lines = [f"lost in {bag['path']}: {loss}" for bag in figures["bags"] for loss in bag["losses"]]
    if figures["interrupted"]:
        lines.append("the run was interrupted; the same command goes on where it stopped")
    if len(lines) > 8:
        lines = [*lines[:8], f"and {len(lines) - 8} more losses, listed in the JSON file"]
    return lines
