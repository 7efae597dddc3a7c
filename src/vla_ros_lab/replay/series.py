"""Reads the joint states, commands, actions and instructions of a bag into arrays."""

import bisect
import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_ros.contract.binding import read_state_message
from vla_ros.control.inputs import JOINT_STATES_KEPT, Snapshot
from vla_ros.control.joints import JointStateMerger
from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.types import FloatArray, IntArray, JointState
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.storage import BagError
from vla_ros_lab.replay.topics import ARRAY, JOINTS, TEXT, TRAJECTORY, TWIST, TopicSelection


@dataclass(frozen=True)
class Table:
    """Named values over time, one row per message."""

    names: tuple[str, ...]  # one per column
    times: IntArray  # int64 [N], nanoseconds at which the recorder received each message, ascending
    stamps: IntArray  # int64 [N], header stamps in nanoseconds; 0 without a header
    values: FloatArray  # float64 [N, C]
    # Float64 [N, C]; no rows if the publisher does not set them.
    velocities: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    efforts: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))

    def newest(self, time: int) -> int:
        """Return the row of the newest message at or before ``time`` (ns); -1 if there is none."""
        return int(np.searchsorted(self.times, time, side="right")) - 1

    def joint_state(self, row: int) -> JointState:
        velocities, efforts = (each[row] if len(each) else np.zeros(0) for each in (self.velocities, self.efforts))
        return JointState(self.names, self.values[row], int(self.stamps[row]), velocities, efforts)


@dataclass(frozen=True)
class TopicSeries:
    """A topic whose messages may name different joints, because of several publishers or changing objects."""

    tables: tuple[Table, ...]  # one per set of names, the one with the most messages first

    @property
    def main(self) -> Table:
        return self.tables[0]

    def newest(self, time: int) -> JointState | None:
        """Return the newest message at ``time``, as in the live node; None before the first message."""
        rows = [(table, table.newest(time)) for table in reversed(self.tables)]
        candidates = [(int(table.times[row]), table, row) for table, row in rows if row >= 0]
        if not candidates:
            return None
        _, table, row = max(candidates, key=lambda item: item[0])
        return table.joint_state(row)

    def age(self, time: int) -> int:
        """Return the age of the newest message at ``time`` in nanoseconds; ``time`` without a message."""
        received = [int(table.times[row]) for table in self.tables if (row := table.newest(time)) >= 0]
        return time - max(received, default=0)

    def nearest_stamp(self, stamp: int, now: int, tolerance: int) -> JointState | None:
        """Return the message received by ``now`` whose header stamp is nearest to ``stamp``, as in the live node.

        Stamps may be in another order. Returns None if they differ by more than ``tolerance`` nanoseconds.
        """
        near = []
        for table in self.tables:
            first, end = max(0, table.newest(now) + 1 - JOINT_STATES_KEPT), table.newest(now) + 1
            if end:
                near.append(table.joint_state(first + int(np.abs(table.stamps[first:end] - stamp).argmin())))
        best = min(near, key=lambda state: abs(state.stamp - stamp), default=None)
        return best if best is not None and abs(best.stamp - stamp) <= tolerance else None


def merged(series: TopicSeries, needed: Collection[str], timeout: float) -> TopicSeries:
    """Merge joint states of several publishers as the live node does (``control.joints``).

    Returns ``series`` itself if one publisher has all ``needed`` joints, or if these joints never arrive within
    ``timeout`` seconds of each other; a later error then names the missing joints.
    """
    if not needed or (len(series.tables) == 1 and set(needed) <= set(series.main.names)):
        return series
    states, whole = JointStateMerger(needed), _Collector()
    rows = ((int(time), table, row) for table in series.tables for row, time in enumerate(table.times))
    for time, table, row in sorted(rows, key=lambda item: item[0]):
        state = states.add(table.joint_state(row), int(table.stamps[row]), time, timeout)
        if state is not None and set(needed) <= set(state.joints.names):
            joints = state.joints
            numbers = (joints.positions.tolist(), joints.velocities.tolist(), joints.efforts.tolist())
            whole.add(time, joints.stamp, joints.names, *numbers)
    return whole.series() or series


@dataclass(frozen=True)
class Recording:
    """The content of a bag, except for images."""

    joints: TopicSeries | None  # measured joint states, or None
    truth: TopicSeries | None  # recorded commands or actions, or None
    instructions: tuple[tuple[int, str], ...] = ()  # (time, text) of each change, ascending
    state: dict[str, TopicSeries] = field(default_factory=dict)  # further state topics by key
    skipped: Counter[str] = field(default_factory=Counter)  # what was left out, and how often
    remarks: tuple[str, ...] = ()  # what was decided between two readings

    def inputs(self, time: int, instruction: str) -> Snapshot:
        """Return the newest inputs at ``time``, when a frame arrived."""
        state = {key: newest for key, series in self.state.items() if (newest := series.newest(time))}
        return Snapshot(self.joints.newest(time) if self.joints else None, state, instruction)

    def instruction(self, time: int, default: str = "") -> str:
        """Return the instruction at ``time``; the first instruction also applies earlier."""
        if not self.instructions:
            return default
        at = bisect.bisect_right(self.instructions, time, key=lambda item: item[0]) - 1
        return self.instructions[max(at, 0)][1]


def other_instruction(configured: str, recorded: str) -> str:
    """Say that another instruction was recorded than the one configured."""
    found = f"policy.instruction is {configured!r}, but {recorded} was recorded, which was used"
    return f"{found}; --instruction replaces it"


