"""Bags are read whole where they are whole, and as far as possible where they are not.

Pins: an unfinished MCAP file (no footer), a chunk with flipped bits, a cut SQLite file, a missing or damaged
metadata.yaml, zstd by file and by message, split bags out of alphabetical order, a decompression bomb.
"""

import shutil
import sqlite3
import struct
import sys
import zlib

import numpy as np
import pytest
from rosbags.rosbag2 import Reader, StoragePlugin, Writer

from vla_ros.graph.messages import message_types
from vla_ros.replay.bag import Bag, find_bags
from vla_ros.replay.storage import BagError, decompress

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


def test_split_files_follow_each_other_by_number(write_bag, small_recording, tmp_path):
    folder = tmp_path / "split"
    folder.mkdir()
    for index in range(11):
        part = write_bag(f"part{index}", small_recording[index * 5 : index * 5 + 5])
        shutil.copy(part / f"part{index}.mcap", folder / f"split_{index}.mcap")
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
        assert "the file was not finished" in str(bag.losses[0])
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
        assert bag.empty == frozenset()


@pytest.mark.parametrize("name", ["bag_0.mcap", "bag_0.db3"])
def test_a_git_lfs_pointer_is_named(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BagError, match="a git-lfs pointer, not the file itself; run 'git lfs pull'"):
        Bag(tmp_path)
