"""Judges the figures: returns a verdict with reasons.

The rules look for silent failures, such as an upside-down image, statistics of another dataset, an inverted
gripper, or a model that does not receive the image. Each reason names the option to check.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vla_ros.contract.spec import PolicySpec
from vla_ros.control.reasons import Reason
from vla_ros.types import FloatArray
from vla_ros_lab.replay import metrics, skill

GOOD_COSINE, WEAK_COSINE = 0.8, 0.5
GOOD_GRIPPER = 0.9
GOOD_SKILL = 0.5
_ENOUGH_TURNS = 10
_CONSTANT = 1e-9
_OLD_FRAME_S, _EARLY_FRAME_S = 1.0, 0.1
_MOST_LOSSES = 8
_MOST_STOPS = 5


@dataclass(frozen=True)
class Verdict:
    """Whether a policy's predictions fit the recording, with the reasons."""

    level: str  # ``good``, ``warn`` or ``bad``
    headline: str  # one sentence
    reasons: tuple[str, ...]  # what was found and what to do, the most serious first

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": list(self.reasons)}


def judge(figures: Mapping[str, Any], predicted: FloatArray, recorded: FloatArray, spec: PolicySpec) -> Verdict:
    """Judge the figures of :func:`~.figures.summarize` and the compared actions, float64 [M, D]."""
    bad = [*_dropped(figures), *_accuracy(figures, predicted, recorded, skill.translations(spec))]
    weak, conduct, praise = list(_weak(figures)), list(_conduct(figures)), list(_praise(figures))
    level = "warn"
    if not figures["frames"]["used"]:
        level, headline, reasons = "bad", "The policy answered no frame.", [*bad, *weak, *conduct]
    elif moves_nothing(figures):
        level, headline, reasons = "bad", "Every command was refused.", [*conduct, *bad, *weak]
    elif bad:
        level, headline = "bad", "Something is wrong: do not put this on an arm."
        reasons = [*bad, *weak, *conduct]
    elif not figures["frames"]["compared"]:
        headline = "Speed was measured; there is nothing to compare the actions with."
        reasons = [*figures["truth"]["problems"], *weak, *conduct]
    elif weak:
        headline, reasons = "Plausible, but not convincing.", [*weak, *conduct, *praise]
    elif conduct:
        late = figures["deadline"]["share"] > 0.01
        but = "but this machine is too slow for it" if late else "but not everything went well"
        headline, reasons = f"The policy does what was recorded, {but}.", [*conduct, *praise]
    else:
        level, headline, reasons = "good", "The policy does what was recorded.", praise
    return Verdict(level, headline, (*reasons, *_losses(figures)))


def moves_nothing(figures: Mapping[str, Any]) -> bool:
    """Return True if no frame gave a command: none was answered, or each command was refused."""
    made, refused = (figures["commands"][name] for name in ("made", "refused"))
    return not made and sum(refused.values()) >= figures["frames"]["used"]  # without a URDF, none is made


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _blind_cosine(figures: Mapping[str, Any]) -> float:
    """Return the best direction cosine of a baseline without memory; NaN without directions."""
    cosines = [figures["baselines"][name]["direction_cosine"] for name in ("zero", "mean_action")]
    return max((value for value in cosines if not math.isnan(value)), default=math.nan)


def _praise(figures: Mapping[str, Any]) -> Iterator[str]:
    cosine, gripper, skill, turns = (figures[key] for key in ("direction_cosine", "gripper_f1", "skill", "turns"))
    blind = _blind_cosine(figures)
    if cosine > blind and cosine >= GOOD_COSINE:
        yield f"directions agree: cosine {cosine:.2f}, the best blind guess has {blind:.2f}"
    if gripper >= GOOD_GRIPPER:
        yield f"the gripper agrees: F1 {gripper:.2f}"
    best = min(skill["zero"], skill["mean_action"])
    if best >= GOOD_SKILL:
        yield f"its squared error is {_percent(1 - best)} of the best blind guess's"
    if not math.isnan(skill["hold_last"]):
        share = _percent(1 - skill["hold_last"])
        yield f"its squared error is {share} of the hold-last baseline's, which knows the last recorded action"
        if turns and turns["count"]:
            mine, held = turns["direction_cosine"], turns["baselines"]["hold_last"]
            yield f"at {turns['count']} turns its cosine is {mine:.2f}; the last recorded action's is {held:.2f}"


