"""Bags are read whole where they are whole, and as far as possible where they are not.

Pins: an unfinished MCAP file (no footer), a chunk with flipped bits, a cut SQLite file, a missing or damaged
metadata.yaml, zstd by file and by message, split bags out of alphabetical order, files that overlap in time, equal
times, times that are none, decompression bombs, files that never end.
"""

import os
import re
import shutil
import sqlite3
import struct
import sys
import zlib

import numpy as np
import pytest
from rosbags.rosbag2 import Reader, StoragePlugin, Writer

from vla_ros.graph.messages import message_types
from vla_ros_lab.replay.bag import Bag, find_bags
from vla_ros_lab.replay.storage import BagError, decompress

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

serialize = message_types("jazzy").serialize


@pytest.fixture
def images(make):
    """``images(count, pixels)``: messages of one camera with distinct stamps."""

    def messages(count, pixels):
        stamps = range(make.start, make.start + count)
        return [(stamp, "/camera", make.image(stamp, pixels)) for stamp in stamps]

    return messages


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(0, 255, (400, 400, 3), dtype=np.uint8)


def contents(path, **options):
    with Bag(path) as bag:
        records = [(record.time, record.topic, bytes(record.data)) for record in bag.records(bag.topics, **options)]
        return records, bag.losses


def by_rosbags(path):
    with Reader(path) as reader:
        return [(time, connection.topic, bytes(data)) for connection, time, data in reader.messages()]


@pytest.mark.parametrize(
    ("storage", "compress"),
    [("mcap", mode) for mode in ("", "storage", "file")] + [("sqlite3", mode) for mode in ("", "file", "message")],
)
def test_every_storage_and_compression_gives_what_was_written(write_bag, small_recording, storage, compress):
    path = write_bag("bag", small_recording, storage, compress)
    records, losses = contents(path)
    assert losses == []
    assert records == [(time, topic, serialize(message)) for time, topic, message in small_recording]


def test_all_bags_of_the_tests_read_as_rosbags_reads_them(jpeg_bag):
    bags = find_bags([jpeg_bag.parent])
    assert len(bags) == 5
    for path in bags:
        records, losses = contents(path)
        assert losses == []
        assert len(records) >= 210
        assert sorted(records) == sorted(by_rosbags(path)), path.name
        assert [time for time, _, _ in records] == sorted(time for time, _, _ in records)


def test_only_wanted_topics_from_a_time_on(jpeg_bag):
    with Bag(jpeg_bag) as bag:
        every = list(bag.records(["/joint_states"]))
        late = list(bag.records(["/joint_states"], start=every[100].time))
    assert len(every) == 150
    assert [record.time for record in late] == [record.time for record in every[100:]]


def test_an_mcap_file_cut_anywhere_gives_a_beginning_of_itself(jpeg_bag, tmp_path):
    whole = (jpeg_bag / "mcap_jpeg_0.mcap").read_bytes()
    complete = by_rosbags(jpeg_bag)
    cut_file = tmp_path / "cut.mcap"
    counts = []
    for length in range(600, len(whole) - 1, 7001):
        cut_file.write_bytes(whole[:length])
        records, losses = contents(cut_file)
        assert losses, "a cut file must say so"
        assert set(records) <= set(complete)
        counts.append(len(records))
    assert counts == sorted(counts)
    assert counts[-1] > 200


def test_damage_between_chunks_loses_only_what_it_covers(write_bag, make, images, noise, tmp_path):
    file = write_bag("bag", images(12, noise)) / "bag.mcap"
    data = bytearray(file.read_bytes())
    second_chunk = data.index(b"\x06", data.index(b"\x07", 1_000_000))
    while struct.unpack_from("<Q", data, second_chunk + 1)[0] > 2_000_000:
        second_chunk = data.index(b"\x06", second_chunk + 1)
    data[second_chunk] = 0x55  # no record is of this kind
    damaged = tmp_path / "damaged.mcap"
    damaged.write_bytes(data)
    records, losses = contents(damaged)
    assert 0 < len(records) < 12
    assert records[-1][0] == make.start + 11
    assert any("bytes are lost" in str(loss) for loss in losses)


