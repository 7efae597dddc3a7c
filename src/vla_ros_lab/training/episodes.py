"""Recorded episodes as samples, whose observations the node's own code makes.

The numbers of all episodes are read once, in the order in which the node would have read them; images are read when
a sample is asked for. What cannot be a sample is counted in ``notes``.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.binding import Binding
from vla_ros.contract.spec import NOW, PolicySpec
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Refused
from vla_ros.errors import ImageError, VlaRosError
from vla_ros.node.observer import Observer
from vla_ros.types import FloatArray, IntArray
from vla_ros_lab.training.poses import CameraPoses
from vla_ros_lab.training.samples import Sample


class DataError(VlaRosError):
    """Recordings or a data set cannot be read, or contain nothing to train on."""


@dataclass(frozen=True)
class ReadOptions:
    """What of the recordings is read: the options of ``vla-ros finetune`` with the same names."""

    failures: bool = False  # also episodes that a person labelled ``failure``
    episodes: str = "taught"  # what of a bag is an episode, as ``vla-ros export --episodes``
    # True leaves out frames after which the episode is shorter than a chunk, as RLDS does for OpenVLA-OFT.
    whole_chunks: bool = False
    goal: str = (
        "commands"  # of bags: actions lead to the ``commands``, or to the ``measured`` position a step later
    )
    # Of bags: ``frames`` makes every image of the first camera a sample, ``received`` resamples at the policy's
    # rate; ``auto`` is ``frames`` if the camera has that rate.
    clock: str = "auto"
    instruction: str = ""  # used instead of the recorded instruction, unless empty
    topics: Mapping[str, str] = field(default_factory=dict)  # role to topic, from ``--topics``


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """The numbers of one episode of T frames."""

    name: str  # where it is, for messages
    task: str  # the instruction
    actions: FloatArray  # float64 [T, D], in the policy's units
    state: Mapping[str, FloatArray]  # key to float64 [T, N], or [T, P, N] at P times, oldest first
    rows: IntArray  # int64 [C, T], number of each camera's image in :class:`Pictures`
    label: str = ""  # a person's: ``success``, ``failure``, ``end`` or ""
    corrected: bool = False  # a person moved the arm
    poses: CameraPoses = field(default_factory=CameraPoses)  # of depth cameras


class Pictures(Protocol):
    """Random access to images. Picklable, so that workers can read them."""

    def message(self, camera: int, row: int) -> bytes:
        """Return an image as a serialised message, of the binding's ``camera.transport``."""

    def stamp(self, camera: int, row: int) -> int:
        """Return when an image was taken, nanoseconds."""


@dataclass(eq=False)
class EpisodeSamples:
    """The samples of a data set, see :class:`~vla_ros_lab.training.samples.Samples`.

    Attributes:
        binding: The policy's inputs and outputs, bound to the data's cameras; without state readers, which are used
            when the data are opened.
        data: The numbers of every episode, in the order of ``episodes``.
        rate_hz: Frames per second of the data.
        names: Names of the numbers of ``state`` (all vectors, in the policy's order) and ``action``.
        notes: What was left out and how often.
        remarks: What was decided between two readings.
    """

    binding: Binding
    data: Sequence[RecordedEpisode]
    pictures: Pictures
    rate_hz: float
    names: Mapping[str, Sequence[str]]
    whole_chunks: bool = False
    notes: Counter[str] = field(default_factory=Counter)
    remarks: tuple[str, ...] = ()

    @property
    def spec(self) -> PolicySpec:
        """The policy's spec, completed with the options."""
        return self.binding.spec

    @cached_property
    def episodes(self) -> Sequence[range]:
        lost = self.spec.horizon - 1 if self.whole_chunks else 0
        counts = [max(0, len(one.actions) - lost) for one in self.data]
        ends = np.cumsum([0, *counts]).tolist()
        return [range(begin, end) for begin, end in pairwise(ends)]

    def __len__(self) -> int:
        return self.episodes[-1].stop if self.episodes else 0

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        number = bisect.bisect_right(self.episodes, index, key=lambda one: one.start) - 1
        while index not in self.episodes[number]:  # an episode without samples
            number -= 1
        episode, frame = self.data[number], index - self.episodes[number].start
        actions, is_pad = chunk(episode.actions, frame, self.spec.horizon)
        try:
            return Sample(self._observe(episode, frame), actions, is_pad, number, frame)
        except (ImageError, Refused) as error:
            raise DataError(
                f"{episode.name}, frame {frame}: {error}; leave this recording out, or export it with vla-ros "
                "export, which leaves damaged images out"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_observer"}

    @cached_property
    def _observer(self) -> Observer:
        return Observer(self.binding)

    def _observe(self, episode: RecordedEpisode, frame: int) -> Any:
        observer, rows = self._observer, episode.rows[:, frame].tolist()
        observer.begin_task()
        episode.poses.show(observer.depth)
        for camera, seconds in self._remembered.items():
            first, last, stamp = int(episode.rows[camera, 0]), rows[camera], self.pictures.stamp
            since = stamp(camera, last) - round(1e9 * seconds)
            while first < last - 1 and stamp(camera, first + 1) <= since:  # the newest of them may be the nearest
                first += 1
            for row in range(first, last):
                observer.remember(camera, stamp(camera, row), self.pictures.message(camera, row), Snapshot())
        messages = [self.pictures.message(camera, row) for camera, row in enumerate(rows)]
        seen = observer.observe(messages, Snapshot(instruction=episode.task))
        return replace(seen, state={key: values[frame] for key, values in episode.state.items()})

    @cached_property
    def _remembered(self) -> Mapping[int, float]:
        """Cameras of which the policy takes past images, and how many seconds back."""
        found = {}
        for image in self.spec.images:
            if image.delta_timestamps != NOW and image.key in self.binding.cameras:
                past = min(one.seconds or one.steps / self.rate_hz for one in image.delta_timestamps)
                found[self.binding.cameras[image.key]] = -past
        return found


def chunk(actions: FloatArray, frame: int, horizon: int) -> tuple[FloatArray, Any]:
    """Return the actions [H, D] from ``frame`` on, and which [H] are after the end, where the last one repeats."""
    steps = frame + np.arange(horizon)
    return actions[np.minimum(steps, len(actions) - 1)], steps >= len(actions)


def seeing(binding: Binding) -> Binding:
    """Return what an observer of images needs of a binding; unlike a whole one, it can be pickled."""
    config = binding.config
    kept = Config(
        camera=config.camera, control=config.control, timeouts=config.timeouts, robot=config.robot, own={}
    )
    return replace(binding, states=(), config=kept)
