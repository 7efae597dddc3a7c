"""Rows read straight from the pages are those that SQLite gives, whatever the layout; in doubt it steps aside."""

import sqlite3

import numpy as np
import pytest

from vla_ros.replay.bag import Bag
from vla_ros.replay.sqlite import SqliteFile
from vla_ros.replay.sqlite_pages import RowReader

TABLE = "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER, timestamp INTEGER, data BLOB)"
SIZES = (0, 1, 60, 300, 470, 3_900, 4_061, 4_062, 4_100, 8_150, 65_000, 70_000, 131_072, 250_001)


def filled(path, page_size=4096, auto_vacuum=0, scattered=False):
    """A database with rows of many sizes; ``scattered`` puts their pages out of order."""
    rng = np.random.default_rng(page_size)
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA page_size={page_size}")
    database.execute(f"PRAGMA auto_vacuum={auto_vacuum}")
    database.execute(TABLE)

    def add(size):
        row = (int(rng.integers(0, 3)), int(rng.integers(0, 2**62)), rng.bytes(size))
        database.execute("INSERT INTO messages(topic_id, timestamp, data) VALUES(?, ?, ?)", row)

    for _ in range(6):
        for size in SIZES:
            add(size)
    if scattered:
        database.execute("DELETE FROM messages WHERE id % 3 = 0")
        for size in SIZES:
            add(3 * size)
    database.commit()
    return database


def reader(path, database, column=3):
    (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'").fetchone()
    return RowReader(path, root, column)


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
@pytest.mark.parametrize(("auto_vacuum", "scattered"), [(0, False), (1, True), (0, True)])
def test_every_row_is_the_one_that_sqlite_gives(tmp_path, page_size, auto_vacuum, scattered):
    database = filled(tmp_path / "a.db3", page_size, auto_vacuum, scattered)
    rows = reader(tmp_path / "a.db3", database)
    compared = 0
    for key, data in database.execute("SELECT id, data FROM messages"):
        found = rows.read(key)
        assert found is not None
        assert bytes(found) == data
        compared += 1
    assert compared > 60
    assert rows.read(0) is None
    assert rows.read(10**9) is None
    database.close()


def test_what_is_no_blob_is_left_to_sqlite(tmp_path):
    database = filled(tmp_path / "a.db3")
    database.execute("INSERT INTO messages VALUES(1000, 1, 2, 'a text'), (1001, 1, 2, NULL)")
    database.commit()
    rows = reader(tmp_path / "a.db3", database)
    assert rows.read(1000) is None
    assert rows.read(1001) is None
    assert reader(tmp_path / "a.db3", database, column=1).read(1) is None
    assert reader(tmp_path / "a.db3", database, column=9).read(1) is None
    database.close()


def test_damage_is_left_to_sqlite_and_never_raises(tmp_path):
    path = tmp_path / "a.db3"
    database = filled(path, 512)
    lengths = dict(database.execute("SELECT id, length(data) FROM messages"))
    (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'").fetchone()
    database.close()
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(sound[: int(rng.integers(2048, len(sound)))])
        for at in rng.integers(1024, len(damaged), 200):
            damaged[at] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        rows = RowReader(path, root, 3)
        for key in lengths:
            found = rows.read(key)
            refused += found is None
            assert found is None or len(found) <= len(damaged)
    assert refused > 100


def test_an_unfinished_transaction_is_left_to_sqlite(write_bag, small_recording, make):
    messages = [
        *small_recording,
        (make.start + 5, "/camera/image_raw", make.image(5, np.zeros((200, 200, 3), np.uint8))),
    ]
    path = next(write_bag("bag", messages, storage="sqlite3").glob("*.db3"))
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    new = b"\0\1\0\0" + bytes(range(256)) * 1000
    writer.execute("UPDATE messages SET data = ? WHERE length(data) > 100000", (new,))
    writer.commit()
    storage = SqliteFile(path)
    found = [bytes(record.data) for record in storage.records(["/camera/image_raw"]) if len(record.data) > 100_000]
    assert found == [new]
    storage.close()
    writer.close()


def test_large_frames_of_a_bag_take_the_direct_way(write_bag, make, monkeypatch):
    pictures = [np.full((240, 320, 3), 10 * index, np.uint8) for index in range(5)]
    messages = [
        (make.start + index, "/camera/image_raw", make.image(index, picture))
        for index, picture in enumerate(pictures)
    ]
    folder = write_bag("bag", messages, storage="sqlite3")
    answers = []
    read = RowReader.read
    monkeypatch.setattr(RowReader, "read", lambda self, row: answers.append(read(self, row)) or answers[-1])
    with Bag(folder) as bag:
        found = [bytes(record.data) for record in bag.records(["/camera/image_raw"])]
    assert [frame[-1] for frame in found] == [0, 10, 20, 30, 40]
    assert [len(answer) for answer in answers] == [len(frame) for frame in found]