def test_a_damaged_sqlite_file_gives_only_what_was_written(write_bag, images, tmp_path):
    whole = (write_bag("bag", images(40, np.zeros((30, 30, 3), np.uint8)), "sqlite3") / "bag.db3").read_bytes()
    rng = np.random.default_rng(0)
    damaged_file, read = tmp_path / "damaged.db3", 0
    for attempt in range(60):
        damaged = bytearray(whole[: int(rng.integers(8192, len(whole)))])
        for at in rng.integers(4096, len(damaged), 20 * (attempt % 3)):
            damaged[at] = int(rng.integers(0, 256))
        damaged_file.write_bytes(damaged)
        try:
            records, losses = contents(damaged_file)
        except BagError as error:
            assert "SQLite" in str(error)  # noqa: PT017 - both outcomes are right
            continue
        assert "cut off" in str(losses[0])
        read += len(records)
    assert read > 400


def test_a_sqlite_file_is_read_through_its_write_ahead_log(write_bag, small_recording):
    path = write_bag("bag", small_recording, "sqlite3") / "bag.db3"
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    new = b"\0\1\0\0" + bytes(range(256)) * 1000
    writer.execute("UPDATE messages SET data = ?", (new,))
    writer.commit()
    records, losses = contents(path)
    assert losses == []
    assert [data for _, _, data in records] == [new] * len(small_recording)
    writer.close()


@pytest.mark.parametrize("damage", ["missing", "no yaml", "no list"])
def test_metadata_is_not_needed(write_bag, small_recording, damage):
    path = write_bag("bag", small_recording)
    metadata = path / "metadata.yaml"
    if damage == "missing":
        metadata.unlink()
    else:
        metadata.write_text("{[" if damage == "no yaml" else "rosbag2_bagfile_information: 3")
    records, losses = contents(path)
    assert len(records) == len(small_recording)
    assert [loss.file for loss in losses] == ["metadata.yaml"]


@pytest.mark.parametrize("name", ["split_{0}", "{0}_split_2026_11_29-20_59_{1:02}"])
def test_split_files_follow_each_other_by_number(write_bag, small_recording, tmp_path, name):
    """The second name is rosbag2's since Lyrical: number, folder, local time (which may go back)."""
    folder = tmp_path / "split"
    folder.mkdir()
    for index in range(11):
        part = write_bag(f"part{index}", small_recording[index * 5 : index * 5 + 5])
        shutil.copy(part / f"part{index}.mcap", folder / f"{name.format(index, 59 - index)}.mcap")
    records, losses = contents(folder)
    assert [record[0] for record in records] == [time for time, _, _ in small_recording[:55]]
    assert [loss.file for loss in losses] == ["metadata.yaml"]


def test_a_damaged_zstd_file_gives_its_beginning(write_bag, small_recording):
    path = write_bag("bag", small_recording, "mcap", "file")
    (file,) = path.glob("*.zstd")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 3 // 4])
    try:
        records, losses = contents(path)
    except BagError as error:
        assert "damaged or cut off" in str(error)  # noqa: PT017 - both outcomes are right, each has its text
    else:
        assert len(records) < len(small_recording)
        assert any("damaged or cut off" in str(loss) for loss in losses)


def test_files_that_are_no_bags_are_refused_with_the_reason(tmp_path):
    (tmp_path / "old.bag").write_bytes(b"#ROSBAG V2.0\n")
    (tmp_path / "empty.mcap").write_bytes(b"")
    (tmp_path / "text.mcap").write_text("hello, world")
    (tmp_path / "text.db3").write_text("hello, world" * 100)
    with pytest.raises(BagError, match="does not exist"):
        find_bags([tmp_path / "nothing"])
    with pytest.raises(BagError, match="rosbags-convert"):
        find_bags([tmp_path / "old.bag"])
    with pytest.raises(BagError, match="is empty"):
        Bag(tmp_path / "empty.mcap")
    with pytest.raises(BagError, match="does not begin like an MCAP file"):
        Bag(tmp_path / "text.mcap")
    with pytest.raises(BagError, match="SQLite"):
        Bag(tmp_path / "text.db3")


def test_a_folder_of_bags_is_several_bags(write_bag, small_recording, tmp_path):
    for index in (10, 9):
        write_bag(f"bag_{index}", small_recording)
    assert [path.name for path in find_bags([tmp_path])] == ["bag_9", "bag_10"]


