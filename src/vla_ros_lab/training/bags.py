"""Reads recorded bags as episodes: what the export resamples, seen by the policy's observer.

An episode is what the node's events say: one that was neither discarded nor labelled a failure, and of an episode
in which a person corrected, only the corrections. Without events, it is a bag without pauses, as in an export.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.binding import Binding, bind, make_arms
from vla_ros.contract.gripper import GripperValues, gripper_ends
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ImageError
from vla_ros.node.observer import Observer
from vla_ros.types import FloatArray, IntArray, Observation
from vla_ros.vision.messages import encode_image
from vla_ros_lab.export.dataset import ExportError
from vla_ros_lab.export.episodes import ExportOptions, ResampledEpisode, Resampler
from vla_ros_lab.replay.bag import Bag, find_bags
from vla_ros_lab.replay.prepare import fit, read_transforms
from vla_ros_lab.replay.storage import BagError, Record
from vla_ros_lab.replay.topics import topics_of
from vla_ros_lab.training.episodes import DataError, EpisodeSamples, ReadOptions, RecordedEpisode, seeing
from vla_ros_lab.training.poses import gather_poses

_SAME = 0.05  # share by which a camera's rate may differ from the policy's if every image is to be a frame
_PIXEL = np.zeros((1, 1, 3), np.uint8)


class Messages:
    """Where the serialised images of recordings are: in the bags themselves, if they are stored there as they are.

    Others (compressed chunks, SQLite, video) are written to a temporary file, which is deleted with this object.
    """

    def __init__(self, cameras: int) -> None:
        # Of each camera's images: number of the file, offset, length, stamp.
        self._columns = [tuple(array("q") for _ in range(4)) for _ in range(cameras)]
        self._files: list[str] = []
        self._opened: dict[str, int] = {}  # file to its descriptor
        self._spool: BinaryIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spool": None, "_opened": {}}

    def add(self, camera: int, record: Record, stamp: int, bag: Path) -> None:
        """Add a camera's next image; ``bag`` is the path of its bag."""
        path, offset = record.place or (None, 0)
        if path is None or not path.is_relative_to(bag):  # what is below is the bag's own and stays
            path, offset = self._spooled(record.data)
        if str(path) not in self._files[-1:]:
            self._files.append(str(path))
        values = (len(self._files) - 1, offset, len(record.data), stamp)
        for column, value in zip(self._columns[camera], values, strict=True):
            column.append(value)

    def count(self, camera: int) -> int:
        return len(self._columns[camera][0])

    def stamp(self, camera: int, row: int) -> int:
        return self._columns[camera][3][row]

    def message(self, camera: int, row: int) -> bytes:
        file, offset, length, _ = (column[row] for column in self._columns[camera])
        with suppress(OSError):
            data = os.pread(self._descriptor(self._files[file]), length, offset)
            if len(data) == length:
                return data
        raise DataError(f"{self._files[file]}: the image at byte {offset} is gone; the file was changed or removed")

    def finish(self) -> None:
        """Make readable what was added; nothing is added later."""
        if self._spool is not None:
            self._spool.close()

    def _descriptor(self, path: str) -> int:
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._opened[path])
        return self._opened[path]

    def _spooled(self, data: bytes | memoryview) -> tuple[Path, int]:
        if self._spool is None:
            handle, name = tempfile.mkstemp(prefix="vla_ros_images_")
            os.close(handle)
            self._spool = Path(name).open("wb")  # noqa: SIM115 - closed by :meth:`finish`
            weakref.finalize(self, _remove, name, os.getpid())
        offset = self._spool.tell()
        self._spool.write(data)
        return Path(self._spool.name), offset


def _remove(name: str, process: int) -> None:
    if os.getpid() == process:  # not in a worker that was forked
        Path(name).unlink(missing_ok=True)