def _dropped(figures: Mapping[str, Any]) -> Iterator[str]:
    frames = figures["frames"]
    if not frames["received"]:
        cameras = ", ".join(sorted({bag["topics"]["camera"] for bag in figures["bags"]}))
        yield f"no message of {cameras} could be read; --topics camera=/other names another topic"
    tried = frames["used"] + sum(frames["dropped"].values())
    for reason, count in frames["dropped"].items():
        if count > 0.01 * tried:
            hint = " (or give --instruction TEXT)" if reason.startswith(Reason.NO_INSTRUCTION.value) else ""
            yield f"{count} of {tried} frames were dropped: {reason}{hint}"


def _accuracy(
    figures: Mapping[str, Any], predicted: FloatArray, recorded: FloatArray, arms: Sequence[Sequence[int]]
) -> Iterator[str]:
    constant = len(predicted) >= 10 and float(predicted.std(axis=0).max()) < _CONSTANT
    if constant and float(np.nan_to_num(recorded).std(axis=0).max()) > _CONSTANT:
        yield "the policy returns the same action for every frame: it may not receive the image, or may ignore it"
        return
    if not figures["frames"]["compared"]:
        return
    # Translations of all arms, [M * A, 3].
    moved, wanted = (actions[:, list(arms)].reshape(-1, 3) for actions in (predicted, recorded))
    scale = list(_scale(figures["direction_cosine"], moved, wanted))
    yield from scale
    mine, mean = figures["motion_mae"], figures["baselines"]["mean_action"]["motion_mae"]
    if not scale and mine > mean:  # hold_last knows recorded actions, so it is not a lower bound
        checks = "check camera.orientation, policy.unnorm_key and control.delta_frame"
        yield f"worse than the mean-action baseline (motion error {mine:.3g} against {mean:.3g}): {checks}"
    cosine = figures["direction_cosine"]
    if cosine < WEAK_COSINE:
        checks = "check camera.orientation, the camera's topic and the instruction"
        yield f"directions hardly agree (cosine {cosine:.2f}): {checks}"
        if better := _other_axes(moved, wanted):
            yield f"they would agree with axes ({better}): camera.orientation or control.delta_frame is wrong"
    yield from _gripper(figures["gripper"])


def _other_axes(predicted: FloatArray, recorded: FloatArray) -> str:
    """Return the permutation and signs of the axes with which directions agree well, or ""."""
    best, name = GOOD_COSINE, ""
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1, -1), repeat=3):
            turned = predicted[:, order] * np.array(signs)
            cosine = float(metrics.mean(metrics.direction_cosines(turned, recorded), axis=None))
            if cosine > best:
                axes = zip(order, signs, strict=True)
                best, name = cosine, ", ".join(f"{'-' if sign < 0 else ''}{'xyz'[axis]}" for axis, sign in axes)
    return name


def _scale(cosine: float, predicted: FloatArray, recorded: FloatArray) -> Iterator[str]:
    """Detect motions that are all too large or too small, as with another dataset's statistics or units."""
    mine, other = (float(np.sqrt(metrics.mean(values**2, axis=None))) for values in (predicted, recorded))
    # Small motions may be due to uncertainty, because an uncertain policy returns the mean of its options.
    low, high, but = (0.25, 2.0, "directions agree, but ") if cosine >= GOOD_COSINE else (0.2, 5.0, "")
    if not math.isnan(cosine) and other > 0 and not low < mine / other < high:
        checks = "check policy.unnorm_key, control.translation_scale and control.rate_hz"
        yield f"{but}predicted motions are {mine / other:.3g} times as large as recorded ones: {checks}"


def _gripper(gripper: Mapping[str, Any]) -> Iterator[str]:
    accuracy, predicted, fingers = gripper["accuracy"], gripper["closed_predicted"], gripper["fingers"]
    mixed = 0.02 < gripper["closed_recorded"] < 0.98
    if fingers["when_closed"] > fingers["when_open"] + 0.1:
        swapped = "gripper.open_value and closed_value, or open_position and closed_position, are swapped"
        yield f"the recorded gripper numbers contradict the measured fingers: {swapped}"
    elif mixed and accuracy < 0.3:
        swapped = "gripper.open_value and closed_value may be swapped"
        yield f"the gripper does the opposite (accuracy {accuracy:.2f}): {swapped}"
    elif mixed and (predicted < 0.002 or predicted > 0.998):
        mine, recorded = ("[{:.3g}, {:.3g}]".format(*gripper[f"{key}_range"]) for key in ("predicted", "recorded"))
        never = "closes" if predicted < 0.5 else "opens"
        checks = "check gripper.open_value, closed_value and threshold"
        yield f"the gripper never {never}: its numbers lie in {mine}, recorded ones in {recorded}; {checks}"