def test_a_bomb_does_not_fill_the_memory():
    bomb = zstd.compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(BagError, match="more than the announced 1000 bytes"):
        decompress(bomb, "zstd", 1000)
    with pytest.raises(BagError, match=r"were announced|too early"):
        decompress(bomb, "zstd", 60_000_000)
    with pytest.raises(BagError, match="expected none, zstd or lz4"):
        decompress(b"", "brotli", 10)


def record(kind, body):
    return struct.pack("<BQ", kind, len(body)) + body


def text(words):
    return struct.pack("<I", len(words)) + words.encode()


def mcap_with_chunks(path, chunks, compression, compress):
    """An MCAP file by hand (rosbags writes none with lz4): one channel, a list of messages per chunk, checksums."""
    parts = [b"\x89MCAP0\r\n", record(1, text("ros2") + text("test"))]
    schema = record(3, struct.pack("<H", 1) + text("std_msgs/msg/String") + text("ros2msg") + text("string data"))
    channel = record(4, struct.pack("<HH", 1, 1) + text("/words") + text("cdr") + struct.pack("<I", 0))
    for number, messages in enumerate(chunks):
        body = schema + channel if number == 0 else b""
        for time, data in messages:
            body += record(5, struct.pack("<HIQQ", 1, 0, time, time) + data)
        stored = compress(body)
        head = struct.pack("<QQQI", messages[0][0], messages[-1][0], len(body), zlib.crc32(body))
        parts.append(record(6, head + text(compression) + struct.pack("<Q", len(stored)) + stored))
    path.write_bytes(b"".join([*parts, record(15, bytes(4)), record(2, bytes(20)), b"\x89MCAP0\r\n"]))
    return path


