"""Reads image times, measurements, commands and instructions from a bag.

Times are the recorder's or header stamps; only header stamps order the messages of a simulation in lockstep. With
header stamps, the time of a message without a header is interpolated between the images received before and after
it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from vla_ros.config import Config, node_topics
from vla_ros.contract.state import Arm
from vla_ros.control.mode import Mode
from vla_ros.types import IntArray, JointState
from vla_ros_lab.export.dataset import ExportError
from vla_ros_lab.export.images import read_cameras
from vla_ros_lab.replay import series
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.series import Table, TopicSeries
from vla_ros_lab.replay.topics import JOINTS, TEXT, TRAJECTORY, TopicSelection, live_name

_STATUS, _BOOL = "~/status", "std_msgs/msg/Bool"
CORRECTING, PAUSED = Mode.CORRECTING.value, Mode.PAUSED.value


class Occurrence(NamedTuple):
    """An event of the node (``~/event``)."""

    time: int  # ns, on the clock of the images
    kind: str
    mode: str  # who moves the arm from then on
    label: str  # how an episode ended


class Interval(NamedTuple):
    """An episode, or a correction in it."""

    begin: int
    end: int
    label: str


@dataclass(frozen=True)
class _Clock:
    """Converts the recorder's times to the chosen clock."""

    stamped: bool  # True if header stamps are used
    received: IntArray  # int64 [F], times at which the first camera's images were received, ascending
    stamps: IntArray  # int64 [F], header stamps of these images, ascending

    def of(self, times: IntArray) -> IntArray:
        """Convert receive times; raises ExportError if all images were received at one time."""
        if not self.stamped:
            return times
        if self.received[0] == self.received[-1]:
            unknown = "it is unknown when messages without a stamp (events, instructions, arrays) came"
            found = f"all images were received at {self.received[0]} ns"
            raise ExportError(f"{found}, so {unknown}; use --episodes bag and --instruction")
        # Times are relative to the first image, because float64 cannot represent nanoseconds since 1970.
        origin, first = self.received[0], int(self.stamps[0])
        stamps = np.interp(times - origin, self.received - origin, self.stamps - first)
        return np.asarray(stamps, np.int64) + first

    def convert(self, topic_series: TopicSeries) -> TopicSeries:
        return TopicSeries(tuple(map(self._table, topic_series.tables))) if self.stamped else topic_series

    def _table(self, table: Table) -> Table:
        missing = table.stamps <= 0
        times = np.where(missing, self.of(table.times), table.stamps) if missing.any() else table.stamps
        order = np.argsort(times, kind="stable")
        columns = {name: getattr(table, name) for name in ("stamps", "values", "velocities", "efforts")}
        ordered = {name: each[order] for name, each in columns.items() if len(each)}
        return replace(table, times=times[order], **ordered)


