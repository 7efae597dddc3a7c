"""Explains bad results by trying other orientations, colours, crops and statistics on a few frames.

A change is recommended only if it makes the actions far better on the same frames, which rules out chance.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.config.sections import ORIENTATIONS
from vla_ros.contract.binding import make_arms
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.inputs import Snapshot
from vla_ros.errors import VlaRosError
from vla_ros.node.observer import Observer
from vla_ros.policies.base import Policy
from vla_ros.types import FloatArray, IntArray, UInt8Array
from vla_ros_lab.replay import metrics, series, skill
from vla_ros_lab.replay.figures import Comparer
from vla_ros_lab.replay.prepare import RecordedFrame, build_pipeline_for, read_again, read_transforms
from vla_ros_lab.replay.result import Result
from vla_ros_lab.replay.samples import Samples
from vla_ros_lab.replay.verdict import GOOD_COSINE, GOOD_SKILL, Verdict

FRAMES = 16
"""Number of frames on which each change is tried."""

CONTENT_SKILL = 0.9
"""Skill over the mean action above which no change is tried."""

_ImageChange = Callable[[UInt8Array], UInt8Array]


@dataclass(frozen=True)
class Change:
    """A setting to try on frames that were replayed before."""

    name: str  # in the report
    advice: str  # what to do if it helps
    camera: Mapping[str, Any]  # changed options of the section ``camera``
    pixels: _ImageChange | None = None  # applied to every image


@dataclass(frozen=True)
class Trial:
    """The result of a change on some frames."""

    name: str
    advice: str
    frames: int
    skill: float  # against the mean action
    direction_cosine: float
    better: bool  # far better than without the change

    @property
    def rank(self) -> tuple[float, float]:
        return (-np.nan_to_num(self.skill, nan=-1e9), -np.nan_to_num(self.direction_cosine))


def explain(result: Result, policy: Callable[[], Policy]) -> Result:
    """Add the trials to a result, and the best change to its verdict; ``policy()`` returns the loaded policy."""
    score = result.figures["skill"]["mean_action"]
    compared = result.figures["frames"]["compared"]
    if not score < CONTENT_SKILL or not compared:
        return result
    if compared < FRAMES:
        few = f"only {compared} frames were compared, so that no other option was tried ({FRAMES} are needed); "
        reasons = (*result.verdict.reasons, few + "replay a longer recording, or more of its frames")
        verdict = dataclasses.replace(result.verdict, reasons=reasons)
        figures = {**result.figures, "verdict": verdict.to_json()}
        return dataclasses.replace(result, figures=figures, verdict=verdict)
    trials = sorted([*_statistics(result, policy()), *_settings(result, policy())], key=lambda t: t.rank)
    if not trials:
        return result
    verdict = _explained(result.verdict, trials)
    more = {"verdict": verdict.to_json(), "trials": [dataclasses.asdict(trial) for trial in trials]}
    return dataclasses.replace(result, figures={**result.figures, **more}, verdict=verdict)


def _explained(verdict: Verdict, trials: Sequence[Trial]) -> Verdict:
    best = next((trial for trial in trials if trial.better), None)
    if best is None:
        if verdict.level == "good":
            return verdict
        tried = f"tried on {trials[0].frames} frames: {', '.join(trial.name for trial in trials[:9])}"
        return dataclasses.replace(verdict, reasons=(*verdict.reasons, f"{tried}; none agrees far better"))
    cosine = f"cosine {best.direction_cosine:.2f}, " if not math.isnan(best.direction_cosine) else ""
    error = f"{cosine}squared error {100 * (1 - best.skill):.2g} % of the mean action's, on {best.frames} frames"
    line = f"actions agree far better with {best.name} ({error}): {best.advice}"
    level = "warn" if verdict.level == "good" else verdict.level
    headline = "Plausible, but a setting is probably wrong." if level == "warn" else verdict.headline
    return Verdict(level, headline, (line, *verdict.reasons))


def changes(config: Config, spec: PolicySpec) -> Iterator[Change]:
    """Yield other orientations of each camera, swapped colours and another crop."""
    camera = config.camera
    now = [one.orientation for one in camera.each]
    used = [(camera.keys.index(one.source), one) for one in spec.images if one.source in camera.keys]
    for index, _ in used:
        where = f" for {camera.topics[index]}" if len(now) > 1 else ""
        for turn in ORIENTATIONS:
            if turn != now[index]:
                turns = (*now[:index], turn, *now[index + 1 :])
                advice = f"try -p 'camera.orientation:=[{', '.join(turns)}]'"
                yield Change(f"camera.orientation {turn}{where}", advice, {"orientation": turns})
    yield Change(
        "red and blue swapped",
        "the camera's driver sets `encoding` incorrectly (rgb8 instead of bgr8 or the reverse), or the recording "
        "was compressed from such images; fix the driver",
        {},
        lambda image: np.ascontiguousarray(image[..., ::-1]),
    )
    areas = [camera.each[index].crop_area or getattr(image.processor, "crop_area", 1.0) for index, image in used]
    crop = 0.9 if set(areas) <= {1.0} else 1.0
    yield Change(f"camera.crop_area {crop}", f"try -p camera.crop_area:={crop}", {"crop_area": (crop,)})


def is_far_better(before: FloatArray, after: FloatArray, guess: FloatArray) -> bool:
    """Return True if a change clearly reduces the squared errors [M].

    The error must at least halve, the skill must be good compared with the errors of the mean action, ``guess``,
    and at most one frame in four may get worse.
    """
    worse = after > before + 0.05 * np.nanmean(guess)
    good = np.nansum(after) <= (1 - GOOD_SKILL) * np.nansum(guess)
    return bool(good and np.nansum(after) < 0.5 * np.nansum(before) and worse.mean() <= 0.25)


def _trial(result: Result, rows: IntArray, name: str, advice: str, actions: FloatArray) -> Trial:
    frames, columns = result.frames, skill.columns_of(result.spec)
    recorded = frames.recorded[rows]
    mean = np.nan_to_num(metrics.mean(frames.recorded[frames.compared]))
    compared = (frames.predicted[rows], actions, mean)
    before, after, guess = (skill.squared_errors(each, recorded, columns) for each in compared)
    score = 1.0 - float(np.nansum(after) / max(float(np.nansum(guess)), 1e-18))
    cosine = float(metrics.mean(Comparer(result.spec, result.config).cosines(actions, recorded), axis=None))
    better = is_far_better(before, after, guess) and not cosine < GOOD_COSINE
    return Trial(name, advice, len(actions), score, cosine, better)


def _statistics(result: Result, policy: Policy) -> list[Trial]:
    rows = result.frames.compared
    rows = rows[np.isfinite(result.frames.normalized[rows]).all(axis=1)]
    if not rows.size:
        return []
    trials = [
        _trial(result, rows, f"policy.unnorm_key {key}", f"try -p policy.unnorm_key:={key}", actions)
        for key, actions in policy.other_statistics(result.frames.normalized[rows]).items()
        if actions.shape == (len(rows), result.spec.dimension)
    ]
    return sorted(trials, key=lambda trial: trial.rank)[:1]  # there may be dozens


def _settings(result: Result, policy: Policy) -> list[Trial]:
    if not result.figures["frames"]["images_prepared"]:
        return []
    chosen, offset = _chosen(result), 0
    frames: dict[int, tuple[RecordedFrame, Snapshot]] = {}
    for bag in result.samples:
        rows = chosen[(chosen >= offset) & (chosen < offset + len(bag.times))] - offset
        frames |= {frame.row + offset: (frame, inputs) for frame, inputs in _read(bag, rows, result)}
        offset += len(bag.times)
    if len(frames) < FRAMES // 2:
        return []
    rows, trials = np.array(list(frames), np.int64), []
    first, _ = next(iter(frames.values()))
    for change in changes(first.config, result.spec):
        with contextlib.suppress(VlaRosError):
            actions = np.array(list(_actions(frames.values(), change, policy)))
            trials.append(_trial(result, rows, change.name, change.advice, actions))
    return trials


def _chosen(result: Result) -> IntArray:
    """Return the rows of compared frames in which the recorded arm moves, spread evenly."""
    rows = result.frames.compared
    moved = result.frames.recorded[rows][:, skill.columns_of(result.spec)]
    if skill.translations(result.spec):
        rows = rows[np.nan_to_num(np.linalg.norm(moved, axis=1)) > metrics.still_threshold(moved)]
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(FRAMES, len(rows))).round().astype(np.int64))]


def _read(samples: Samples, rows: IntArray, result: Result) -> Iterator[tuple[RecordedFrame, Snapshot]]:
    """Read the frames ``rows`` of one bag again, with the inputs at the times of the frames."""
    recording = None
    for frame in read_again(samples, rows, result.config, result.options.topics):
        joints = [joint for arm in make_arms(frame.config).values() for joint in arm.joints]
        recording = recording or series.read_recording(frame.bag, frame.selection, joints)
        instruction = samples.instructions[int(samples.episodes[frame.row])]
        yield frame, recording.inputs(frame.time, instruction)


def _actions(
    frames: Iterable[tuple[RecordedFrame, Snapshot]], change: Change, policy: Policy
) -> Iterator[FloatArray]:
    """Yield the policy's first action [D] for each frame under a change."""
    observers: dict[int, Observer] = {}
    for frame, inputs in frames:
        if id(frame.config) not in observers:  # one per bag
            camera = dataclasses.replace(frame.config.camera, **change.camera)
            changed = dataclasses.replace(frame.config, camera=camera)
            observers[id(frame.config)] = build_pipeline_for(changed, policy.spec)[0].observer
            read_transforms(frame.bag, observers[id(frame.config)], frame.selection.joint_states)
        observation = observers[id(frame.config)].observe(frame.images, inputs)
        if change.pixels is not None:
            images = {key: change.pixels(image) for key, image in observation.images.items()}
            observation = dataclasses.replace(observation, images=images, raw_images={})
        session = policy.start_session()
        chunk = policy.infer(session, observation)
        session.close()
        yield np.asarray(chunk.actions[0], float)
