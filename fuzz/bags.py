"""Compares replay and export with the libraries mcap and rosbags, on generated bags: ``python fuzz/bags.py``.

Each bag has images, joint states, commands and actions that know their number. They are written in another order or
with ties, bursts, zeros or late messages, into one file or several that overlap, and damaged. All messages that
the libraries read must be read, in their order; each frame must get the joint state and the action, and each frame
of the data set the image, state and command, that the rules of docs/replay.md and docs/export.md name. A plain
implementation of these rules, which uses nothing of the package, says what is right.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as parquet
import yaml
from mcap.reader import make_reader
from mcap.writer import CompressionType, Writer
from rosbags.rosbag2 import Reader

from vla_ros.cli.main import main as vla_ros
from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec, StateFeature
from vla_ros.graph.messages import message_types
from vla_ros.policies import Policy
from vla_ros.types import ActionChunk
from vla_ros.vision.messages import encode_image
from vla_ros_lab.replay import evaluate
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.play import ReplayOptions

START, PERIOD, LATENCY = 1_790_002_000_000_000_000, 100_000_000, 4_000_000
CAMERA, JOINTS, COMMAND, ACTION = "/camera/image_raw", "/joint_states", "/arm/joint_command", "/vla_policy/action"
INSTRUCTION = "/vla_policy/instruction"
TYPES = {
    CAMERA: "sensor_msgs/msg/Image",
    JOINTS: "sensor_msgs/msg/JointState",
    COMMAND: "sensor_msgs/msg/JointState",
    ACTION: "std_msgs/msg/Float64MultiArray",
    INSTRUCTION: "std_msgs/msg/String",
}
STORAGES = ("mcap", "mcap zstd", "mcap lz4", "mcap without chunks", "sqlite3")
TIMES = ("regular", "jitter", "ties", "zeros", "bursts", "outlier", "late")
SPLITS = ("one file", "by time", "by topic", "overlap")
ORDERS = ("in order", "shuffled")
DAMAGES = ("none", "none", "images", "cut", "zeros at the end", "flipped byte", "empty file")
METADATA = ("right", "missing", "wrong counts", "other order", "broken")
HOME = (0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0)
_STEP = 0.002  # rad of joint 7 from message to message
_LEVEL = 8  # grey levels from image to image
_TIMEOUT, _TOLERANCE, _GAP = 500_000_000, 200_000_000, 2_000_000_000
_OLD = 1_000_000_000  # timeouts.joint_state_age
_Message = tuple[int, str, bytes]  # receive time, topic, CDR


@dataclass(frozen=True)
class Plan:
    """What a bag is like."""

    storage: str
    times: str
    split: str
    order: str
    damage: str
    metadata: str
    duplicates: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> "Plan":
        kinds = map(rng.choice, (STORAGES, TIMES, SPLITS, ORDERS, DAMAGES, METADATA))
        return cls(*kinds, duplicates=rng.random() < 0.2)


@dataclass(frozen=True)
class Meaning:
    """The number of a message among those of its topic, its stamp, and whether its image is damaged."""

    number: int
    stamp: int
    damaged: bool = False


class Generated:
    """A bag: its folder, what was written to each file, and what each message means."""

    def __init__(self, folder: Path, plan: Plan, rng: random.Random) -> None:
        self.folder, self.plan = folder, plan
        self.meanings: dict[bytes, Meaning] = {}
        self._make_messages(rng)
        self.files = self._split(rng)
        if plan.order == "shuffled":
            for messages in self.files:
                rng.shuffle(messages)
        if plan.duplicates:
            for messages in self.files:
                messages[:] = [one for each in messages for one in [each] * (1 + (rng.random() < 0.1))]
        folder.mkdir()
        self.paths = [self._write(index, messages) for index, messages in enumerate(self.files)]
        self._describe(rng)
        self._damage(rng)

    def _make_messages(self, rng: random.Random) -> None:
        types, count = message_types("jazzy"), rng.randrange(8, 25)
        message = {topic: types.message(kind) for topic, kind in TYPES.items()}
        found: list[tuple[int, str, int, Any]] = [(START, INSTRUCTION, 0, message[INSTRUCTION](data="push"))]
        for step in range(5 * count):
            stamp = START + step * PERIOD // 5
            sec, nanosec = divmod(stamp, 10**9)
            header = types.message("std_msgs/msg/Header")(
                stamp=types.message("builtin_interfaces/msg/Time")(sec=sec, nanosec=nanosec), frame_id=""
            )
            for topic, ahead in ((JOINTS, 0), (COMMAND, 1)):
                positions = np.array([*HOME[:6], _STEP * (step + ahead)])
                names = [f"joint_{number}" for number in range(1, 8)]
                found.append((stamp, topic, step, message[topic](header=header, name=names, position=positions)))
            if step % 5 == 0:
                number = step // 5
                found.append((stamp, CAMERA, number, None))
                found.append(
                    (stamp + 1, ACTION, number, message[ACTION](data=np.array([1e-3 * number] + [0.0] * 6)))
                )
        bad = set(rng.sample(range(count), count // 4)) if self.plan.damage == "images" else set()
        self.written: list[_Message] = []
        for stamp, topic, number, content in found:
            damaged = topic == CAMERA and number in bad
            if topic == CAMERA:
                data = encode_image(np.full((16, 16, 3), _LEVEL * number + 8, np.uint8), stamp, "cam")
                data = data[:-40] if damaged else data
            else:
                data = bytes(types.serialize(content))
            self.meanings[data] = Meaning(number, stamp, damaged)
            self.written.append((self._received(stamp, topic, rng), topic, data))

    def _received(self, stamp: int, topic: str, rng: random.Random) -> int:
        kind, time = self.plan.times, stamp + LATENCY
        if kind == "zeros":
            return 0
        if kind == "ties":
            return time // (PERIOD * 5 // 2) * (PERIOD * 5 // 2)
        if kind == "bursts" and topic == CAMERA:
            step = (stamp - START) // PERIOD
            return START + (step // 3 * 3 + 2) * PERIOD + LATENCY + step % 3 * 1_000_000
        if kind == "jitter":
            return time + rng.randrange(20_000_000)
        if kind == "outlier" and rng.random() < 0.02:
            return rng.choice((0, time + 3_600_000_000_000))
        if kind == "late" and rng.random() < 0.1:
            return time + rng.randrange(3 * PERIOD)
        return time

    def _split(self, rng: random.Random) -> list[list[_Message]]:
        ordered = sorted(self.written, key=lambda one: one[0])
        if self.plan.split == "one file":
            return [ordered]
        count = rng.randrange(2, 4)
        files: list[list[_Message]] = [[] for _ in range(count)]
        for index, one in enumerate(ordered):
            if self.plan.split == "by topic":
                at = list(TYPES).index(one[1]) % count
            else:
                at = min(index * count // len(ordered), count - 1)
                if self.plan.split == "overlap" and rng.random() < 0.1:
                    at = rng.randrange(count)
            files[at].append(one)
        return [messages for messages in files if messages]

    def _write(self, index: int, messages: Sequence[_Message]) -> Path:
        if self.plan.storage == "sqlite3":
            return self._write_sqlite(self.folder / f"bag_{index}.db3", messages)
        path = self.folder / f"bag_{index}.mcap"
        compression = {"mcap zstd": CompressionType.ZSTD, "mcap lz4": CompressionType.LZ4}.get(
            self.plan.storage, CompressionType.NONE
        )
        chunked = self.plan.storage != "mcap without chunks"
        with path.open("wb") as file:
            writer = Writer(file, chunk_size=8000, compression=compression, use_chunking=chunked)
            writer.start("ros2", "generated")
            channels = {}
            for topic, kind in TYPES.items():
                if any(one[1] == topic for one in messages):
                    schema = writer.register_schema(kind, "ros2msg", message_types("jazzy").text(kind).encode())
                    channels[topic] = writer.register_channel(topic, "cdr", schema)
            for time, topic, data in messages:
                writer.add_message(channels[topic], time, data, time)
            writer.finish()
        return path

    def _write_sqlite(self, path: Path, messages: Sequence[_Message]) -> Path:
        database = sqlite3.connect(path)
        database.executescript(
            "CREATE TABLE topics(id INTEGER PRIMARY KEY, name TEXT NOT NULL, type TEXT NOT NULL,"
            " serialization_format TEXT NOT NULL, offered_qos_profiles TEXT NOT NULL);"
            "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER NOT NULL, timestamp INTEGER NOT NULL,"
            " data BLOB NOT NULL); CREATE INDEX timestamp_idx ON messages (timestamp ASC);"
        )
        topics = {topic: number for number, topic in enumerate(TYPES, start=1)}
        rows = [(number, topic, TYPES[topic], "cdr", "") for topic, number in topics.items()]
        database.executemany("INSERT INTO topics VALUES(?, ?, ?, ?, ?)", rows)
        rows_of_messages = [(topics[topic], time, data) for time, topic, data in messages]
        database.executemany("INSERT INTO messages(topic_id, timestamp, data) VALUES(?, ?, ?)", rows_of_messages)
        database.commit()
        database.close()
        return path

    def _describe(self, rng: random.Random) -> None:
        kind = self.plan.metadata
        counts = Counter(topic for messages in self.files for _, topic, _ in messages)
        times = [time for messages in self.files for time, _, _ in messages]
        names = [path.name for path in self.paths]
        if kind == "wrong counts":
            counts = Counter({topic: rng.randrange(2) * 7 for topic in TYPES})
        if kind == "other order":
            names.reverse()
            self.files.reverse()
            self.paths.reverse()
        topics = [
            {
                "topic_metadata": {
                    "name": topic,
                    "type": type_,
                    "serialization_format": "cdr",
                    "offered_qos_profiles": "",
                },
                "message_count": counts[topic],
            }
            for topic, type_ in TYPES.items()
        ]
        information = {
            "version": 5,
            "storage_identifier": self.plan.storage.split()[0],
            "duration": {"nanoseconds": max(times) - min(times)},
            "starting_time": {"nanoseconds_since_epoch": min(times)},
            "message_count": sum(counts.values()),
            "topics_with_message_count": topics,
            "compression_format": "",
            "compression_mode": "",
            "relative_file_paths": names,
        }
        text = yaml.safe_dump({"rosbag2_bagfile_information": information})
        if kind != "missing":
            (self.folder / "metadata.yaml").write_text(text[: len(text) // 2] + "}{" if kind == "broken" else text)

    def _damage(self, rng: random.Random) -> None:
        path = rng.choice(self.paths)
        data, kind = bytearray(path.read_bytes()), self.plan.damage
        if kind == "cut":
            data = data[: rng.randrange(len(data) // 2, len(data) - 1)]
        elif kind == "zeros at the end" and self.plan.storage != "sqlite3":
            data = data[: rng.randrange(len(data) // 2, len(data) - 1)] + bytes(1_000_000)
        elif kind == "flipped byte" and self.plan.storage in STORAGES[:3]:  # the others have no checksums
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "empty file":
            (self.folder / f"empty{path.suffix}").write_bytes(b"")
        path.write_bytes(data)

    @property
    def is_whole(self) -> bool:
        plan = self.plan
        sound = plan.damage in ("none", "images", "empty file")
        return sound or (plan.storage == "sqlite3" and plan.damage != "cut")

    def merged(self) -> list[_Message]:
        return sorted((one for messages in self.files for one in messages), key=lambda one: one[0])


class _Watcher(Policy):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.spec = PolicySpec(state=(StateFeature("joints", parse_components("arm.joint_position")),))
        self.asked: list[tuple[int, int]] = []

    def infer(self, session: Any, observation: Any) -> ActionChunk:
        level, joint = observation.images["image"].mean(), observation.state["joints"][6]
        self.asked.append((round((float(level) - 8) / _LEVEL), round(float(joint) / _STEP)))
        return ActionChunk(np.zeros((1, 7)), observation.stamp)


def check(bag: Generated, say: Callable[[str], None], compared: Counter[str]) -> list[str]:
    """Return what is wrong.

    ``say`` is told where a library differs without anything being wrong; ``compared`` counts messages and frames.
    """
    with Bag(bag.folder) as opened:
        records = [(one.time, one.topic, bytes(one.data)) for one in opened.records(list(opened.topics))]
        losses = opened.losses
    problems = [f"read: {text}" for text in _check_messages(bag, records, losses)]
    if any(one[2] not in bag.meanings for one in records):
        if bag.plan.storage != "sqlite3":
            return problems
        say("SQLite has no checksums: messages at the end of a cut file have zeros")
        return []
    compared["messages"] += len(records)
    problems += [f"mcap: {text}" for text in _check_mcap(bag, records, say)]
    problems += [f"rosbags: {text}" for text in _check_rosbags(bag, records, say)]
    problems += [f"replay: {text}" for text in _check_replay(bag, records, say, compared)]
    for clock in ("received", "stamp"):
        problems += [
            f"export --clock {clock}: {text}" for text in _check_export(bag, records, clock, say, compared)
        ]
    return problems


def _check_messages(bag: Generated, records: Sequence[_Message], losses: Sequence[object]) -> list[str]:
    expected = bag.merged()
    if [one[0] for one in records] != sorted(one[0] for one in records):
        return ["not in order of time"]
    if bag.is_whole:
        return (
            [] if records == expected else [f"{len(records)} messages are not the {len(expected)} in their order"]
        )
    if unknown := Counter(records) - Counter(expected):
        return [f"{unknown.total()} messages that were never written"]
    return ["messages are lost in silence"] if len(records) < len(expected) and not losses else []


def _check_mcap(bag: Generated, records: Sequence[_Message], say: Callable[[str], None]) -> list[str]:
    found: list[_Message] = []
    for path in bag.paths:
        if path.suffix != ".mcap":
            return []
        one: list[_Message] = []
        try:
            with path.open("rb") as file:
                for _, channel, message in make_reader(file, validate_crcs=True).iter_messages(log_time_order=True):
                    one.append((message.log_time, channel.topic, message.data))
        except Exception as error:  # whatever the library raises, it reads no further
            say(f"mcap ends with {type(error).__name__}: damage {bag.plan.damage}")
        found += one
    return _compared(sorted(found, key=lambda one: one[0]), records, "mcap", bag, say)


def _check_rosbags(bag: Generated, records: Sequence[_Message], say: Callable[[str], None]) -> list[str]:
    found: list[_Message] = []
    try:
        with Reader(bag.folder) as reader:
            for connection, time, data in reader.messages():
                found.append((time, connection.topic, bytes(data)))
    except Exception as error:  # as above
        text = str(error).replace(str(bag.folder), "BAG").split(":")[0][:60]
        say(f"rosbags refuses with {type(error).__name__}: {text}")
    return _compared(found, records, "rosbags", bag, say)


def _compared(
    found: Sequence[_Message], records: Sequence[_Message], name: str, bag: Generated, say: Callable[[str], None]
) -> list[str]:
    true = Counter(bag.merged())
    if missing := (Counter(found) & true) - Counter(records):
        return [f"reads {missing.total()} messages more"]
    if found and list(found) != list(records) and Counter(found) == Counter(records):
        sorted_too = [one[0] for one in found] == [one[0] for one in records]
        say(f"{name} has another order of {'equal times' if sorted_too else 'times'}: {bag.plan.split}")
    return []


def _newest(messages: Sequence[tuple[int, Meaning]], time: int) -> tuple[int, Meaning] | None:
    return max((one for one in messages if one[0] <= time), key=lambda one: one[0], default=None)


def _series(bag: Generated, records: Sequence[_Message], topic: str, *, stamped: bool) -> list[tuple[int, Meaning]]:
    """Times and meanings, the newest of one time first, so that ``max`` takes it."""
    rows = [(time, bag.meanings[data]) for time, name, data in records if name == topic]
    if stamped:
        rows = sorted(((meaning.stamp, meaning) for _, meaning in rows), key=lambda one: one[0])
    return rows[::-1]


def _check_replay(
    bag: Generated, records: Sequence[_Message], say: Callable[[str], None], compared: Counter[str]
) -> list[str]:
    frames, joints, actions = (_series(bag, records, topic, stamped=False) for topic in (CAMERA, JOINTS, ACTION))
    policy = _Watcher()
    policy.load()
    config = build({"robot.urdf": "demo", "robot.tip_frame": "tool", "control.rate_hz": 10.0})
    outcome = evaluate.play(
        evaluate.BagJob(bag.folder, config, ReplayOptions(instruction="push"), None), lambda: policy
    )
    if outcome.samples is None:
        constant = len({time for time, _ in joints}) == 1 and "receive time" in outcome.problem
        nothing = not frames and "no sensor_msgs/Image" in outcome.problem
        if constant or nothing:
            say(f"replay refuses: {'one receive time' if constant else 'no images'}")
            return []
        return [f"refuses: {outcome.problem}"]
    expected, kept = [], []
    for time, meaning in reversed(frames):
        joint = _newest(joints, time)
        if joint is not None and meaning.stamp - joint[1].stamp <= _OLD and not meaning.damaged:
            expected.append((meaning.number, joint[1].number))
            kept.append(time)
    if policy.asked != expected:
        wrong = sum(a != b for a, b in zip(policy.asked, expected, strict=False))
        return [f"{len(policy.asked)} frames, expected {len(expected)}; {wrong} have another image or joint state"]
    paired = []
    for time, following in zip(kept, [*kept[1:], 2**63], strict=bool(kept)):
        after = [one for one in reversed(actions) if one[0] >= time]
        first = min(after, key=lambda one: one[0], default=None)
        near = first is not None and first[0] < following and first[0] - time <= _TOLERANCE
        paired.append(first[1].number if near and first else -1)
    recorded = outcome.samples.recorded[:, 0]
    compared["frames of replay"] += len(expected)
    compared["frames with an action"] += sum(number >= 0 for number in paired)
    actual = [-1 if np.isnan(value) else round(float(value) / 1e-3) for value in recorded]
    return [] if actual == paired else ["frames are paired with other actions"]


def _check_export(
    bag: Generated, records: Sequence[_Message], clock: str, say: Callable[[str], None], compared: Counter[str]
) -> list[str]:
    stamped = clock == "stamp"
    images, joints, commands = (
        _series(bag, records, topic, stamped=stamped) for topic in (CAMERA, JOINTS, COMMAND)
    )
    if stamped:  # the header of a cut image may still have its stamp
        images = [one for one in images if one[0]]
    times = [time for time, _ in reversed(images)]
    expected: list[tuple[int, int, int]] = []
    edges = [0, *(i for i in range(1, len(times)) if times[i] - times[i - 1] > _GAP), len(times)]
    for begin, end in pairwise(edges):
        if end - begin < 1 or times[begin] == times[end - 1]:
            continue
        run: list[tuple[int, int, int]] = []
        ticks = range(times[begin], times[end - 1] + 1, PERIOD)
        for tick in [*ticks, None]:
            row = None if tick is None else _row(images, joints, commands, tick)
            if row is not None:
                run.append(row)
                continue
            expected += run if len(run) > 1 else []
            run = []
    output = bag.folder.with_name(f"{bag.folder.name}_{clock}")
    words = ["export", str(bag.folder), "--output", str(output), "--clock", clock, "--fps", "10"]
    words += ["--instruction", "push", "-p", "robot.urdf:=demo", "-p", "robot.tip_frame:=tool"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = vla_ros(words)
    if status:
        constant = len(set(times)) == 1 and len(times) > 1 and "receive time" in said.getvalue()
        if expected and not constant:
            return [f"refuses: {said.getvalue()[-300:]}"]
        say(f"export refuses: {'one receive time' if constant else 'no two frames in a row'}")
        return []
    found = _exported(output)
    compared["frames of export"] += len(expected)
    shutil.rmtree(output)
    if found == expected:
        return []
    wrong = sum(a != b for a, b in zip(found, expected, strict=False))
    return [f"{len(found)} frames, expected {len(expected)}; {wrong} have another image, state or action"]


def _row(
    images: Sequence[tuple[int, Meaning]],
    joints: Sequence[tuple[int, Meaning]],
    commands: Sequence[tuple[int, Meaning]],
    tick: int,
) -> tuple[int, int, int] | None:
    image, joint, command = _newest(images, tick), _newest(joints, tick), _newest(commands, tick + PERIOD - 1)
    if image is None or joint is None or command is None or image[1].damaged:
        return None
    if tick - image[0] > _TIMEOUT or tick - joint[0] > _TIMEOUT:
        return None
    return image[1].number, joint[1].number, command[1].number


def _exported(folder: Path) -> list[tuple[int, int, int]]:
    rows = [row for path in sorted(folder.glob("data/*/*.parquet")) for row in parquet.read_table(path).to_pylist()]
    levels: list[float] = []
    for path in sorted(folder.glob("videos/*/*/*.mp4")):
        with av.open(str(path)) as video:
            levels += [float(frame.to_ndarray(format="rgb24").mean()) for frame in video.decode(video=0)]
    assert len(levels) == len(rows) == json.loads((folder / "meta/info.json").read_text())["total_frames"]
    return [
        (
            round((level - 8) / _LEVEL),
            round(row["observation.state"][6] / _STEP),
            round(row["action"][6] / _STEP) - 1,
        )
        for level, row in zip(levels, rows, strict=True)
    ]


def run(count: int, seed: int) -> int:
    """Check ``count`` bags and print what was found; returns the number of bags with something wrong."""
    differences: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    failed = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        plan = Plan.drawn(rng)
        drawn.update((plan.storage, plan.times, plan.split, plan.damage, f"metadata {plan.metadata}"))
        with tempfile.TemporaryDirectory(prefix="vla_ros_bags_") as folder:
            noted: set[str] = set()
            problems = check(Generated(Path(folder) / "bag", plan, rng), noted.add, compared)
            differences.update(noted)
        if problems:
            failed += 1
            print(f"bag {number}, seed {seed}: {plan}", *problems, sep="\n  ", flush=True)
    print(f"{count} bags, seed {seed}: {failed} wrong")
    print("compared:", ", ".join(f"{times} {name}" for name, times in compared.items()))
    print("drawn:", ", ".join(f"{name} {times}" for name, times in drawn.most_common()))
    for text, times in differences.most_common():
        print(f"  {times:>4} bags: {text}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of bags")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return 1 if run(given.count, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