class RecordedJoints:
    """An open bag whose topics have been read, except for images.

    ``config`` is from :func:`~vla_ros_lab.replay.prepare.fit`; ``stamped`` uses header stamps instead of the
    recorder's times. ``times`` are the image times of each of the ``cameras``, int64 [F], ascending; ``recording``
    and ``joints`` use the same clock; ``notes`` counts what was left out. Raises ExportError if the bag has no
    images or no joint states.
    """

    def __init__(
        self, bag: Bag, selection: TopicSelection, config: Config, arms: Mapping[str, Arm], *, stamped: bool
    ) -> None:
        self._bag, self._selection, self._arms, self._event = bag, selection, arms, node_topics.EVENT
        self.cameras, unstamped = read_cameras(bag, selection.cameras, config.camera, stamped=stamped)
        first = self.cameras[0]
        self._clock = _Clock(stamped, first.received, np.sort(first.stamps))
        self.times = [camera.times for camera in self.cameras]
        needed = [joint for arm in arms.values() for joint in arm.joints]
        recording = series.read_recording(bag, selection, needed, config.timeouts.joint_state)
        if recording.joints is None:
            raise ExportError(f"{bag.path}: has no joint states, which state and action require")
        self.joints = self._clock.convert(recording.joints)
        self.recording = replace(
            recording,
            joints=self.joints,
            state={key: self._clock.convert(topic_series) for key, topic_series in recording.state.items()},
            instructions=tuple((self._time(time), text) for time, text in recording.instructions)
            if len(recording.instructions) > 1
            else recording.instructions,
        )
        self.notes = recording.skipped + Counter({"images without a stamp": unstamped})

    def commanded(self, time: int) -> JointState | None:
        """Return the commanded positions of all joints at ``time``.

        Returns None if a command topic has no command yet. Raises ExportError if no command was recorded.
        """
        states = [state for topic_series in self._commands if (state := topic_series.newest(time)) is not None]
        if len(states) < len(self._commands):
            return None
        names = tuple(name for state in states for name in state.names)
        return JointState(names, np.concatenate([state.positions for state in states]), states[0].stamp)

    @cached_property
    def _commands(self) -> list[TopicSeries]:
        """The commands on each topic; arm and fingers may have separate topics."""
        commands = []
        for arm in self._arms.values():
            topics = (arm.config.command, (*arm.joints, *arm.fingers)), (arm.config.gripper_topic, arm.fingers)
            for name, joints in topics:
                topic = live_name(name) if name else ""
                kind = self._bag.topics.get(topic)
                if kind is None or topic in self._bag.empty:
                    continue
                selection = TopicSelection((), "raw", (), None, (topic,), kind)
                if (found := series.read_recording(self._bag, selection).truth) is not None:
                    named = found if kind in (JOINTS, TRAJECTORY) else _named(found, joints, topic)
                    commands.append(self._clock.convert(named))
        if not commands:
            names = ", ".join(arm.config.command for arm in self._arms.values())
            advice = "set topics.command to the command topics, or use --goal measured"
            raise ExportError(f"{self._bag.path}: nothing was recorded on {names}; {advice}")
        return commands

    def marked(self, marker: str) -> list[tuple[int, int]]:
        """Return the intervals in which the node was armed, or in which the std_msgs/Bool on ``marker`` was true.

        Raises ExportError if the topic was not recorded or has another type.
        """
        topic, kind, lasts = (_STATUS, TEXT, _armed) if marker == "armed" else (marker, _BOOL, attrgetter("data"))
        topic = live_name(topic)
        if self._bag.topics.get(topic) != kind:
            found = self._bag.topics.get(topic, "nothing")
            raise ExportError(f"{self._bag.path}: --episodes {marker}: found {found} on {topic}, expected {kind}")
        edges: list[int] = []
        for time, _, message in series.messages(self._bag, [topic], Counter()):
            if bool(lasts(message)) == (len(edges) % 2 == 0):
                edges.append(self._time(time))
        edges += [int(self.times[0][-1])] * (len(edges) % 2)
        return list(zip(edges[::2], edges[1::2], strict=True))

    @cached_property
    def events(self) -> list[Occurrence]:
        """The node's events; empty if they were not recorded."""
        found, topic = [], live_name(self._event)
        if self._bag.topics.get(topic) != TEXT:
            return []
        for time, _, message in series.messages(self._bag, [topic], Counter()):
            with suppress(ValueError, KeyError, TypeError):
                one = json.loads(message.data)
                found.append(Occurrence(self._time(time), str(one["event"]), str(one["mode"]), str(one["label"])))
        return found

    def intervals(self, kind: str, notes: Counter[str], *, failures: bool = True) -> list[Interval]:
        """Return the episodes that were not discarded, or the corrections in them (``ExportOptions.episodes``).

        An episode without an end, because the node was killed, has no label, nor has a correction after which the
        episode went on: what it had achieved by then is unknown. ``notes`` counts what is left out.
        """
        found: list[Interval] = []
        inside: list[Occurrence] = []
        last = Occurrence(int(self.times[0][-1]) + 1, "episode_end", "", "")
        for event in [*self.events, last]:
            if event.kind == "episode_start":
                inside = [event]
            elif inside and event.kind == "episode_end":
                spans = pairwise([*(one for one in inside if one.mode != PAUSED), event])
                corrected = [Interval(a.time, b.time - 1, b.label) for a, b in spans if a.mode == CORRECTING]
                if event.label == "discard" or (event.label == "failure" and not failures):
                    notes["discarded episodes" if event.label == "discard" else "failed episodes"] += 1
                elif kind == "corrections" or (kind == "taught" and corrected):
                    found += corrected
                else:
                    found.append(Interval(inside[0].time, event.time - 1, event.label))
                inside = []
            elif inside and event.mode != inside[-1].mode:
                inside.append(event)
        return found

    def _time(self, received: int) -> int:
        return int(self._clock.of(np.array([received], np.int64))[0])


def _armed(message: Any) -> bool:
    try:
        return json.loads(message.data)["state"] in ("armed", "holding")
    except (ValueError, KeyError, TypeError):
        return False


def _named(topic_series: TopicSeries, joints: Sequence[str], topic: str) -> TopicSeries:
    """Give the columns of a command without names the first names in ``joints``."""
    table = topic_series.main
    count = table.values.shape[1]
    if count > len(joints):
        raise ExportError(f"{topic}: found {count} numbers, expected at most one for each of {', '.join(joints)}")
    return TopicSeries((replace(table, names=tuple(joints[:count])),))
