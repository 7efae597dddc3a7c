"""The small topics of a bag as arrays: joint states, commands, actions, instructions. Pictures are left alone."""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_ros.control.joints import JointStates
from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.replay.bag import Bag
from vla_ros.replay.topics import ARRAY, JOINTS, TEXT, TRAJECTORY, TWIST, Selection
from vla_ros.types import FloatArray, IntArray, JointState


@dataclass(frozen=True)
class Table:
    """Named numbers over time, one row per message.

    Attributes:
        names: Columns: joints, or "" for plain numbers.
        times: Int64 [N], nanoseconds at which the recorder received each message, ascending.
        stamps: Int64 [N], header stamps in nanoseconds; 0 where the type has none.
        values: Float64 [N, C].
    """

    names: tuple[str, ...]
    times: IntArray
    stamps: IntArray
    values: FloatArray

    def newest(self, time: int) -> int:
        """Row of the newest message at or before ``time``; -1 where there is none."""
        return int(np.searchsorted(self.times, time, side="right")) - 1

    def joint_state(self, row: int) -> JointState:
        """A row as a joint state."""
        return JointState(self.names, self.values[row], int(self.stamps[row]))


@dataclass(frozen=True)
class Feed:
    """A topic whose messages may name different joints: several publishers, or objects that come and go.

    Attributes:
        tables: One per set of names, the one with the most messages first.
    """

    tables: tuple[Table, ...]

    @property
    def main(self) -> Table:
        """The table with the most messages."""
        return self.tables[0]

    def newest(self, time: int) -> JointState | None:
        """The newest message at ``time``, as the live node would have it; None before the first."""
        rows = [
            (int(table.times[row]), index, row)
            for index, table in enumerate(self.tables)
            if (row := table.newest(time)) >= 0
        ]
        if not rows:
            return None
        _, index, row = max(rows)
        return self.tables[index].joint_state(row)

    def from_stamp(self, stamp: int) -> JointState | None:
        """The first message whose header is at least as new as ``stamp`` (lockstep); None where there is none."""
        found = None
        for table in self.tables:
            row = int(np.searchsorted(table.stamps, stamp))
            if row < len(table.stamps) and (found is None or table.stamps[row] < found.stamp):
                found = table.joint_state(row)
        return found

    def nearest_stamp(self, stamp: int, now: int, tolerance: int) -> JointState | None:
        """The message whose header is nearest to ``stamp``, of those that had come at ``now``; None if too far."""
        best = None
        for table in self.tables:
            come = table.newest(now) + 1
            after = int(np.searchsorted(table.stamps[:come], stamp))
            for row in (after - 1, after):
                if 0 <= row < come and (
                    best is None or abs(int(table.stamps[row]) - stamp) < abs(best.stamp - stamp)
                ):
                    best = table.joint_state(row)
        return best if best is not None and abs(best.stamp - stamp) <= tolerance else None


def merged(feed: Feed, needed: Collection[str], timeout: float) -> Feed:
    """Joint states of several publishers put together as the live node does (``control.joints``).

    Args:
        feed: As recorded.
        needed: Joints without which a state is of no use (the arm's); empty gives ``feed`` back.
        timeout: Seconds for which what was said of a joint counts (``timeouts.joint_state``).

    Returns:
        One row per message that told something new; ``feed`` itself where one publisher tells of all joints, and
        where the needed ones never come together, so that whoever asks for them says which are missing.
    """
    if not needed or (len(feed.tables) == 1 and set(needed) <= set(feed.main.names)):
        return feed
    states, whole = JointStates(needed), _Topic()
    rows = ((int(time), table, row) for table in feed.tables for row, time in enumerate(table.times))
    for time, table, row in sorted(rows, key=lambda item: item[0]):
        found = states.add(table.joint_state(row), int(table.stamps[row]), time, timeout)
        if found is not None and set(needed) <= set(found.joints.names):
            whole.add(time, found.joints.stamp, found.joints.names, found.joints.positions.tolist())
    return whole.feed() or feed


