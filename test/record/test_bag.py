"""Bags as other readers see them: complete, cut off anywhere, and on a full disk; and what each mode chooses."""

import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'replay')")
pytest.importorskip("mcap", reason="the library mcap is not installed (extra 'replay')")

from mcap.reader import make_reader
from mcap.writer import CompressionType, Writer
from rosbags.rosbag2 import Reader
from rosbags.typesys import Stores, get_typestore

from vla_ros.cli.main import main
from vla_ros.config.record import RecordConfig
from vla_ros.graph.messages import message_types
from vla_ros.record.bag import BagWriter, repair, unfinished
from vla_ros.record.mcap import RecordError
from vla_ros.record.recorder import BagFolder
from vla_ros.record.selection import Mark, Selection
from vla_ros.record.topics import Recorded, Topic
from vla_ros_lab.replay.bag import Bag

TOPICS = [
    Topic("/camera", "sensor_msgs/msg/Image"),
    Topic("/joint_states", "sensor_msgs/msg/JointState"),
    Topic("/vla_policy/event", "std_msgs/msg/String", "event"),
]
START = 1_790_000_000_000_000_000
TYPES = message_types()


def text(words: str, time: int = START) -> Recorded:
    data = TYPES.serialize(TYPES.message("std_msgs/msg/String")(data=words))
    return Recorded(time, time - 1, "/vla_policy/event", data)


def image(number: int, size: int = 1000) -> Recorded:
    cdr = TYPES.serialize(TYPES.message("sensor_msgs/msg/Image")(height=1, width=size, data=bytes(size)))
    return Recorded(START + number * 10**8, START + number * 10**8 - 5, "/camera", cdr)


def write(path: Path, chunks: int = 5) -> list[Recorded]:
    """Write a bag of ten messages for each chunk, and leave it as a killed process does."""
    writer = BagWriter(path, TOPICS)
    written = []
    for chunk in range(chunks):
        messages = [
            *(image(10 * chunk + number) for number in range(9)),
            text(f"event {chunk}", START + chunk * 10**9),
        ]
        writer.write(messages)
        written += messages
    writer._file._file.close()
    return written


def read(path: Path) -> list[tuple[int, str, bytes]]:
    """Read a bag with mcap's reader, rosbags' and ours, which must agree."""
    with next(path.glob("*.mcap")).open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        summary = reader.get_summary()
        whole = sorted(
            (message.log_time, channel.topic, message.data) for _, channel, message in reader.iter_messages()
        )
    assert summary is not None
    assert summary.statistics is not None
    assert summary.statistics.message_count == len(whole)
    with Reader(path) as other:
        assert other.message_count == len(whole)
        assert sorted((time, one.topic, bytes(data)) for one, time, data in other.messages()) == whole
        kinds = {one.topic: (one.msgtype, one.msgcount, one.digest) for one in other.connections}
    store = get_typestore(Stores.ROS2_JAZZY)
    for topic in TOPICS:
        count = sum(name == topic.name for _, name, _ in whole)
        assert kinds[topic.name] == (topic.type, count, store.hash_rihs01(topic.type))
    with Bag(path) as own:
        assert sorted((one.time, one.topic, bytes(one.data)) for one in own.records(list(own.topics))) == whole
        assert not own.losses
    return whole


def content(messages: list[Recorded]) -> list[tuple[int, str, bytes]]:
    return sorted((message.time, message.topic, bytes(message.data)) for message in messages)


def test_a_closed_bag_is_read_by_every_reader(tmp_path: Path) -> None:
    writer = BagWriter(tmp_path / "bag", TOPICS)
    messages = [image(number) for number in range(1100)] + [text("begin")]
    writer.write(messages)
    writer.close()
    assert read(tmp_path / "bag") == content(messages)
    assert repair(tmp_path / "bag").endswith("nothing to repair")


