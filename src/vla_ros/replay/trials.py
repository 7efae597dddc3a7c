"""Repeats a few frames with another orientation, colour order, crop or statistics, to explain bad results.

Where answers and recording disagree, the usual causes are few, and each can simply be tried. A change is named only
where it is far better on the same frames, so that chance does not name one:
the error falls to less than half, at most one frame of four gets worse, and what comes out is good.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.config.tree import ORIENTATIONS
from vla_ros.control.inputs import Snapshot
from vla_ros.errors import VlaRosError
from vla_ros.replay import metrics, series, skill
from vla_ros.replay.bag import Bag
from vla_ros.replay.prepare import LoadedOnce, fit, make_stepper, newest_frames
from vla_ros.replay.result import Result
from vla_ros.replay.samples import Samples
from vla_ros.replay.topics import Selection, select
from vla_ros.replay.verdict import GOOD_COSINE, GOOD_SKILL, Verdict
from vla_ros.types import ActionSpec, ControlMode, FloatArray, IntArray, UInt8Array

FRAMES = 16
"""Frames on which each change is tried."""

CONTENT_SKILL = 0.9
"""Skill over the mean action above which nothing is tried: there is nothing left to explain."""

Pixels = Callable[[UInt8Array], UInt8Array]


@dataclass(frozen=True)
class Change:
    """One thing that may be wrong.

    Attributes:
        name: What was changed, for people.
        advice: What to do if it is far better.
        camera: Fields of the section ``camera`` that are changed.
        pixels: Applied to every image as well, or None.
    """

    name: str
    advice: str
    camera: Mapping[str, Any]
    pixels: Pixels | None = None


@dataclass(frozen=True)
class Trial:
    """What a change came to.

    Attributes:
        name: The change.
        advice: What to do.
        frames: Number of frames.
        skill: Against the mean action, on these frames.
        direction_cosine: On these frames; NaN where actions have no direction.
        better: True where it is far better than as it is.
    """

    name: str
    advice: str
    frames: int
    skill: float
    direction_cosine: float
    better: bool

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts the best first."""
        return (-np.nan_to_num(self.skill, nan=-1e9), -np.nan_to_num(self.direction_cosine))


def explain(result: Result, policy: LoadedOnce, overrides: Mapping[str, str]) -> Result:
    """The result with what was tried, and with the best change among the verdict's reasons.

    Args:
        result: As found.
        policy: The policy; loaded if need be.
        overrides: Role to topic, as given to the replay.
    """
    if not is_needed(result):
        return result
    trials = sorted([*_statistics(result, policy), *_images(result, policy, overrides)], key=lambda t: t.rank)
    if not trials:
        return result
    verdict = _told(result.verdict, trials)
    summary = {
        **result.figures,
        "verdict": verdict.to_json(),
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }
    return dataclasses.replace(result, figures=summary, verdict=verdict)


def is_needed(result: Result) -> bool:
    """True where there is something to explain and enough to explain it with."""
    score = result.figures["skill"]["mean_action"]
    return result.figures["frames"]["compared"] >= FRAMES and not math.isnan(score) and score < CONTENT_SKILL


def _told(verdict: Verdict, trials: Sequence[Trial]) -> Verdict:
    best = next((trial for trial in trials if trial.better), None)
    if best is None:
        tried = f"tried on {trials[0].frames} frames: " + ", ".join(trial.name for trial in trials[:9])
        extra = () if verdict.level == "good" else (f"{tried}; none agrees far better",)
        return dataclasses.replace(verdict, reasons=(*verdict.reasons, *extra))
    cosine = f"cosine {best.direction_cosine:.2f}, " if not math.isnan(best.direction_cosine) else ""
    line = (
        f"it agrees far better with {best.name} ({cosine}squared error {100 * (1 - best.skill):.2g} % of that of "
        f"the mean action, on {best.frames} frames): {best.advice}"
    )
    level = "warn" if verdict.level == "good" else verdict.level
    headline = "Plausible, but something is probably set wrong." if level == "warn" else verdict.headline
    return Verdict(level, headline, (line, *verdict.reasons))