@dataclass(frozen=True)
class Recording:
    """What a bag says besides pictures.

    Attributes:
        joints: Measured joint states, or None.
        truth: Recorded commands or actions, or None.
        instructions: (time, text), ascending; only changes.
        state: Further feeds by name.
        skipped: What was left out of these topics, and how often.
    """

    joints: Feed | None
    truth: Feed | None
    instructions: tuple[tuple[int, str], ...] = ()
    state: dict[str, Feed] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def instruction(self, time: int, default: str = "") -> str:
        """What was to be done at ``time``; the first one also counts for the time before it was recorded."""
        if not self.instructions:
            return default
        at = bisect.bisect_right(self.instructions, time, key=lambda item: item[0]) - 1
        return self.instructions[max(at, 0)][1]


class _Rows:
    """Collects the rows of one set of names in flat arrays: a fifth of the memory of message objects."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.times, self.stamps, self.values = array("q"), array("q"), array("d")

    def table(self) -> Table:
        times = np.array(self.times, np.int64)
        order = np.argsort(times, kind="stable")
        values = np.array(self.values).reshape(len(times), len(self.names))
        return Table(self.names, times[order], np.array(self.stamps, np.int64)[order], values[order])


class _Topic:
    """Collects the messages of one topic."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, ...], _Rows] = {}

    def add(self, time: int, stamp: int, names: tuple[str, ...], values: Sequence[float]) -> bool:
        """False for a message that cannot be used: no names, or not one number for each."""
        if not names or len(values) != len(names):
            return False
        rows = self._rows.setdefault(names, _Rows(names))
        rows.times.append(time)
        rows.stamps.append(stamp)
        rows.values.extend(values)
        return True

    def feed(self) -> Feed | None:
        tables = sorted((rows.table() for rows in self._rows.values()), key=lambda table: -len(table.times))
        return Feed(tuple(tables)) if tables else None


def read(bag: Bag, selection: Selection, needed: Collection[str] = (), timeout: float = 1.0) -> Recording:
    """Read every small topic of ``selection`` once; images are not touched.

    Args:
        bag: Open.
        selection: Which topic is what.
        needed: Joints of the arm; those of several publishers are put together (:func:`merged`).
        timeout: See :func:`merged`.
    """
    types = bag.topics
    roles = {"joints": selection.joint_states, "truth": selection.truth}
    roles |= {f"state/{key}": topic for key, topic in selection.state}
    rows = {role: _Topic() for role, topic in roles.items() if topic}
    skipped: Counter[str] = Counter()
    instructions: list[tuple[int, str]] = []
    wanted = {topic for topic in (*roles.values(), selection.instruction) if topic}
    store = message_types()
    classes = {topic: store.message(types[topic]) for topic in wanted}
    for record in bag.records(wanted, verify=False):
        kind = types[record.topic]
        try:
            message = store.deserialize(record.data, classes[record.topic])
        except VlaRosError:
            skipped[f"{record.topic}: damaged message"] += 1
            continue
        if kind == TEXT:
            if not instructions or instructions[-1][1] != message.data:
                instructions.append((record.time, message.data))
            continue
        for role, topic in roles.items():
            if topic != record.topic:
                continue
            stamp, names, values = _columns(message, kind)
            if role == "joints" or role.startswith("state/"):
                stamp = stamp or record.time  # measured when it came, as for the live node
            if not rows[role].add(record.time, stamp, names, values):
                skipped[f"{record.topic}: without a number for every name"] += 1
    tables = {role: collected.feed() for role, collected in rows.items()}
    feeds = {
        role.removeprefix("state/"): table for role, table in tables.items() if role.startswith("state/") and table
    }
    joints = tables.get("joints")
    joints = merged(joints, needed, timeout) if joints is not None else None
    return Recording(joints, tables.get("truth"), tuple(instructions), feeds, skipped)


def _columns(message: Any, kind: str) -> tuple[int, tuple[str, ...], Sequence[float]]:
    """Stamp, names and numbers of a message."""
    if kind == ARRAY:
        return 0, tuple(f"[{i}]" for i in range(len(message.data))), message.data
    stamp = message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec
    if kind == JOINTS:
        return stamp, tuple(message.name), message.position
    if kind == TWIST:
        linear, angular = message.twist.linear, message.twist.angular
        values = (linear.x, linear.y, linear.z, angular.x, angular.y, angular.z)
        return stamp, ("vx", "vy", "vz", "wx", "wy", "wz"), values
    assert kind == TRAJECTORY
    point = message.points[0].positions if message.points else ()
    return stamp, tuple(message.joint_names), point
