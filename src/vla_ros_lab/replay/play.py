"""Plays one bag through the live node's code: in open loop, or as it would have run on this machine.

In open loop, every frame (or every k-th) is used with its recorded inputs, whatever the policy did before (teacher
forcing), and only the first action of a chunk is compared. Otherwise :mod:`vla_ros_lab.replay.live` runs the live
control loop on a simulated clock.
"""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.control.outcome import REPLACED, FrameOutcome, StepResult
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ImageError
from vla_ros.execution.source import ActionSource
from vla_ros.node.inference import first_step
from vla_ros.node.pipeline import ActionPipeline
from vla_ros.telemetry.stats import Stats
from vla_ros.types import FloatArray
from vla_ros.vision.messages import image_stamp
from vla_ros.vision.preprocess import LazyImages
from vla_ros_lab.replay import samples as samples_of
from vla_ros_lab.replay import series, truth
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.live import LiveRun
from vla_ros_lab.replay.prepare import read_transforms, step_seconds
from vla_ros_lab.replay.samples import Samples
from vla_ros_lab.replay.stops import Stops
from vla_ros_lab.replay.storage import BagError, at_one_time
from vla_ros_lab.replay.topics import TopicSelection

SAVE_EVERY_S = 20.0
"""Seconds between partial results on disk."""

_NEAR_STAMP = 100_000_000  # ns; the same as in control.inputs.Inputs.joints_at
_TIED = 0.1  # share of frames with another's receive time that needs no remark
_NAN = float("nan")
_KINDS: dict[str, type] = dict.fromkeys(("times", "stamps", "episodes"), np.int64)
_KINDS |= dict.fromkeys(("predicted", "normalized", "age_ms"), np.float64)


@dataclass(frozen=True)
class ReplayOptions:
    """How bags are played."""

    speed: float = 0.0  # 0 for open loop; otherwise as it would have run at this multiple of the recorded speed
    every: int = 1  # use every k-th frame (open loop)
    limit: int = 0  # maximum number of frames of each bag; 0 for all
    instruction: str = ""  # replaces the recorded instruction; "" keeps it
    tolerance_s: float = 0.2  # maximum delay from a frame to its recorded action
    gap_s: float = 2.0  # a longer pause between frames starts a new episode
    topics: Mapping[str, str] = field(default_factory=dict)  # role to topic, from ``--topics``