class _Collector:
    """Collects messages in flat arrays, which need a fifth of the memory of message objects."""

    def __init__(self) -> None:
        # Key: names, has velocities, has efforts. Value: times, stamps, positions, velocities, efforts.
        self._columns: dict[tuple[tuple[str, ...], bool, bool], tuple[array[Any], ...]] = {}

    def add(
        self, time: int, stamp: int, names: tuple[str, ...], values: Sequence[float], *others: Sequence[float]
    ) -> bool:
        """Add a message; return False unless it has one value per name.

        ``others`` are velocities and efforts, which are dropped unless there is one per name.
        """
        if not names or len(values) != len(names):
            return False
        more = [each if len(each) == len(names) else () for each in (*others, (), ())[:2]]
        key = names, len(more[0]) > 0, len(more[1]) > 0
        columns = self._columns.setdefault(key, tuple(map(array, "qqddd")))
        for column, numbers in zip(columns, ([time], [stamp], values, *more), strict=True):
            column.extend(numbers)
        return True

    def series(self) -> TopicSeries | None:
        tables = []
        for (names, *_), (received, stamps, *numbers) in self._columns.items():
            times = np.array(received, np.int64)
            order = np.argsort(times, kind="stable")
            rows = [np.array(each).reshape(-1, len(names)) for each in numbers]
            columns = [each[order] if len(each) else each for each in rows]
            tables.append(Table(names, times[order], np.array(stamps, np.int64)[order], *columns))
        return TopicSeries(tuple(sorted(tables, key=lambda table: -len(table.times)))) if tables else None


def read_recording(
    bag: Bag, selection: TopicSelection, needed: Collection[str] = (), timeout: float = 1.0
) -> Recording:
    """Read all topics of ``selection`` except cameras.

    Joint states are :func:`merged` for the joints ``needed``.
    """
    several = next((topics for topics in (selection.joint_states, selection.truth) if len(topics) > 1), ())
    if several and len(set(needed)) < len(needed):
        found = f"the arms' joints on {' and '.join(several)} have the same names"
        raise BagError(f"{found}; a recording can be read only if each joint has a unique name")
    roles = {"joints": selection.joint_states, "truth": selection.truth}
    roles |= {f"state/{key}": (topic,) for key, topic in selection.state}
    collected = {role: _Collector() for role, topics in roles.items() if topics}
    skipped: Counter[str] = Counter()
    texts: dict[str, list[tuple[int, str]]] = {}  # topic to time and instruction of each change
    types = bag.topics
    spoken = (selection.instruction,) if selection.instruction else ()
    topics = {
        topic for topics in (*roles.values(), spoken, selection.instruction_reports) for topic in topics if topic
    }
    for time, topic, message in messages(bag, topics, skipped):
        if types[topic] == TEXT:
            text = message.data if topic in spoken else _told(message.data)
            known = texts.setdefault(topic, [])
            if text and (not known or known[-1][1] != text):
                known.append((time, text))
            continue
        stamp, names, *numbers = _columns(message, types[topic])
        for role, rows in collected.items():
            if topic in roles[role]:
                # As in the live node, a joint state without a stamp counts as measured when it was received.
                when = stamp if role == "truth" else stamp or time
                if not rows.add(time, when, names, *numbers):
                    skipped[f"{topic}: without a number for every name"] += 1
    topics_by_role = {role: series for role, rows in collected.items() if (series := rows.series())}
    joints, truth = topics_by_role.pop("joints", None), topics_by_role.pop("truth", None)
    joints = merged(joints, needed, timeout) if joints is not None else None
    state = {role.removeprefix("state/"): series for role, series in topics_by_role.items()}
    # The node's events tell at once what is in force; its status tells it once a second.
    event, status = selection.instruction_reports
    order = [name for name in (event, *spoken, status) if texts.get(name)]
    instructions, *others = [texts[name] for name in order] or [[]]
    remarks = [
        f"{named} says {text!r}, {order[0]} does not: what {order[0]} says was used"
        for named, other in zip(order[1:], others, strict=True)
        for text in dict.fromkeys(text for _, text in other if text not in {each for _, each in instructions})
    ]
    return Recording(joints, truth, tuple(instructions), state, skipped, tuple(remarks))


def _told(content: str) -> str:
    """Return the instruction in an event or status of the node; "" if there is none."""
    try:
        return str(json.loads(content)["instruction"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def messages(bag: Bag, topics: Collection[str], skipped: Counter[str]) -> Iterator[tuple[int, str, Any]]:
    """Yield receive time, topic and message; damaged messages are counted in ``skipped``."""
    store, types = message_types(), bag.topics
    classes = {topic: store.message(types[topic]) for topic in topics}
    for record in bag.records(topics):
        try:
            message = store.deserialize(record.data, classes[record.topic])
        except VlaRosError:
            skipped[f"{record.topic}: damaged message"] += 1
            continue
        yield record.time, record.topic, message


def _columns(message: Any, kind: str) -> tuple[Any, ...]:
    if kind == ARRAY:
        return 0, tuple(f"[{i}]" for i in range(len(message.data))), message.data
    stamp = message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec
    if kind == JOINTS:
        return stamp, tuple(message.name), message.position, message.velocity, message.effort
    if kind == TWIST:
        linear, angular = message.twist.linear, message.twist.angular
        values = (linear.x, linear.y, linear.z, angular.x, angular.y, angular.z)
        return stamp, ("vx", "vy", "vz", "wx", "wy", "wz"), values
    if kind == TRAJECTORY:
        point = message.points[0].positions if message.points else ()
        return stamp, tuple(message.joint_names), point
    series = read_state_message(message)
    return stamp, series.names, series.positions.tolist()