@pytest.mark.parametrize("compression_name", ["", "lz4", "zstd"])
def test_chunks_of_every_compression_and_their_damage(tmp_path, compression_name):
    import lz4.frame

    compress = {"": bytes, "lz4": lz4.frame.compress, "zstd": zstd.compress}[compression_name]
    chunks = [[(10 * n + i, b"\0\1\0\0" + bytes([n]) * 5_000) for i in range(4)] for n in range(3)]
    path = mcap_with_chunks(tmp_path / "bag.mcap", chunks, compression_name, compress)
    with Bag(path) as bag:
        assert bag.topics == {"/words": "std_msgs/msg/String"}
        read = [(found.time, bytes(found.data)) for found in bag.records(["/words"])]
        assert read == [message for chunk in chunks for message in chunk]
        assert bag.losses == []
    whole = path.read_bytes()
    bodies = (b"".join(record(5, struct.pack("<HIQQ", 1, 0, t, t) + d) for t, d in chunk) for chunk in chunks[1:])
    (second, _), (third, size) = ((whole.find(stored), len(stored)) for stored in map(compress, bodies))
    path.write_bytes(whole[: third + size // 2])
    with Bag(path) as bag:
        read = [(found.time, bytes(found.data)) for found in bag.records(["/words"])]
        assert len(read) >= 8
        assert read == [message for chunk in chunks for message in chunk][: len(read)]
        assert any("the file was not finished" in str(loss) for loss in bag.losses)
    damaged = bytearray(whole)
    damaged[second + 30] ^= 0x10
    path.write_bytes(damaged)
    with Bag(path) as bag:
        read = [(found.time, bytes(found.data)) for found in bag.records(["/words"])]
        assert read == [*chunks[0], *chunks[2]]
        head = 9 + 28 + 4 + len(compression_name) + 8
        assert {loss.where for loss in bag.losses} == {f"byte {second - head}"}


def test_mcap_messages_that_are_compressed_by_themselves(tmp_path, store, make):
    """``ros2 bag record -s mcap --compression-mode message``: the message's bytes are one zstd frame."""
    texts = [serialize(make.text(f"task {index}")) for index in range(3)]
    stored = [zstd.compress(texts[0]), zstd.compress(texts[1])[:-3], texts[2]]
    with Writer(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        topic = writer.add_connection("/task", "std_msgs/msg/String", typestore=store)
        for index, data in enumerate(stored):
            writer.write(topic, make.start + index, data)
    records, losses = contents(tmp_path / "bag")
    assert [data for _, _, data in records] == [texts[0], texts[2]]
    assert len(losses) == 1
    assert "message of /task" in str(losses[0])


def test_topics_without_a_message_are_known(tmp_path, store, make):
    with Writer(tmp_path / "bag", version=9) as writer:
        writer.add_connection("/silent", "std_msgs/msg/String", typestore=store)
        topic = writer.add_connection("/task", "std_msgs/msg/String", typestore=store)
        writer.write(topic, make.start, serialize(make.text("x")))
    with Bag(tmp_path / "bag") as bag:
        assert bag.empty == {"/silent"}
    (tmp_path / "bag" / "metadata.yaml").unlink()
    with Bag(tmp_path / "bag") as bag:
        assert bag.empty == {"/silent"}


def words(make, count, first=0):
    """``count`` messages of /words, ten nanoseconds apart, each with its number as text."""
    return [(make.start + 10 * i, serialize(make.text(str(i)))) for i in range(first, first + count)]


@pytest.fixture
def mcap_file(tmp_path):
    """``mcap_file(name, {topic: [(time, data), ...]}, kind=...)`` writes with the library mcap, chunk by chunk."""
    from mcap.writer import CompressionType
    from mcap.writer import Writer as McapWriter

    def write(name, topics, *, kinds=None, encoding="cdr", **options):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            out = McapWriter(file, compression=CompressionType.NONE, **options)
            out.start("ros2", "test")
            records = []
            for topic, messages in topics.items():
                kind = (kinds or {}).get(topic, "std_msgs/msg/String")
                channel = out.register_channel(topic, encoding, out.register_schema(kind, "ros2msg", b""))
                records += [(time, channel, data) for time, data in messages]
            for time, channel, data in sorted(records, key=lambda one: one[0]):
                out.add_message(channel, time, data, time)
            out.finish()
        return path

    return write


def test_files_that_overlap_in_time_are_merged(mcap_file, make, tmp_path):
    """Messages of one time are in the order of the files; rosbag2 starts a file while messages still arrive."""
    early, late = words(make, 20), words(make, 20, 15)
    tied = [(time, data + b"\0\0\0\0") for time, data in early[10:12]]
    mcap_file("bag/bag_0.mcap", {"/words": [*early[:15], *late[-1:]]})
    mcap_file("bag/bag_1.mcap", {"/words": [*tied, *early[15:], *late[5:-1]]})
    records, _ = contents(tmp_path / "bag")
    expected = [*early[:11], tied[0], early[11], tied[1], *early[12:], *late[5:]]
    assert [(time, data) for time, _, data in records] == expected
    with Bag(tmp_path / "bag") as bag:
        for start in (make.start + 100, make.start + 110, make.start + 111):
            again = [(one.time, bytes(one.data)) for one in bag.records(["/words"], start)]
            assert again == [one for one in expected if one[0] >= start], "the n-th message stays the n-th"


@pytest.mark.parametrize("chunk_size", [1, 200, 100_000])
def test_equal_times_keep_the_order_of_recording(mcap_file, make, chunk_size):
    """All zero, as from a recorder with simulated time that gets no /clock; the same time in several chunks."""
    texts = [data for _, data in words(make, 60)]
    zero = mcap_file("zero.mcap", {"/words": [(0, data) for data in texts]}, chunk_size=chunk_size)
    assert [data for _, _, data in contents(zero)[0]] == texts
    coarse = [(i // 7 * 100, data) for i, data in enumerate(texts)]
    path = mcap_file("coarse.mcap", {"/words": coarse}, chunk_size=chunk_size)
    assert [(time, data) for time, _, data in contents(path)[0]] == coarse


def test_chunks_that_all_overlap_are_read_in_bounded_memory(mcap_file, make, monkeypatch):
    """A message of an early time in every chunk; what comes far too late for the order is left out and named."""
    from vla_ros_lab.replay import mcap

    monkeypatch.setattr(mcap, "MAX_CHUNK", 200_000)
    big = [(make.start + i, bytes(4) + bytes([i]) * 10_000) for i in range(200)]
    early = [(5 + i, b"\0\1\0\0") for i in range(200)]
    path = mcap_file("bag.mcap", {"/big": big})
    data = [message for pair in zip(early, big, strict=True) for message in pair]
    from mcap.writer import CompressionType
    from mcap.writer import Writer as McapWriter

    with path.open("wb") as file:
        out = McapWriter(file, chunk_size=10_000, compression=CompressionType.NONE)
        out.start("ros2", "test")
        schema = out.register_schema("std_msgs/msg/String", "ros2msg", b"")
        channels = [out.register_channel(topic, "cdr", schema) for topic in ("/early", "/big")]
        for number, (time, content) in enumerate(data):
            out.add_message(channels[number % 2], time, content, time)
        out.finish()
    records, losses = contents(path)
    assert [time for time, _, _ in records] == sorted(time for time, _, _ in records)
    assert [(time, content) for time, topic, content in records if topic == "/big"] == big
    assert any("far earlier" in str(loss) and "/early" in str(loss) for loss in losses)


def test_zeros_at_the_end_cost_no_time(jpeg_bag, tmp_path):
    """A file system that lost the tail in a power cut; a gigabyte of zeros, of which nothing is stored here."""
    path = tmp_path / "bag.mcap"
    whole = (jpeg_bag / "mcap_jpeg_0.mcap").read_bytes()
    path.write_bytes(whole[:100_000])
    before, _ = contents(path)
    os.truncate(path, 1 << 30)
    records, losses = contents(path)
    complete, _ = contents(jpeg_bag)
    assert 10 < len(before) <= len(records) + 1
    assert set(records) <= set(complete), "a message of which zeros are the end is none"
    assert any("zeros" in str(loss) for loss in losses)


def test_an_index_that_does_not_fit_the_file_is_not_believed(mcap_file, make):
    """One that lacks a chunk (the file is scanned), and one whose chunks overlap (it would never end)."""
    messages = words(make, 60)
    path = mcap_file("bag.mcap", {"/words": messages}, chunk_size=300, enable_crcs=False)
    whole = path.read_bytes()
    summary = struct.unpack_from("<Q", whole, len(whole) - 28)[0]
    first = whole.index(b"\x08", summary)
    while struct.unpack_from("<Q", whole, first + 25)[0] != whole.index(b"\x06", 8 + 9):
        first = whole.index(b"\x08", first + 1)
    length = 9 + struct.unpack_from("<Q", whole, first + 1)[0]
    lacking = whole[:first] + whole[first + length :]
    path.write_bytes(lacking)
    assert [(time, data) for time, _, data in contents(path)[0]] == messages
    path.write_bytes(whole[: first + length] + whole[first : first + length] * 50 + whole[first + length :])
    assert [(time, data) for time, _, data in contents(path)[0]] == messages


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_messages_whose_time_is_none_are_left_out(mcap_file, write_bag, small_recording, make, storage):
    if storage == "mcap":
        path = mcap_file("bag.mcap", {"/words": [*words(make, 3), (2**63, b"\0\1\0\0"), (2**64 - 1, b"\0\1\0\0")]})
        topic, expected = "/words", 3
    else:
        path = write_bag("bag", small_recording, "sqlite3") / "bag.db3"
        database = sqlite3.connect(path)
        database.executescript(
            "create table copy as select id, topic_id, timestamp, data from messages; drop table messages;"
            "create table messages(id integer primary key, topic_id, timestamp, data);"
            "insert into messages select * from copy; drop table copy;"
            "update messages set timestamp = 'noon' where id = 5; update messages set timestamp = -7 where id = 6;"
            "update messages set timestamp = null where id = 7; update messages set timestamp = 1.5 where id = 8;"
        )
        database.commit()
        database.close()
        topic, expected = "", len(small_recording) - 4
    records, losses = contents(path)
    assert len(records) == expected
    assert "receive time that is no number from 0 to" in str(losses[0])
    assert topic in losses[0].where


@pytest.mark.parametrize(
    "change",
    [
        "drop table messages; create view messages as with recursive n(i) as (select 1 union all select i + 1"
        " from n) select i as id, 1 as topic_id, i as timestamp, x'00010000' as data from n",
        "drop table topics; create view topics as with recursive n(i) as (select 1 union all select i + 1"
        " from n) select i as id, 'a' || i as name, 'std_msgs/msg/String' as type, 'cdr' as serialization_format"
        " from n",
        "drop table messages; create table messages(id integer primary key, topic_id integer, timestamp integer,"
        " data blob generated always as (zeroblob(900000000)))",
        "drop table messages",
    ],
    ids=["endless messages", "endless topics", "computed data", "no messages"],
)
def test_a_database_that_computes_its_messages_is_refused(write_bag, small_recording, change):
    path = write_bag("bag", small_recording, "sqlite3") / "bag.db3"
    database = sqlite3.connect(path)
    database.executescript(change)
    database.close()
    with pytest.raises(BagError, match=r"bag\.db3.*expected a table"):
        Bag(path)


def test_a_database_without_index_is_sorted_and_read(write_bag, small_recording):
    path = write_bag("bag", small_recording, "sqlite3") / "bag.db3"
    database = sqlite3.connect(path)
    database.execute("drop index timestamp_idx")
    database.close()
    assert len(contents(path)[0]) == len(small_recording)


@pytest.mark.parametrize("name", ["bag_0.mcap", "bag_0.db3", "bag_0.mcap.zstd"])
def test_a_pipe_or_a_device_is_no_bag(mcap_file, make, name, tmp_path):
    """Opening a pipe waits for its writer, for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(BagError, match=f"{name}.*not a regular file"):
        Bag(find_bags([tmp_path / name])[0])
    mcap_file("bag/bag_1.mcap", {"/words": words(make, 3)})
    os.mkfifo(tmp_path / "bag" / name)
    os.mkfifo(tmp_path / "bag" / "metadata.yaml")
    (tmp_path / "bag" / "zero.mcap").symlink_to("/dev/zero")
    records, losses = contents(tmp_path / "bag")
    assert len(records) == 3
    assert {loss.file for loss in losses if "not a regular file" in loss.what} == {
        name,
        "metadata.yaml",
        "zero.mcap",
    }


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, "a: " * 2_000_000, "- !!python/object:os.system x"])
def test_metadata_that_cannot_be_parsed_is_not_needed(write_bag, small_recording, text):
    path = write_bag("bag", small_recording)
    (path / "metadata.yaml").write_text(text)
    records, losses = contents(path)
    assert len(records) == len(small_recording)
    assert "metadata.yaml, whole file: is damaged" in str(losses[0])
    assert len(str(losses[0])) < 400


def test_counts_in_metadata_are_hints(write_bag, small_recording):
    path = write_bag("bag", small_recording)
    metadata = path / "metadata.yaml"
    metadata.write_text(re.sub(r"message_count: \d+", "message_count: 0", metadata.read_text()))
    with Bag(path) as bag:
        assert bag.empty == frozenset()
        assert len(list(bag.records(bag.topics))) == len(small_recording)
    metadata.write_text(re.sub(r"message_count: \d+", "message_count: many", metadata.read_text()))
    with Bag(path) as bag:
        assert bag.empty == frozenset()


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_a_topic_without_messages_is_empty_whatever_the_metadata_say(write_bag, small_recording, storage):
    path = write_bag("bag", small_recording, storage)
    with Bag(path) as bag:
        assert bag.empty == frozenset()
    if storage == "sqlite3":
        database = sqlite3.connect(path / "bag.db3")
        database.execute(
            "insert into topics select 99, '/silent', type, serialization_format, offered_qos_profiles,"
            " type_description_hash from topics limit 1"
        )
        database.commit()
        database.close()
        with Bag(path) as bag:
            assert bag.empty == {"/silent"}


def test_types_without_msg_are_the_same_types(mcap_file, make):
    path = mcap_file("bag.mcap", {"/words": words(make, 3)}, kinds={"/words": "std_msgs/String"})
    with Bag(path) as bag:
        assert bag.topics == {"/words": "std_msgs/msg/String"}


def test_a_topic_with_two_types_has_the_first_files(mcap_file, make, tmp_path):
    mcap_file("bag/bag_0.mcap", {"/words": words(make, 3)})
    mcap_file("bag/bag_1.mcap", {"/words": words(make, 3, 3)}, kinds={"/words": "std_msgs/msg/Bool"})
    records, losses = contents(tmp_path / "bag")
    assert len(records) == 3
    assert any(
        "has messages of std_msgs/msg/Bool, elsewhere of std_msgs/msg/String" in str(loss) for loss in losses
    )


def test_another_serialisation_is_named(mcap_file, make):
    path = mcap_file("bag.mcap", {"/words": words(make, 3)}, encoding="json")
    with Bag(path) as bag:
        assert bag.topics == {}
        assert "messages are in 'json', expected cdr" in str(bag.losses[0])


def test_a_file_beside_its_compressed_self_is_read_once(write_bag, small_recording):
    """``ros2 bag play`` decompresses into the bag's folder."""
    path = write_bag("bag", small_recording, "mcap", "file")
    (packed,) = path.glob("*.zstd")
    packed.with_suffix("").write_bytes(zstd.decompress(packed.read_bytes()))
    records, losses = contents(path)
    assert len(records) == len(small_recording)
    assert "it has the messages of" in str(losses[0])
    (path / "metadata.yaml").unlink()
    assert len(contents(path)[0]) == len(small_recording)


def test_a_file_that_the_metadata_do_not_list_is_read_and_named(write_bag, small_recording, mcap_file, make):
    path = write_bag("bag", small_recording)
    mcap_file("bag/more.mcap", {"/words": words(make, 3)})
    records, losses = contents(path)
    assert len(records) == len(small_recording) + 3
    assert "more.mcap, whole file: metadata.yaml does not list this file" in str(losses[0])


def test_links_that_lead_back_are_followed_once(write_bag, small_recording, tmp_path):
    folder = tmp_path / "recordings"
    folder.mkdir()
    shutil.move(write_bag("bag", small_recording), folder / "bag.mcap")  # a folder may have such a name
    for name in ("a", "b"):
        (folder / name).symlink_to(folder)
    assert find_bags([folder]) == [folder / "bag.mcap"]


def test_chunks_that_are_bombs_are_left_out(tmp_path):
    """A chunk that announces a thousand times its size; many that together are too much."""
    from vla_ros_lab.replay import storage

    bomb = zstd.compress(bytes(100_000_000))
    head = struct.pack("<QQQI", 1, 2, 100_000_000, 0) + text("zstd") + struct.pack("<Q", len(bomb)) + bomb
    good = record(3, struct.pack("<H", 1) + text("std_msgs/msg/String") + text("ros2msg") + text("string data"))
    good += record(4, struct.pack("<HH", 1, 1) + text("/words") + text("cdr") + struct.pack("<I", 0))
    good += record(5, struct.pack("<HIQQ", 1, 0, 5, 5) + b"\0\1\0\0")
    path = tmp_path / "bag.mcap"
    path.write_bytes(b"\x89MCAP0\r\n" + record(1, text("ros2") + text("")) + good + record(6, head))
    records, losses = contents(path)
    assert len(records) == 1
    assert any("declares 100000000 decompressed bytes" in str(loss) for loss in losses)
    expansion = storage.Expansion(1000)
    assert [bool(expansion.spend(1 << 28)) for _ in range(6)] == [False] * 4 + [True] * 2


def test_many_bombs_end_at_the_limit_of_the_file(mcap_file, make, monkeypatch, tmp_path):
    """Each message and chunk may be large; all together not 500 times the file, above a gigabyte."""
    from vla_ros_lab.replay import storage

    monkeypatch.setattr(storage, "MAX_CHUNK", 1 << 20)
    bomb = zstd.compress(b"\0\1\0\0" + bytes(1_000_000))
    path = mcap_file("bag.mcap", {"/words": [(make.start + i, bomb) for i in range(50)]})
    records, losses = contents(path)
    limit = max(1 << 20, 500 * path.stat().st_size)
    assert sum(len(data) for _, _, data in records) <= limit + 1_000_004
    assert any("decompresses to more than" in str(loss) for loss in losses)


@pytest.mark.parametrize("name", ["bag_0.mcap", "bag_0.db3"])
def test_a_git_lfs_pointer_is_named(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BagError, match="a git-lfs pointer, not the file itself; run 'git lfs pull'"):
        Bag(tmp_path)