class Player:
    """Plays one bag.

    ``config`` is from :func:`~vla_ros_lab.replay.prepare.fit`, ``source`` is loaded. ``resume`` contains
    the samples of an interrupted run. The results so far are saved in the file ``partial`` every 20 s.
    """

    def __init__(
        self,
        bag: Bag,
        selection: TopicSelection,
        config: Config,
        source: ActionSource,
        pipeline: ActionPipeline,
        options: ReplayOptions,
        resume: Samples | None,
        partial: Path | None,
        progress: Callable[[int], None],
    ) -> None:
        self._bag, self._selection, self._config = bag, selection, config
        self._source, self._pipeline, self._options = source, pipeline, options
        self._controller = pipeline.controller
        self._resume, self._partial, self._progress = resume, partial, progress
        needed, timeout = pipeline.controller.joint_names, config.timeouts.joint_state
        self._recording = series.read_recording(bag, selection, needed, timeout)
        read_transforms(bag, pipeline.observer, selection.joint_states)
        joints = self._recording.joints
        if joints is not None and len(joints.main.times) > 2 and joints.main.times[0] == joints.main.times[-1]:
            problem = at_one_time(f"{len(joints.main.times)} joint states", int(joints.main.times[0]))
            unknown = "so it is unknown what the arm did at an image"
            raise BagError(f"{problem}, {unknown}; record it again, or export it with --clock stamp")
        self._columns: dict[str, list[Any]] = defaultdict(list)
        self._stages: list[dict[str, float]] = []
        self._commands: list[dict[str, float]] = []
        self._images = 0
        self._instructions: list[str] = []
        self._recorded_instruction = ""
        self._skipped = 0
        self._dropped: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._stops = Stops(pipeline.controller.collision)
        self._details: dict[Reason, str] = {}
        self._last_time: int | None = None
        self._began = self._saved = time.perf_counter()
        self._period = step_seconds(config, pipeline.binding.spec)
        self._inferred: StepResult | None = None
        self._stats: Stats | None = None  # statistics of the control loop

    @property
    def remarks(self) -> list[str]:
        """What was decided between two readings, or is uncertain."""
        found = list(self._recording.remarks)
        configured, recorded = self._config.policy.instruction, {text for _, text in self._recording.instructions}
        if configured and recorded - {configured} and not self._options.instruction:
            others = ", ".join(sorted(map(repr, recorded - {configured})))
            found.append(series.other_instruction(configured, others))
        times = self._columns["times"]
        if (tied := len(times) - len(set(times))) > _TIED * len(times):
            cause = "as with a recorder's coarse clock: which joint state and action belong to a frame is uncertain"
            found.append(f"{tied} of {len(times)} frames have the receive time of another one, {cause}")
        return found

    def play(self) -> Samples:
        """Play the frames; after Ctrl-C, return the results so far with ``complete`` False."""
        complete = True
        self._begin_episode()
        counted = Counter(self._controller.counters)
        try:
            if speed := self._options.speed:
                before = self._resume.times.tolist() if self._resume is not None else []
                records = self._bag.records(self._selection.cameras, before[-1] + 1 if before else 0)
                node = (self._config, self._source, self._pipeline)
                live = LiveRun(*node, self._recording, records, speed, self, self._episode)
                self._stats = live.port.node.stats
                live.run(self._is_enough)
            else:
                self._open_loop()
        except KeyboardInterrupt:
            complete = False  # the resumed run repeats the current frame
        result = self._samples(complete, Counter(self._controller.counters) - counted)
        if self._partial is not None:
            samples_of.save_samples(result, self._partial)
        return result

    def on_step(self, step: StepResult) -> None:
        if step.chunk is not None:
            self._inferred = step
        elif step.refused is not None:
            self._refused[step.refused.reason.value] += 1
            self._stops.command(self._last_time or step.stamp, step.refused)

    def on_outcome(self, outcome: FrameOutcome) -> None:
        if outcome.camera != self._selection.cameras[0]:
            return
        step, self._inferred = self._inferred, None
        if outcome.outcome == REPLACED:
            self._skipped += 1
        elif step is not None:
            ended = _NAN if outcome.ended is None else outcome.ended
            age_ms = (ended - outcome.received) / 1e6 / self._options.speed
            self._keep(outcome.received, step, outcome.reason, age_ms)
        elif outcome.reason is not None:
            self._drop(outcome.reason, outcome.detail)

    def _is_enough(self) -> bool:
        before = self._resume.received - self._resume.skipped if self._resume is not None else 0
        return before + len(self._stages) + sum(self._dropped.values()) >= self._options.limit > 0

    def _open_loop(self) -> None:
        """Use every k-th frame of the first camera with the newest frames of the other cameras."""
        first, *others = self._selection.cameras
        newest: dict[str, bytes] = {}
        number = itertools.count()
        done = self._resume.received if self._resume is not None else 0  # frames, because several may have one time
        if self._is_enough():
            return
        for record in self._bag.records(self._selection.cameras):
            if record.topic != first:
                newest[record.topic] = bytes(record.data)
            elif (at := next(number)) < done:
                continue
            elif at % self._options.every:
                self._skipped += 1
            else:
                self._infer(record.time, [record.data, *map(newest.get, others)])
            if self._is_enough():
                return

    def _infer(self, now: int, frames: Sequence[bytes | memoryview | None]) -> None:
        assert frames[0] is not None
        try:
            stamp = image_stamp(frames[0])
        except ImageError:
            stamp = 0
        if self._episode(now) is not None:
            self._begin_episode()
        recording = self._recording
        inputs = recording.inputs(now, self._instructions[-1])
        self._stops.motion(now, inputs.joints)
        reference = recording.joints.nearest_stamp(stamp, now, _NEAR_STAMP) if recording.joints and stamp else None
        self._controller.assume(inputs.arms or inputs.joints)
        try:
            step = first_step(self._source, self._pipeline, frames, inputs, self._period, reference)
        except ImageError as error:
            self._drop(Reason.IMAGE_INVALID, str(error))
            return
        except Refused as refused:
            self._drop(refused.reason, refused.detail)
            return
        if step.refused is None:
            self._controller.sent()
        self._keep(now, step, step.refused.reason if step.refused else None, _NAN)

    def _begin_episode(self) -> None:
        self._source.reset()
        self._pipeline.schedule.reset()
        self._pipeline.observer.begin_task()
        self._controller.reset()
        self._stops.begin()

    def _drop(self, reason: Reason, detail: str) -> None:
        # Each reason keeps its first text, because numbers in the details differ from frame to frame.
        self._dropped[self._details.setdefault(reason, f"{reason.value}: {detail}"[:300])] += 1
        self._progress(len(self._stages))

    def _keep(self, received: int, step: StepResult, refused: Reason | None, age_ms: float) -> None:
        if refused is not None:
            self._refused[refused.value] += 1
        self._stops.command(received, step.refused)
        if step.observation is not None and isinstance(step.observation.images, LazyImages):
            self._images += step.observation.images.prepared
        normalized = step.chunk.normalized if step.chunk is not None else None
        row = {
            "times": received,
            "stamps": step.stamp,
            "episodes": len(self._instructions) - 1,
            "predicted": step.action,
            "normalized": normalized[0] if normalized is not None else np.full(len(step.action), _NAN),
            "age_ms": age_ms,
        }
        for name, value in row.items():
            self._columns[name].append(value)
        total = sum(ms for stage, ms in step.stages_ms.items() if not stage.startswith("policy/"))
        self._stages.append({**step.stages_ms, "total": total})
        pairs = (zip(each.names, each.positions.tolist(), strict=True) for each in step.commands)
        self._commands.append(dict(itertools.chain(*pairs)))
        now = time.perf_counter()
        if self._partial is not None and now - self._saved > SAVE_EVERY_S:
            self._saved = now
            samples_of.save_samples(self._samples(False, Counter()), self._partial)
        self._progress(len(self._stages))

    def _episode(self, now: int) -> str | None:
        """Return the instruction if a frame starts an episode, otherwise None.

        An episode starts when the instruction changes, after a pause, or when time runs backwards.
        """
        last, self._last_time = self._last_time, now
        recorded = self._recording.instruction(now)
        paused = last is None or not 0 <= now - last <= self._options.gap_s * 1e9
        if not paused and recorded == self._recorded_instruction:
            return None
        # A new recorded instruction starts an episode even if --instruction replaces it.
        self._recorded_instruction = recorded
        instruction = self._options.instruction or self._recording.instruction(now, self._config.policy.instruction)
        self._instructions.append(instruction)
        return instruction

    def _samples(self, complete: bool, limited: Counter[str]) -> Samples:
        """Return the results so far as arrays, paired with the recorded actions."""
        spec, count = self._pipeline.binding.spec, len(self._stages)
        columns: dict[str, Any] = {name: np.array(self._columns[name], kind) for name, kind in _KINDS.items()}
        for name in ("predicted", "normalized"):
            columns[name] = columns[name].reshape(count, spec.dimension)
        times, stamps, tolerance = columns["times"], columns["stamps"], round(self._options.tolerance_s * 1e9)
        recorded, period = (self._recording, self._selection), round(self._period * 1e9)
        paired = truth.align(times, stamps, *recorded, spec, self._config, tolerance, period)
        result = Samples(
            **columns,
            bag=str(self._bag.path),
            recorded=paired.actions,
            openings=truth.finger_openings(times, self._recording, spec, self._config),
            commands=_table(self._commands),
            stages_ms=_table(self._stages),
            instructions=tuple(self._instructions),
            rule=paired.rule,
            problem=paired.problem,
            received=count + sum(self._dropped.values()) + self._skipped,
            skipped=self._skipped,
            dropped=Counter(self._dropped),
            refused=Counter(self._refused),
            stops=self._stops.found,
            limited=limited,
            execution=self._stats.execution.summary() if self._stats is not None else {},
            notes=self._recording.skipped,
            losses=self._bag.losses,
            topics=self._selection.described,
            images=self._images,
            wall_s=time.perf_counter() - self._began,
            complete=complete,
        )
        return samples_of.resumed(self._resume, result) if self._resume is not None else result


def _table(rows: Sequence[Mapping[str, float]]) -> dict[str, FloatArray]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, _NAN) for row in rows]) for name in names}