def changes(config: Config, spec: ActionSpec) -> Iterator[Change]:
    """Other orientations of each camera, exchanged colours, another crop."""
    camera = config.camera
    count = len(camera.topics)
    now = tuple(one.orientation for one in camera.each)
    used = [camera.keys.index(key) for key in spec.image_keys]
    for index in used:
        for turn in ORIENTATIONS:
            if turn == now[index]:
                continue
            turns = tuple(turn if place == index else other for place, other in enumerate(now))
            where = f" for {camera.topics[index]}" if count > 1 else ""
            yield Change(
                f"camera.orientation {turn}{where}",
                f"try -p 'camera.orientation:=[{', '.join(turns)}]'",
                {"orientation": turns},
            )
    yield Change(
        "red and blue exchanged",
        "the camera's driver labels its images wrongly (`encoding` rgb8 for bgr8 or the reverse), or the "
        "recording was compressed from such images; fix the driver",
        {},
        _exchange,
    )
    named = [getattr(spec.processors.get(one.key), "crop_area", 1.0) for one in camera.each]
    cropped = any((one.crop_area or area) != 1.0 for one, area in zip(camera.each, named, strict=True))
    crop = 1.0 if cropped else 0.9
    yield Change(f"camera.crop_area {crop}", f"try -p camera.crop_area:={crop}", {"crop_area": (crop,)})


def _exchange(image: UInt8Array) -> UInt8Array:
    return np.ascontiguousarray(image[..., ::-1])


@dataclass(frozen=True)
class _Judge:
    """Judges answers to some frames as the verdict judges all of them."""

    recorded: FloatArray
    columns: list[int]
    guess: FloatArray
    now: FloatArray
    is_pose: bool

    def trial(self, name: str, advice: str, answers: FloatArray) -> Trial:
        before, after, mean = (
            skill.squared_errors(actions, self.recorded, self.columns)
            for actions in (self.now, answers, self.guess)
        )
        score = 1.0 - float(np.nansum(after) / max(float(np.nansum(mean)), 1e-18))
        cosine = math.nan
        if self.is_pose:
            cosines = metrics.direction_cosines(answers[:, :3], self.recorded[:, :3])
            cosine = float(metrics.mean(cosines, axis=None))
        better = (
            float(np.nansum(after)) < 0.5 * float(np.nansum(before))
            # Where both are right, neither is better: only what is clearly worse speaks against a change.
            and float((after <= before + 0.05 * np.nanmean(mean)).mean()) >= 0.75
            and score >= GOOD_SKILL
            and not cosine < GOOD_COSINE
        )
        return Trial(name, advice, len(answers), score, cosine, better)


def _judge(result: Result, rows: IntArray) -> _Judge:
    """Judges answers to the rows ``rows`` of all frames."""
    frames, spec = result.frames, result.spec
    recorded = frames.recorded[frames.compared]
    mean = np.nan_to_num(metrics.mean(recorded))
    return _Judge(
        frames.recorded[rows],
        skill.columns_of(spec),
        np.broadcast_to(mean, (len(rows), spec.dimension)),
        frames.predicted[rows],
        spec.control_mode is ControlMode.END_EFFECTOR_DELTA,
    )


def _statistics(result: Result, policy: LoadedOnce) -> list[Trial]:
    """The same answers un-normalised with the checkpoint's other statistics; costs no inference."""
    rows = result.frames.compared
    rows = rows[np.isfinite(result.frames.normalized[rows]).all(axis=1)]
    if not rows.size:
        return []
    judge, found = _judge(result, rows), []
    for key, actions in policy.other_statistics(result.frames.normalized[rows]).items():
        if actions.shape == judge.recorded.shape:
            advice = f"try -p policy.unnorm_key:={key}"
            found.append(judge.trial(f"policy.unnorm_key {key}", advice, actions))
    # A checkpoint may have dozens; the best one speaks for all.
    return sorted(found, key=lambda trial: trial.rank)[:1]