def test_a_bag_cut_off_anywhere_keeps_every_whole_message(tmp_path: Path) -> None:
    written = write(tmp_path / "whole", 2)
    data = (tmp_path / "whole" / "whole_0.mcap").read_bytes()
    ends, at = [], 0
    for message in written:
        at = data.index(bytes(message.data), at) + len(message.data)
        ends.append(at)
    counts = []
    for number, size in enumerate(range(len(data), ends[0], -997)):
        folder = tmp_path / "cut" / f"{number}"
        folder.mkdir(parents=True)
        (folder / "a.mcap").write_bytes(data[:size])
        assert unfinished(tmp_path / "cut") == [folder]
        repair(folder)
        assert unfinished(tmp_path / "cut") == []
        whole = [message for message, end in zip(written, ends, strict=True) if end <= size]
        assert read(folder) == content(whole)
        counts.append(len(whole))
    assert counts[0] == len(written)
    assert counts[-1] <= 2


@pytest.mark.parametrize("size", [3000, 9000, 20_000])
def test_a_bag_whose_tail_became_zeros_is_repaired_at_once(tmp_path: Path, size: int) -> None:
    """A power cut may leave a file with its size but without its data; here a gigabyte, none of it stored."""
    writer = BagWriter(tmp_path / "bag", TOPICS)
    written = [text(f"event {number:04d} " + "x" * 200, START + number) for number in range(100)]
    for chunk in range(0, 100, 20):
        writer.write(written[chunk : chunk + 20])
    writer._file._file.close()
    (path,) = (tmp_path / "bag").glob("*.mcap")
    data = path.read_bytes()
    path.write_bytes(data[:size])
    os.truncate(path, 1 << 30)
    repair(tmp_path / "bag")
    found = read(tmp_path / "bag")
    whole = sum(data.index(bytes(one.data)) + len(one.data) <= size for one in written)
    assert found == content(written)[: len(found)]
    assert whole - 1 <= len(found) <= whole, "of the last one, zeros may be the end"


def test_a_cut_summary_is_written_again(tmp_path: Path) -> None:
    writer = BagWriter(tmp_path / "bag", TOPICS)
    messages = [image(number) for number in range(30)]
    writer.write(messages)
    writer.close()
    file = tmp_path / "bag" / "bag_0.mcap"
    file.write_bytes(file.read_bytes()[:-20])
    assert main(["record", "--repair", str(tmp_path / "bag")]) == 0
    assert read(tmp_path / "bag") == content(messages)


def test_a_bag_that_another_program_may_still_write_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bag").mkdir()
    file = tmp_path / "bag" / "bag_0.mcap"
    with file.open("wb") as stream:
        writer = Writer(stream, compression=CompressionType.NONE, chunk_size=100)
        writer.start("ros2", library="libmcap 1.3.0")
        schema = writer.register_schema("std_msgs/msg/String", "ros2msg", b"string data")
        channel = writer.register_channel("/words", "cdr", schema)
        for number in range(20):
            writer.add_message(channel, number, bytes(20), number)
        stream.flush()
        before = file.read_bytes()
        BagFolder(tmp_path, TOPICS, getLogger()).repair()
        with pytest.raises(RecordError, match=r"libmcap 1\.3\.0 wrote it"):
            repair(tmp_path / "bag")
        assert file.read_bytes() == before
        assert not (tmp_path / "bag" / "metadata.yaml").exists()


