"""Reads image times, measurements, commands and instructions of a bag for a data set.

Times are the recorder's, or header stamps, because a simulation in lockstep is ordered only by stamps. Messages
without a header are placed between the images received around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.contract.state import Arm
from vla_ros.export.dataset import ExportError
from vla_ros.replay import series
from vla_ros.replay.bag import Bag
from vla_ros.replay.series import Feed, Table
from vla_ros.replay.topics import JOINTS, TEXT, TRAJECTORY, Selection, expand
from vla_ros.types import IntArray, JointState, UInt8Array
from vla_ros.vision.messages import image_stamp
from vla_ros.vision.preprocess import Preprocessor, process

_STATUS, _BOOL = "~/status", "std_msgs/msg/Bool"


@dataclass(frozen=True)
class Clock:
    """Converts the recorder's times to the chosen clock."""

    stamped: bool  # True if header stamps are used
    received: IntArray  # int64 [F], when the first camera's images were received, ascending
    stamps: IntArray  # int64 [F], of the same images

    def of(self, times: IntArray) -> IntArray:
        """Convert times of the recorder [N]."""
        if not self.stamped:
            return times
        origin = self.received[0]
        known = (self.received - origin).astype(float)
        first = int(self.stamps[0])
        found = np.interp((times - origin).astype(float), known, (self.stamps - first).astype(float))
        return np.asarray(found, np.int64) + first

    def table(self, table: Table) -> Table:
        """Return a table with converted, ascending times."""
        times = np.where(table.stamps > 0, table.stamps, self.of(table.times)) if self.stamped else table.times
        order = np.argsort(times, kind="stable")
        return replace(table, times=times[order], stamps=table.stamps[order], values=table.values[order])

    def feed(self, feed: Feed) -> Feed:
        """Return all tables of a feed with converted, ascending times."""
        return Feed(tuple(map(self.table, feed.tables)))


class Recorded:
    """An open bag whose small topics have been read.

    ``config`` is from :func:`~vla_ros.replay.prepare.fit`; ``stamped`` uses header stamps instead of the recorder's
    times. ``times`` are the image times of each camera, int64 [F], ascending; ``recording`` and its ``joints`` have
    the same clock. Raises ExportError if the bag has no images or no joint states.
    """

    def __init__(
        self, bag: Bag, selection: Selection, config: Config, arms: Mapping[str, Arm], *, stamped: bool
    ) -> None:
        self._bag, self._selection, self._arms = bag, selection, arms
        self._decode = Preprocessor(
            config.camera, PolicySpec(images=tuple(ImageFeature(key) for key in config.camera.keys))
        )
        found: dict[str, list[tuple[int, int]]] = {topic: [] for topic in selection.cameras}
        for record in bag.records(selection.cameras, verify=False):
            found[record.topic].append((record.time, image_stamp(record.data) or record.time if stamped else 0))
        if not all(found.values()):
            raise ExportError(f"{bag.path}: a camera of {', '.join(selection.cameras)} has no image")
        pairs = [np.array(found[topic], np.int64).T for topic in selection.cameras]
        self._received = [np.sort(received) for received, _ in pairs]
        self._clock = Clock(stamped, self._received[0], np.sort(pairs[0][1]))
        self.times = [np.sort(stamps if stamped else received) for received, stamps in pairs]
        needed = [joint for arm in arms.values() for joint in arm.joints]
        recording = series.read(bag, selection, needed, config.timeouts.joint_state)
        if recording.joints is None:
            raise ExportError(f"{bag.path}: has no joint states, so there is neither state nor action")
        self.joints = self._clock.feed(recording.joints)
        self.recording = replace(
            recording,
            joints=self.joints,
            state={key: self._clock.feed(feed) for key, feed in recording.state.items()},
            instructions=tuple((self._time(time), text) for time, text in recording.instructions),
        )
        self._commands: list[Feed] | None = None

    def images(self, camera: int, rows: IntArray) -> Iterator[UInt8Array]:
        """The images of one camera at these indices of its times (ascending), upright and processed."""
        received = self._received[camera]
        records = self._bag.records([self._selection.cameras[camera]], int(received[rows[0]]))
        held, image = -1, None
        for row in rows.tolist():
            time = int(received[row])
            while held < time:
                record = next(records)
                held = record.time
                if held == time:
                    image = process(self._decode(record.data, camera))
            assert image is not None
            yield image

    def commanded(self, time: int) -> JointState | None:
        """Return the commanded position of all joints at ``time``; None until every topic had a command.

        Raises ExportError if no command was recorded.
        """
        if self._commands is None:
            self._commands = self._read_commands()
        newest = [feed.newest(time) for feed in self._commands]
        known = [one for one in newest if one is not None]
        if len(known) < len(newest):
            return None
        names = tuple(name for one in known for name in one.names)
        return JointState(names, np.concatenate([one.positions for one in known]), known[0].stamp)

    def _read_commands(self) -> list[Feed]:
        """Return the commands by topic; arm and fingers may have separate topics."""
        found = []
        for arm in self._arms.values():
            topics = (arm.config.command, (*arm.joints, *arm.fingers)), (arm.config.gripper_topic, arm.fingers)
            for name, joints in topics:
                topic = expand(name) if name else ""
                kind = self._bag.topics.get(topic)
                if kind is None or topic in self._bag.empty:
                    continue
                feed = series.read(self._bag, Selection((), "raw", (), None, (topic,), kind)).truth
                if feed is not None:
                    feed = feed if kind in (JOINTS, TRAJECTORY) else _named(feed, joints, topic)
                    found.append(self._clock.feed(feed))
        if not found:
            names = ", ".join(arm.config.command for arm in self._arms.values())
            raise ExportError(
                f"{self._bag.path}: nothing was recorded on {names}; name the command topics (topics.command), or "
                "take --goal measured"
            )
        return found

    def marked(self, marker: str) -> list[tuple[int, int]]:
        """Intervals marked as episodes: ``armed`` (by the node's status), or while a std_msgs/Bool was true.

        Raises ExportError if the topic was not recorded, or is of another type.
        """
        topic, kind, lasts = (_STATUS, TEXT, _armed) if marker == "armed" else (marker, _BOOL, _true)
        topic = expand(topic)
        if self._bag.topics.get(topic) != kind:
            found = self._bag.topics.get(topic, "nothing")
            raise ExportError(f"{self._bag.path}: --episodes {marker}: found {found} on {topic}, expected {kind}")
        edges: list[int] = []
        for time, message in series.messages(self._bag, topic):
            if lasts(message) == (len(edges) % 2 == 0):
                edges.append(self._time(time))
        edges += [int(self.times[0][-1])] * (len(edges) % 2)
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _time(self, received: int) -> int:
        return int(self._clock.of(np.array([received], np.int64))[0])


def _armed(message: Any) -> bool:
    try:
        return json.loads(message.data)["state"] in ("armed", "holding")
    except (ValueError, KeyError, TypeError):
        return False


def _true(message: Any) -> bool:
    return bool(message.data)


def _named(feed: Feed, joints: Sequence[str], topic: str) -> Feed:
    """Assign unnamed numbers to the joints: the arm's, followed by the fingers if there are more numbers."""
    table = feed.main
    count = table.values.shape[1]
    if count > len(joints):
        raise ExportError(f"{topic}: has {count} numbers, expected at most one for each of {', '.join(joints)}")
    return Feed((replace(table, names=tuple(joints[:count])),))
