"""One bag through the very step that live frames take: open loop, or as it would have run on this machine.

Open loop: every (k-th) frame is answered from what was recorded, whatever was answered before (teacher-forced), and
a chunk's first action is compared. As it would have run: frames arrive at their recorded times, the policy takes as
long as it takes here, the newest frame wins and what came meanwhile is skipped. That clock is computed, not waited
for: a policy that needs 50 ms a frame is busy for 50 ms of the recording, so an hour's bag does not take an hour.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_ros.config import Config
from vla_ros.control.inputs import Snapshot
from vla_ros.control.outcome import StepResult
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ImageError
from vla_ros.node.stepper import Stepper, make_kinematics
from vla_ros.replay import samples as samples_of
from vla_ros.replay import series, truth
from vla_ros.replay.bag import Bag
from vla_ros.replay.records import Record
from vla_ros.replay.samples import Samples
from vla_ros.replay.series import Feed
from vla_ros.replay.topics import Selection
from vla_ros.types import JointState
from vla_ros.vision.decode import image_stamp
from vla_ros.vision.lazy_images import Pictures

SAVE_EVERY_S = 20.0
"""Seconds between partial results on disk."""


_NEAR_STAMP = 100_000_000  # ns; as control.inputs.Inputs.joints_at


@dataclass(frozen=True)
class Options:
    """How bags are played.

    Attributes:
        speed: 0 plays in open loop; else as it would have run, at this multiple of the recorded speed.
        every: Answer every k-th frame (open loop).
        limit: Frames of each bag at most; 0 all.
        instruction: Takes the place of what was recorded; "" does not.
        tolerance_s: Longest time from a frame to the recorded action that belongs to it.
        gap_s: A longer pause between frames begins a new episode.
    """

    speed: float = 0.0
    every: int = 1
    limit: int = 0
    instruction: str = ""
    tolerance_s: float = 0.2
    gap_s: float = 2.0


class Player:
    """Plays one bag.

    Args:
        bag: Open.
        selection: Which topic is what.
        config: As :func:`fit` gives it.
        stepper: Loaded.
        options: How.
        resume: What an interrupted run left, or None.
        partial: Where partial results go, or None.
        progress: Told the number of answered frames now and then.
    """

    def __init__(
        self,
        bag: Bag,
        selection: Selection,
        config: Config,
        stepper: Stepper,
        options: Options,
        *,
        resume: Samples | None = None,
        partial: Path | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._bag, self._selection, self._config = bag, selection, config
        self._stepper, self._options = stepper, options
        self._resume, self._partial, self._progress = resume, partial, progress
        arm = stepper.controller.arm_names
        self._recording = series.read(bag, selection, arm, config.timeouts.joint_state)
        self._cameras = {topic: index for index, topic in enumerate(selection.cameras)}
        self._frames_of: list[bytes | memoryview | None] = [None] * len(selection.cameras)
        self._rows: list[_Row] = []
        self._instructions: list[str] = []
        self._recorded_instruction = ""
        self._received = self._skipped = self._frames = 0
        self._dropped: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._details: dict[Reason, str] = {}
        self._last_time: int | None = None
        self._began = time.perf_counter()
        self._saved = self._began
        rate = config.control.rate_hz or stepper.spec.rate_hz or 30.0
        self._period = 1.0 / rate
        self._limiter = RateLimiter.from_config(config.control)

    def play(self) -> Samples:
        """Answer the frames. On Ctrl-C what there is comes back with ``complete`` False."""
        start = int(self._resume.times[-1]) + 1 if self._resume is not None and len(self._resume.times) else 0
        complete = True
        self._stepper.reset()
        counted = Counter(self._stepper.controller.counters)
        try:
            records = self._bag.records(self._selection.cameras, start)
            if self._options.speed:
                self._as_run(records)
            else:
                self._open_loop(records)
        except KeyboardInterrupt:
            complete = False
            # The frame in hand was not answered; it comes again when the run goes on.
            self._received = len(self._rows) + sum(self._dropped.values()) + self._skipped
        limited = Counter(self._stepper.controller.counters)
        limited.subtract(counted)
        result = self._samples(complete, +limited)
        if self._partial is not None:
            samples_of.save(result, self._partial)
        return result

    def _open_loop(self, records: Iterator[Record]) -> None:
        """Answer every k-th frame."""
        for record in self._first_camera(records):
            if (self._received - 1) % self._options.every:
                self._skipped += 1
                continue
            self._answer(record, record.time, self._period, False)

    def _as_run(self, records: Iterator[Record]) -> None:
        """Answer as the live node would: one mailbox, the newest frame wins, at most ``control.rate_hz``."""
        waiting: Record | None = None
        free = 0  # nanoseconds of the recording at which the next step may begin
        for record in self._first_camera(records):
            if waiting is not None and free <= record.time and not self._gives_way(waiting, record, free):
                free = self._busy(waiting, max(free, waiting.time))
                waiting = None
            if waiting is not None:
                self._skipped += 1
            waiting = record._replace(data=bytes(record.data)) if free > record.time else record
            if free <= record.time:
                free = self._busy(record, record.time)
                waiting = None
        if waiting is not None:
            self._busy(waiting, max(free, waiting.time))

    def _gives_way(self, waiting: Record, following: Record, free: int) -> bool:
        """True where a frame that waits is passed over for the one that is about to come."""
        return self._limiter.patience(free / 1e9, waiting.time / 1e9, following.time / 1e9) > 0

    def _busy(self, record: Record, begin: int) -> int:
        """Answer a frame at ``begin`` (nanoseconds of the recording); when the next step may begin."""
        limiter, began = self._limiter, begin / 1e9
        took = self._answer(record, begin, limiter.step_time(began), True)
        sent = began + took * self._options.speed
        limiter.answered(began, sent)
        # The rest of a chunk is executed step by step before the policy is asked again.
        while not self._stepper.wants_frame:
            sent = limiter.planned_due
            step = self._stepper.next_command(
                self._newest(self._recording.joints, round(sent * 1e9), 0), limiter.period
            )
            if step.command is None:
                self._refuse(step.refused)
                self._stepper.schedule.reset()
                break
            self._stepper.executed()
            limiter.executed(sent)
        return round(1e9 * max(sent, limiter.frame_due))

    def _first_camera(self, records: Iterator[Record]) -> Iterator[Record]:
        """Frames of the first camera, which sets the rhythm; the others' newest ones are kept."""
        for record in records:
            if self._frames == self._options.limit > 0:
                return
            index = self._cameras[record.topic]
            if index:
                self._frames_of[index] = bytes(record.data)
                continue
            self._received += 1
            yield record

    def _answer(self, record: Record, now: int, dt: float, as_run: bool) -> float:
        """One step, whose command is made for ``dt`` seconds; the seconds that it took."""
        self._frames += 1
        self._frames_of[0] = record.data
        try:
            stamp = image_stamp(record.data)
        except ImageError:
            stamp = 0
        instruction = self._options.instruction or self._recording.instruction(now, self._config.policy.instruction)
        # Where --instruction takes its place, the recorded one still tells where an episode ends.
        self._episode(record.time, instruction, self._recording.instruction(now))
        recording = self._recording
        joints = self._newest(recording.joints, now, stamp)
        feeds = {key: state for key, feed in recording.state.items() if (state := self._newest(feed, now, stamp))}
        reference = recording.joints.nearest_stamp(stamp, now, _NEAR_STAMP) if recording.joints and stamp else None
        began = time.perf_counter()
        try:
            step = self._stepper.step(self._frames_of, Snapshot(joints, feeds, instruction), dt, reference)
        except ImageError as error:
            self._dropped[f"{Reason.IMAGE_INVALID.value}: {error}"[:200]] += 1
            return time.perf_counter() - began
        except Refused as refused:
            # One text for each reason: details hold numbers that differ from frame to frame.
            text = self._details.setdefault(refused.reason, f"{refused.reason.value}: {refused.detail}"[:300])
            self._dropped[text] += 1
            return time.perf_counter() - began
        took = time.perf_counter() - began
        if step.command is None:
            self._refuse(step.refused)
            self._stepper.schedule.reset()
        else:
            self._stepper.executed()
        age = (now - record.time) / 1e6 / self._options.speed + 1e3 * took if as_run else float("nan")
        self._rows.append(_Row(record.time, stamp, len(self._instructions) - 1, step, 1e3 * took, age))
        self._rest()
        return took

    def _refuse(self, refused: Refused | None) -> None:
        self._refused[refused.reason.value if refused else Reason.ACTION_INVALID.value] += 1

    def _episode(self, now: int, instruction: str, recorded: str) -> None:
        """Begin a new episode where the instruction changed, frames paused, or time ran backwards."""
        last, self._last_time = self._last_time, now
        gap = last is None or not 0 <= now - last <= self._options.gap_s * 1e9
        if gap or recorded != self._recorded_instruction:
            self._recorded_instruction = recorded
            self._instructions.append(instruction)
            self._stepper.reset()

    def _newest(self, feed: Feed | None, now: int, stamp: int) -> JointState | None:
        """The newest message at ``now``; in lockstep the one that belongs to the frame's stamp."""
        if feed is None:
            return None
        if self._config.control.lockstep and stamp:
            return feed.from_stamp(stamp) or feed.newest(now)
        return feed.newest(now)

    def _rest(self) -> None:
        """Between two frames: tell how far it came, and keep partial results."""
        now = time.perf_counter()
        if self._progress is not None and len(self._rows) % 50 == 0:
            self._progress(len(self._rows))
        if self._partial is not None and now - self._saved > SAVE_EVERY_S:
            self._saved = now
            samples_of.save(self._samples(False, Counter()), self._partial)

    def _samples(self, complete: bool, limited: Counter[str]) -> Samples:
        """Everything so far as arrays, paired with what was recorded."""
        rows, spec = self._rows, self._stepper.spec
        times = np.array([row.time for row in rows], np.int64)
        stamps = np.array([row.stamp for row in rows], np.int64)
        paired = truth.align(
            times,
            stamps,
            self._recording,
            self._selection,
            spec,
            self._config,
            make_kinematics(self._config) if truth.needs_urdf(self._selection, spec) else None,
            round(self._options.tolerance_s * 1e9),
            round(self._period * 1e9),
        )
        names = next((row.command_names for row in rows if row.command is not None), ())
        commands = np.full((len(rows), len(names)), np.nan)
        for index, row in enumerate(rows):
            if row.command is not None and len(row.command) == len(names):
                commands[index] = row.command
        stages = {name: np.full(len(rows), np.nan) for row in rows for name in row.stages_ms}
        for index, row in enumerate(rows):
            for name, value in row.stages_ms.items():
                stages[name][index] = value
        chosen = self._selection
        result = Samples(
            bag=str(self._bag.path),
            times=times,
            stamps=stamps,
            episodes=np.array([row.episode for row in rows], np.int64),
            predicted=np.array([row.action for row in rows]).reshape(len(rows), spec.dimension),
            recorded=paired.actions,
            normalized=np.array([row.normalized for row in rows]).reshape(len(rows), spec.dimension),
            commands=commands,
            command_names=names,
            stages_ms=stages,
            age_ms=np.array([row.age_ms for row in rows]),
            instructions=tuple(self._instructions),
            rule=paired.rule,
            problem=paired.problem,
            received=self._received,
            skipped=self._skipped,
            dropped=Counter(self._dropped),
            refused=Counter(self._refused),
            limited=limited,
            notes=self._recording.skipped,
            losses=self._bag.losses,
            topics={
                "camera": ", ".join(chosen.cameras),
                "joint_states": chosen.joint_states or "none",
                "instruction": chosen.instruction or "none",
                "truth": chosen.truth_name,
            },
            images=sum(row.images for row in rows),
            wall_s=time.perf_counter() - self._began,
            complete=complete,
            openings=truth.finger_openings(times, self._recording, self._config),
        )
        return samples_of.join(self._resume, result) if self._resume is not None else result


class _Row:
    """What is kept of one answered frame; pictures are not."""

    __slots__ = (
        "action",
        "age_ms",
        "command",
        "command_names",
        "episode",
        "images",
        "normalized",
        "stages_ms",
        "stamp",
        "time",
    )

    def __init__(
        self, time: int, stamp: int, episode: int, step: StepResult, total_ms: float, age_ms: float
    ) -> None:
        assert step.action is not None
        self.time, self.stamp, self.episode, self.age_ms = time, stamp, episode, age_ms
        self.action = step.action
        normalized = step.chunk.normalized if step.chunk is not None else None
        self.normalized = normalized[0] if normalized is not None else np.full(len(step.action), np.nan)
        self.command = step.command.positions if step.command is not None else None
        self.command_names = step.command.names if step.command is not None else ()
        self.stages_ms = {**step.stages_ms, "total": total_ms}
        images = step.observation.images if step.observation is not None else None
        self.images = images.prepared if isinstance(images, Pictures) else 0