def test_what_cannot_be_repaired_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"found no \.mcap file"):
        repair(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.mcap").write_bytes(b"")
    with pytest.raises(RecordError, match="found 0 bytes"):
        repair(tmp_path / "a")
    writer = BagWriter(tmp_path / "b", TOPICS)
    with pytest.raises(RecordError, match="another process is recording it"):
        repair(tmp_path / "b")
    writer.close()


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """A disk on which no file can grow beyond ``size`` bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_bag_with_a_reason_and_the_next_one_is_tried(tmp_path: Path) -> None:
    bags = BagFolder(tmp_path, TOPICS, getLogger("test"))
    with disk_of(100_000):
        bags.write([image(number) for number in range(20)])
        assert not bags.error
        bags.write([image(number, 50_000) for number in range(20, 30)])
        assert "recording has stopped: File too large" in bags.error
        bags.write([image(30)])
        assert (bags.messages, bags.lost) == (20, 11)
    first = Path(bags.path)
    assert len(read(first)) == 20
    bags.write([Mark.CLOSE, image(31), Mark.CLOSE])
    assert not bags.error
    assert Path(bags.path) != first
    assert len(read(Path(bags.path))) == 1


def test_a_discarded_bag_is_removed_and_texts_alone_begin_none(tmp_path: Path) -> None:
    bags = BagFolder(tmp_path, TOPICS, getLogger("test"))
    bags.write([text("armed"), Mark.CLOSE])
    assert not list(tmp_path.iterdir())
    bags.write([text("armed"), image(0)])
    assert len(list(tmp_path.iterdir())) == 1
    bags.write([Mark.DISCARD])
    assert not list(tmp_path.iterdir())


def test_a_bag_of_the_same_second_takes_no_name_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    bags = BagFolder(tmp_path, TOPICS, getLogger("test"))
    bags.write([image(0), Mark.CLOSE, image(1), Mark.CLOSE])
    shutil.rmtree(tmp_path / "now")
    bags.write([image(2), Mark.CLOSE, image(3), Mark.CLOSE])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now", "now_1", "now_2"]
    assert not bags.error


def chosen(what: str, steps: list[Any], **options: Any) -> list[Any]:
    """What a mode chooses: events are dictionaries, images numbers, requests of a person booleans."""
    selection = Selection(RecordConfig(what=what, **options), ["/vla_policy/event"])
    for step in steps:
        if isinstance(step, dict):
            selection.add(text(step["event"]))
            selection.hear({"state": "armed", "mode": "autonomous", "label": "", **step}, START)
        elif isinstance(step, bool):
            (selection.begin(START + 10**10) if step else selection.end())
        else:
            selection.add(image(step))
    return [
        one if isinstance(one, Mark) else (one.time - START) // 10**8 if one.topic == "/camera" else "text"
        for one in selection.take()
    ]


EPISODE = [
    1,
    {"event": "episode_start"},
    2,
    {"event": "source", "mode": "paused"},
    3,
    {"event": "source", "mode": "correcting"},
    4,
    {"event": "source"},
    5,
    {"event": "episode_end", "label": "success"},
    6,
]


def test_each_mode_chooses_what_it_says() -> None:
    assert chosen("all", EPISODE) == [1, "text", 2, "text", 3, "text", 4, "text", 5, "text", 6]
    assert chosen("episodes", EPISODE) == ["text", 2, "text", 3, "text", 4, "text", 5, "text", Mark.CLOSE]
    assert chosen("corrections", EPISODE) == ["text", "text", "text", 4, "text", "text", Mark.CLOSE]
    discarded = [*EPISODE[:-2], {"event": "episode_end", "label": "discard"}]
    assert chosen("episodes", discarded)[-1] is Mark.DISCARD
    assert chosen("all", [*discarded, False])[-1] is Mark.CLOSE


def test_the_last_seconds_are_saved_on_demand_with_what_follows() -> None:
    steps = [*range(50), True, 50, 51, False, 52, True, 53]
    assert chosen("last", steps, seconds=1.0) == [*range(39, 52), Mark.CLOSE, 52, 53]
    selection = Selection(RecordConfig(what="last", seconds=100.0, memory=16), [])
    for number in range(40):
        selection.add(image(number, 1 << 20))
    selection.begin(START)
    assert len(selection.take()) == 15, "the ring is bounded by record.memory, too"


def test_what_a_slow_disk_cannot_take_is_dropped_and_counted() -> None:
    selection = Selection(RecordConfig(what="all", memory=16), [])
    for number in range(20):
        selection.add(image(number, 1 << 20))
    assert selection.dropped == {"/camera": 5}
    assert len(selection.take()) == 15
    selection.add(image(20, 1 << 20))
    assert len(selection.take()) == 1
