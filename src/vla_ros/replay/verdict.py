"""What to think of the figures, with reasons: the sentences at the top of the report.

The rules look for the failures that are silent on a robot: a picture upside down, another dataset's statistics, an
inverted gripper, a model that does not see. Each says what to look at next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.control.reasons import Reason
from vla_ros.replay import metrics
from vla_ros.types import FloatArray

GOOD_COSINE, WEAK_COSINE = 0.8, 0.5
GOOD_GRIPPER = 0.9
GOOD_SKILL = 0.5
_ENOUGH_TURNS = 10
_CONSTANT = 1e-9
_OLD_FRAME_S, _EARLY_FRAME_S = 1.0, 0.1
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
    weak, conduct = _weak(figures), _conduct(figures)
    told = _losses(figures)
    if not figures["frames"]["used"]:
        return Verdict("bad", "No frame was answered.", (*bad, *weak, *conduct, *told))
    if bad:
        return Verdict("bad", "Something is wrong: do not put this on an arm.", (*bad, *weak, *conduct, *told))
    if not figures["frames"]["compared"]:
        reasons = (*figures["truth"]["problems"], *weak, *conduct, *told)
        return Verdict("warn", "Speed was measured; there is nothing to compare the actions with.", reasons)
    if weak:
        return Verdict("warn", "Plausible, but not convincing.", (*weak, *conduct, *_praise(figures), *told))
    if conduct:
        slow = "but this machine is too slow for it" if _is_late(figures) else "but not everything went well"
        return Verdict("warn", f"The policy does what was recorded, {slow}.", (*conduct, *_praise(figures), *told))
    return Verdict("good", "The policy does what was recorded.", (*_praise(figures), *told))


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def _praise(figures: Mapping[str, Any]) -> list[str]:
    lines = []
    cosine, gripper, skill = figures["direction_cosine"], figures["gripper_f1"], figures["skill"]
    blind = _blind_cosine(figures)
    if cosine > blind and cosine >= GOOD_COSINE:
        lines.append(f"directions agree: cosine {cosine:.2f}, the best blind guess has {blind:.2f}")
    if gripper >= GOOD_GRIPPER:
        lines.append(f"the gripper agrees: F1 {gripper:.2f}")
    best = min((skill[name] for name in ("zero", "mean_action") if not math.isnan(skill[name])), default=0.0)
    if best >= GOOD_SKILL:
        lines.append(f"its squared error is {_percent(1 - best)} of that of the best blind guess")
    lines += _against_holding(figures)
    return lines


def _against_holding(figures: Mapping[str, Any]) -> list[str]:
    """What the distance to the persistence forecast says, in both directions."""
    skill, turns = figures["skill"]["hold_last"], figures["turns"]
    if math.isnan(skill):
        return []
    if skill > 0:
        line = f"{_percent(1 - skill)} of that of repeating the last recorded action"
    else:
        line = "larger than that of repeating the last recorded action, which is told more than a policy"
    line = f"its squared error is {line}"
    if turns and turns["count"]:
        cosine, held = turns["direction_cosine"], turns["baselines"]["hold_last"]
        line += f"; where the motion turns ({turns['count']} frames) its cosine is {cosine:.2f}, of that {held:.2f}"
    return [line]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _is_late(figures: Mapping[str, Any]) -> bool:
    return bool(figures["deadline"]["share"] > 0.01)


def _blind_cosine(figures: Mapping[str, Any]) -> float:
    """The best direction cosine of those who see and remember nothing; NaN where directions do not exist."""
    cosines = [figures["baselines"][name]["direction_cosine"] for name in ("zero", "mean_action")]
    return max((value for value in cosines if not math.isnan(value)), default=math.nan)


def _broken(figures: Mapping[str, Any]) -> list[str]:
    """Frames that got no answer."""
    frames, lines = figures["frames"], list[str]()
    if not frames["received"]:
        cameras = sorted({bag["topics"]["camera"] for bag in figures["bags"]})
        lines.append(
            f"no message of {', '.join(cameras)} could be read; --topics camera=/other names another topic"
        )
    tried = frames["used"] + sum(frames["dropped"].values())
    for reason, count in frames["dropped"].items():
        if count > 0.01 * tried:
            hint = " (or give --instruction TEXT)" if reason.startswith(Reason.NO_INSTRUCTION.value) else ""
            lines.append(f"{count} of {tried} frames got no answer: {reason}{hint}")
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
    lines += _scale(figures, predicted, recorded)
    mean = figures["baselines"]["mean_action"]
    # Hold-last is told the answer, so only the blind baselines are a floor.
    if not lines and figures["motion_mae"] > mean["motion_mae"]:
        lines.append(
            f"worse than the mean-action baseline (motion error {_number(figures['motion_mae'])} against "
            f"{_number(mean['motion_mae'])}): camera.orientation, policy.unnorm_key or control.delta_frame may be "
            "wrong"
        )
    lines += _direction(figures, predicted, recorded)
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
    cosine = figures["direction_cosine"]
    if math.isnan(cosine):
        return []
    sizes = [float(np.sqrt(metrics.mean(values[:, :3] ** 2, axis=None))) for values in (predicted, recorded)]
    # Where directions agree, size is a figure of its own. Small motions may be caution: a policy that is unsure
    # gives the mean of what it could do.
    low, high = (0.25, 2.0) if cosine >= GOOD_COSINE else (0.2, 5.0)
    if not sizes[1] > 0 or low < sizes[0] / sizes[1] < high:
        return []
    agree = "directions agree, but " if cosine >= GOOD_COSINE else ""
    return [
        f"{agree}predicted motions are {_number(sizes[0] / sizes[1])} times as large as recorded ones: "
        "policy.unnorm_key, control.translation_scale or control.rate_hz may be wrong"
    ]


def _gripper(figures: Mapping[str, Any]) -> list[str]:
    gripper = figures["gripper"]
    recorded, predicted, accuracy = gripper["closed_recorded"], gripper["closed_predicted"], gripper["accuracy"]
    if math.isnan(accuracy):
        return []
    fingers = gripper["fingers"]
    if fingers["when_closed"] > fingers["when_open"] + 0.1:
        return [
            "the recorded gripper numbers contradict the measured fingers, which are wider apart when the number "
            "says closed: gripper.open_value and gripper.closed_value (or the two positions) are exchanged"
        ]
    mixed = 0.02 < recorded < 0.98
    if mixed and accuracy < 0.3:
        return [
            f"the gripper does the opposite (accuracy {accuracy:.2f}): gripper.open_value and "
            "gripper.closed_value may be exchanged"
        ]
    if mixed and (predicted < 0.002 or predicted > 0.998):
        word = "closes" if predicted < 0.5 else "opens"
        return [
            f"the gripper never {word}, though it did in the recording: its numbers lie in "
            f"{_interval(gripper['predicted_range'])}, recorded ones in {_interval(gripper['recorded_range'])}; "
            "look at gripper.open_value, gripper.closed_value and gripper.threshold"
        ]
    return []


def _interval(ends: Sequence[float]) -> str:
    return f"[{ends[0]:.3g}, {ends[1]:.3g}]"


def _weak(figures: Mapping[str, Any]) -> list[str]:
    lines = []
    cosine, gripper = figures["direction_cosine"], figures["gripper_f1"]
    if WEAK_COSINE <= cosine < GOOD_COSINE:
        lines.append(f"directions agree only partly (cosine {cosine:.2f}, a good policy has {GOOD_COSINE} or more)")
    blind, skill = _blind_cosine(figures), figures["skill"]
    if cosine < WEAK_COSINE:
        pass  # said already, and all else follows from it
    elif cosine <= blind:
        lines.append(
            f"directions agree no better (cosine {cosine:.2f}) than always going the mean way ({blind:.2f})"
        )
    elif skill["mean_action"] < GOOD_SKILL:
        lines.append(
            f"its squared error is {_percent(1 - skill['mean_action'])} of that of always giving the mean action, "
            f"a good policy has {_percent(1 - GOOD_SKILL)} or less"
        )
    lines += _copies(figures)
    if gripper < GOOD_GRIPPER:
        lines.append(f"the gripper agrees only partly (F1 {gripper:.2f}, a good policy has {GOOD_GRIPPER} or more)")
    lines += [
        f"{item['name']} is at the end of its range in {100 * item['saturated_wrongly']:.0f} % of all frames "
        "though something else was recorded"
        for item in figures["dimensions"]
        if item["saturated_wrongly"] > 0.1 and item["name"] != "gripper"
    ]
    return lines


def _copies(figures: Mapping[str, Any]) -> list[str]:
    """Answers that go on as before where the recorded motion turns: an average must not hide them."""
    turns = figures["turns"]
    if not turns or turns["count"] < _ENOUGH_TURNS:
        return []
    cosine, held = turns["direction_cosine"], turns["baselines"]["hold_last"]
    if figures["direction_cosine"] < WEAK_COSINE or cosine >= GOOD_COSINE or cosine > held + 0.2:
        return []
    return [
        f"where the recorded motion turns ({turns['count']} frames) it hardly does better (cosine {cosine:.2f}) "
        f"than repeating the last recorded action ({held:.2f}): what agrees elsewhere may be mere smoothness"
    ]


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
    lines += _stamps(figures)
    for reason, count in commands["refused"].items():
        if count > 0.01 * frames["used"]:
            lines.append(f"{count} of {frames['used']} commands were refused: {reason}")
    return lines


def _stamps(figures: Mapping[str, Any]) -> list[str]:
    """Frames whose stamps the live node would not believe."""
    offset, used = figures["stamp_offset_s"], figures["frames"]["used"]
    if math.isnan(offset):
        return (
            ["frames carry no stamp: the live node refuses them (the camera's driver must set one)"] if used else []
        )
    if -_OLD_FRAME_S <= offset <= _EARLY_FRAME_S:
        return []
    where = f"{offset:.3g} s ahead of" if offset > 0 else f"{-offset:.3g} s behind"
    return [
        f"the frames' stamps are {where} the recorder's clock: the camera's clock is wrong or its pictures are "
        "late, and joint states are looked up by stamps"
    ]


def _losses(figures: Mapping[str, Any]) -> list[str]:
    lines = [f"lost in {bag['path']}: {loss}" for bag in figures["bags"] for loss in bag["losses"]]
    if figures["interrupted"]:
        lines.append("the run was interrupted; the same command goes on where it stopped")
    if len(lines) > 8:
        lines = [*lines[:8], f"and {len(lines) - 8} more losses, listed in the JSON file"]
    return lines