def _weak(figures: Mapping[str, Any]) -> Iterator[str]:
    cosine, gripper, skill = figures["direction_cosine"], figures["gripper_f1"], figures["skill"]["mean_action"]
    blind = _blind_cosine(figures)
    if WEAK_COSINE <= cosine < GOOD_COSINE:
        yield f"directions agree only partly (cosine {cosine:.2f}; good policies: {GOOD_COSINE} or more)"
    if WEAK_COSINE <= cosine <= blind:
        yield f"directions agree no better (cosine {cosine:.2f}) than the mean action's ({blind:.2f})"
    elif skill < GOOD_SKILL and not cosine < WEAK_COSINE:
        limit = _percent(1 - GOOD_SKILL)
        yield f"its squared error is {_percent(1 - skill)} of the mean action's (good policies: {limit} or less)"
    yield from _copies(figures)
    if gripper < GOOD_GRIPPER:
        yield f"the gripper agrees only partly (F1 {gripper:.2f}; good policies: {GOOD_GRIPPER} or more)"
    for item in figures["dimensions"]:
        if item["saturated_wrongly"] > 0.1 and not item["name"].endswith("gripper"):
            share = _percent(item["saturated_wrongly"])
            yield f"{item['name']} is at the end of its range in {share} of all frames; other values were recorded"


def _copies(figures: Mapping[str, Any]) -> Iterator[str]:
    """Detect actions that go straight on where the recorded motion turns; averages hide such actions."""
    turns = figures["turns"]
    if not turns or turns["count"] < _ENOUGH_TURNS or figures["direction_cosine"] < WEAK_COSINE:
        return
    cosine, held = turns["direction_cosine"], turns["baselines"]["hold_last"]
    if cosine < GOOD_COSINE and cosine <= held + 0.2:
        better = f"is hardly better than repeating the last recorded action ({held:.2f})"
        where = f"where the recorded motion turns ({turns['count']} frames) the policy (cosine {cosine:.2f})"
        yield f"{where} {better}; elsewhere it may only be smooth"


def _conduct(figures: Mapping[str, Any]) -> Iterator[str]:
    deadline, frames, commands = figures["deadline"], figures["frames"], figures["commands"]
    if deadline["share"] > 0.01:
        late, period = _percent(deadline["share"]), f"{deadline['period_ms']:.0f} ms"
        yield f"{late} of all inference steps took longer than the period of {period} (control.rate_hz)"
    if figures["mode"] != "open_loop" and frames["skipped"] > 0.5 * max(1, frames["received"]):
        yield f"{frames['skipped']} of {frames['received']} frames were skipped because the policy was busy"
    offset = figures["stamp_offset_s"]
    if math.isnan(offset) and frames["used"]:
        yield "the images have no stamp (the camera's driver must set one): joint states cannot be matched by stamp"
    if offset > _EARLY_FRAME_S or offset < -_OLD_FRAME_S:
        where = f"{offset:.3g} s ahead of" if offset > 0 else f"{-offset:.3g} s behind"
        yield f"the frames' stamps are {where} the recorder's clock: the camera's clock is wrong or images are late"
    for reason, count in commands["refused"].items():
        if count > 0.01 * frames["used"]:
            yield f"{count} of {frames['used']} commands were refused: {reason}"
    stops = [(bag["path"], stop) for bag in figures["bags"] for stop in bag["stops"]]
    for path, stop in stops[:_MOST_STOPS]:
        yield f"the arm would be held {stop['seconds']:.1f} s into {path}: {stop['why']}"
    if len(stops) > _MOST_STOPS:
        yield f"and at {len(stops) - _MOST_STOPS} more places, listed in the JSON file"


def _losses(figures: Mapping[str, Any]) -> list[str]:
    lines = [f"lost in {bag['path']}: {loss}" for bag in figures["bags"] for loss in bag["losses"]]
    if len(lines) > _MOST_LOSSES:
        lines[_MOST_LOSSES:] = [f"and {len(lines) - _MOST_LOSSES} more losses, listed in the JSON file"]
    if figures["interrupted"]:
        lines.append("the run was interrupted; the same command resumes it")
    return lines