def open_bags(paths: Sequence[Path], spec: PolicySpec, config: Config, options: ReadOptions) -> EpisodeSamples:
    """Read all bags; one that cannot be read is left out and named. For errors, see :mod:`.reading`."""
    messages = Messages(len(config.camera.topics))
    found: list[RecordedEpisode] = []
    notes, remarks, rates = Counter[str](), dict[str, None](), dict[tuple[float, str], Path]()
    binding: Binding | None = None
    names: tuple[Sequence[str], ...] = ()
    for path in find_bags(paths):
        bag: Bag | None = None
        try:
            with Bag(path) as bag:
                reader = _BagReader(bag, spec, config, options)
                found += reader.read(messages)
            notes.update(reader.notes)
            remarks |= reader.remarks
            rates[reader.rate, reader.binding.config.camera.transport] = path
            binding, names = reader.binding, reader.names
        except (BagError, ExportError) as error:
            where = "" if str(path) in str(error) else f"{path}: "
            notes[f"a bag: {where}{error}"] += 1
        notes.update(map(str, bag.losses if bag is not None else ()))
    messages.finish()
    if binding is None:
        listed = "".join(f"\n  left out: {note}" for note in notes)
        raise DataError(f"{', '.join(map(str, paths))}: none of the bags can be read{listed}")
    if len(rates) > 1:
        listed = ", ".join(f"{rate:g} Hz, {transport} ({path})" for (rate, transport), path in rates.items())
        raise DataError(
            f"the bags differ: {listed}; set control.rate_hz, at which they are then resampled, and read raw and "
            "compressed images apart"
        )
    remarks |= {f"features.joint_form: {text}": None for state in binding.states for text in state.unit_warnings()}
    [(rate, _)] = rates
    named = dict(zip(("state", "action"), names, strict=True))
    return EpisodeSamples(
        seeing(binding), found, messages, rate, named, options.whole_chunks, +notes, tuple(remarks)
    )