def _images(result: Result, policy: LoadedOnce, overrides: Mapping[str, str]) -> list[Trial]:
    """The policy's answers to the same frames under each change."""
    if not result.figures["frames"]["images_prepared"]:
        return []
    rows = _chosen(result)
    asked: list[_Asked] = []
    kept: list[int] = []
    offset = 0
    for bag in result.samples:
        mine = rows[(rows >= offset) & (rows < offset + len(bag.times))] - offset
        for row, moment in _moments(bag, mine, result, overrides):
            asked.append(moment)
            kept.append(row + offset)
        offset += len(bag.times)
    if len(asked) < FRAMES // 2:
        return []
    policy.load()
    judge = _judge(result, np.array(kept, np.int64))
    found = []
    # Bags may differ in their cameras' names, but not in how many there are.
    for change in changes(asked[0].config, result.spec):
        try:
            answers = [_answer(moment, change, policy) for moment in asked]
        except VlaRosError:
            continue
        found.append(judge.trial(change.name, change.advice, np.array(answers)))
    return found


def _chosen(result: Result) -> IntArray:
    """Rows of frames that are compared and in which the recorded arm moves, spread evenly."""
    frames = result.frames
    rows = frames.compared
    moved = frames.recorded[rows][:, :3]
    if result.spec.control_mode is ControlMode.END_EFFECTOR_DELTA:
        lengths = np.nan_to_num(np.linalg.norm(moved, axis=1))
        rows = rows[lengths > metrics.still_threshold(moved)]
    at = np.unique(np.linspace(0, len(rows) - 1, min(FRAMES, len(rows))).round().astype(np.int64))
    return rows[at]


@dataclass(frozen=True)
class _Asked:
    """One frame and what was known at its time."""

    frames: Mapping[str, bytes]
    inputs: Snapshot
    selection: Selection
    config: Config


def _moments(
    samples: Samples, rows: IntArray, result: Result, overrides: Mapping[str, str]
) -> Iterator[tuple[int, _Asked]]:
    """The frames of ``rows`` of one bag, read once more; none of a bag that is gone."""
    if not rows.size:
        return
    try:
        with Bag(Path(samples.bag)) as bag:
            selection = select(bag.topics, result.config, overrides, empty=bag.empty)
            config, recording = (
                fit(result.config, selection),
                series.read(bag, selection, result.config.robot.joint_names),
            )
            times = {int(samples.times[row]): int(row) for row in rows}
            for time, frames in newest_frames(bag, selection, sorted(times)):
                row = times[time]
                feeds = {key: state for key, feed in recording.state.items() if (state := feed.newest(time))}
                joints = recording.joints.newest(time) if recording.joints else None
                inputs = Snapshot(joints, feeds, samples.instructions[int(samples.episodes[row])])
                yield row, _Asked(frames, inputs, selection, config)
    except VlaRosError:
        return


def _answer(asked: _Asked, change: Change, policy: LoadedOnce) -> FloatArray:
    """The first action for a frame under a change, [D]."""
    camera = dataclasses.replace(asked.config.camera, **change.camera)
    stepper, _ = make_stepper(dataclasses.replace(asked.config, camera=camera), policy)
    observation = stepper.observe([asked.frames.get(topic) for topic in asked.selection.cameras], asked.inputs)
    if change.pixels is not None:
        images = {key: change.pixels(image) for key, image in observation.images.items()}
        observation = dataclasses.replace(observation, images=images, raw_images={})
    session = policy.start_session()
    chunk = policy.infer(session, observation)
    session.close()
    return np.asarray(chunk.actions[0], float)