class _BagReader:
    """Reads one bag."""

    def __init__(self, bag: Bag, spec: PolicySpec, config: Config, options: ReadOptions) -> None:
        selection = topics_of(bag, config, {**options.topics, "truth": "none"})
        arms = make_arms(config)
        self.binding = binding = bind(spec, fit(config, selection), arms)
        state = [str(component) for one in binding.spec.state for component in one.components]
        made = ExportOptions(
            state=" + ".join(state or (f"{name}.joint_position" for name in arms)),
            action=" + ".join(map(str, binding.spec.action)),
            goal=options.goal,
            clock="received" if options.clock == "auto" else options.clock,
            episodes=options.episodes,
            failures=options.failures,
            instruction=options.instruction,
            topics=options.topics,
        )
        self._bag, self._resampler = bag, (resampler := Resampler(bag, config, made))
        self.notes, self.remarks, self.names = resampler.notes, resampler.remarks, resampler.names
        self.rate = self._rate(options.clock, max(config.control.rate_hz, 0.0) or binding.spec.rate_hz or 0.0)
        self._details: dict[Reason, str] = {}
        observer = Observer(binding)
        read_transforms(bag, observer, selection.joint_states)
        self._depth, self._poses = observer.depth, gather_poses(observer.depth)
        self._refused: dict[tuple[int, int], Refused] = {}  # by camera and row, depth that gives no points

    def _rate(self, clock: str, wanted: float) -> float:
        """Return the frames per second, ``wanted`` or the camera's; every image is a frame if both are the same."""
        try:
            own, remark = self._resampler.recorded.cameras[0].rate(2.0, "set control.rate_hz")
        except ExportError:
            if not wanted:
                raise
            return wanted
        self.remarks |= {remark: None} if remark else {}
        if clock == "auto" and abs(own - (wanted or own)) <= _SAME * own:
            self._resampler.clock = "frames"
        return wanted or max(1, round(own))

    def read(self, messages: Messages) -> Iterator[RecordedEpisode]:
        """Yield the episodes, and add their images to ``messages``."""
        first = [messages.count(camera) for camera in range(len(self._resampler.recorded.cameras))]
        self._index(messages)
        observer = Observer(self._unseeing)
        for episode in self._resampler.episodes(self.rate):
            cameras = zip(first, self._resampler.recorded.cameras, episode.frames, strict=True)
            rows = np.stack([start + camera.numbers(frames) for start, camera, frames in cameras])
            yield from self._observed(observer, episode, rows, messages)

    def _index(self, messages: Messages) -> None:
        recorded = self._resampler.recorded
        at = {camera.topic: index for index, camera in enumerate(recorded.cameras)}
        counts = Counter[str]()
        for record in self._bag.records(at):
            camera = recorded.cameras[at[record.topic]]
            stamp, index = int(camera.stamps[counts[record.topic]]), at[record.topic]
            try:
                if index in self._depth.measured:
                    self._depth.decode(index, record.data, 0.0)
            except Refused as refused:
                self._refused[index, messages.count(index)] = refused
            except ImageError as error:
                self._refused[index, messages.count(index)] = Refused(Reason.IMAGE_INVALID, str(error))
            messages.add(index, record, stamp, self._bag.path)
            counts[record.topic] += 1

    @property
    def _unseeing(self) -> Binding:
        """The binding for an observer of :data:`_PIXEL`, of which only the state is used."""
        config = self.binding.config
        camera = replace(config.camera, topics=config.camera.keys, transport="raw")
        return replace(self.binding, config=replace(config, camera=camera), points={})

    def _observed(
        self, observer: Observer, episode: ResampledEpisode, rows: IntArray, messages: Messages
    ) -> Iterator[RecordedEpisode]:
        """Read the state of each frame in order, as the node does, and leave out what the node would refuse."""
        inputs = self._resampler.recorded.recording.inputs
        seen: list[Observation | None] = []
        observer.begin_task()
        for time, images in zip(episode.times.tolist(), rows.T.tolist(), strict=True):
            stamps = [messages.stamp(camera, row) for camera, row in enumerate(images)]
            frames = [encode_image(_PIXEL, stamp, "") for stamp in stamps]
            try:
                for refused in filter(None, map(self._refused.get, enumerate(images))):
                    raise refused
                seen.append(observer.observe(frames, inputs(time, episode.task)))
            except Refused as refused:
                detail = self._details.setdefault(refused.reason, refused.detail)  # numbers differ in each
                self.notes[f"frames that the node refuses: {refused.reason.value}: {detail}"] += 1
                seen.append(None)
        whole = replace(episode, frames=tuple(rows), action=self._snapped(episode.action))
        unseen = np.array([one is None for one in seen])
        for part in whole.without(unseen) if unseen.any() else [whole]:
            begin = int(np.searchsorted(episode.times, part.times[0]))
            states = [one.state for one in seen[begin : begin + len(part.times)] if one is not None]
            yield RecordedEpisode(
                f"{self._bag.path} at {part.times[0] / 1e9:.3f} s",
                part.task,
                part.action,
                {key: np.stack([one[key] for one in states]) for key in states[0]},
                np.stack(part.frames),
                part.label,
                bool(part.intervention.any()),
                self._poses,
            )

    def _snapped(self, actions: FloatArray) -> FloatArray:
        """Return the actions [T, D] with binary grippers open or closed, as the node executes them."""
        actions, arms = actions.copy(), {arm.name: arm for arm in self.binding.config.arms}
        for part, columns in self.binding.columns:
            gripper = arms[part.arm].gripper if part.quantity == "gripper" else None
            if gripper is not None and gripper.mode == "binary":
                values, (closed, opened) = GripperValues(gripper, part), gripper_ends(part, gripper)
                shares = np.array([values.opening(value) for value in actions[:, columns.start].tolist()])
                actions[:, columns.start] = closed + shares * (opened - closed)
        return actions
