"""Bags with the files, topics, counts and metadata of bags that people committed; see ``data/corpus.json``."""

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcap.writer import Writer

from test.corpus import POINTER, entries
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.storage import BagError

MOST = 5  # messages of a topic in a file


def write(folder: Path, facts: dict[str, Any]) -> Counter[tuple[str, int, bytes]]:
    """Write a bag of this structure, with at most five messages of a topic in a file; return its messages."""
    form, at, written = facts.get("format", "cdr"), 1_700_000_000_000_000_000, Counter[tuple[str, int, bytes]]()
    topics = [
        {"topic_metadata": {"name": name, "type": kind, "serialization_format": form}, "message_count": 1}
        for name, kind in facts["types"].items()
    ]
    about = {
        "version": facts["version"],
        "relative_file_paths": facts["listed"],
        "topics_with_message_count": topics,
    }
    (folder / "metadata.yaml").write_text(yaml.safe_dump({"rosbag2_bagfile_information": about}))
    for file, counts in facts["files"].items():
        if counts == "git-lfs":
            (folder / file).write_bytes(POINTER)
            continue
        rows = [(name, number) for number in range(MOST) for name, count in counts.items() if number < count]
        messages = [(name, at + 10 * row, bytes([0, 1, 0, 0, row % 256])) for row, (name, _) in enumerate(rows)]
        at += 10 * len(rows)
        written.update(messages)
        types = {name: facts["types"][name] for name in counts}
        (write_mcap if file.endswith(".mcap") else write_sqlite)(folder / file, types, messages, form)
    return written


def write_mcap(path: Path, types: dict[str, str], messages: list[tuple[str, int, bytes]], form: str) -> None:
    with path.open("wb") as stream:
        writer = Writer(stream)
        writer.start("ros2")
        schemas = {name: writer.register_schema(kind, "ros2msg", b"") for name, kind in types.items()}
        channels = {name: writer.register_channel(name, form, schema) for name, schema in schemas.items()}
        for name, time, data in messages:
            writer.add_message(channels[name], time, data, time)
        writer.finish()


def write_sqlite(path: Path, types: dict[str, str], messages: list[tuple[str, int, bytes]], form: str) -> None:
    """Write as rosbag2 does; only metadata.yaml has ``form`` in the bag of the corpus."""
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE topics(id INTEGER PRIMARY KEY, name, type, serialization_format, qos)")
    database.execute("CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp, data)")
    numbers = {name: number for number, name in enumerate(types, 1)}
    for name, kind in types.items():
        database.execute("INSERT INTO topics VALUES (?, ?, ?, 'cdr', '')", (numbers[name], name, kind))
    for name, time, data in messages:
        database.execute("INSERT INTO messages VALUES (NULL, ?, ?, ?)", (numbers[name], time, data))
    database.commit()
    database.close()


@pytest.mark.parametrize("facts", entries("bags"))
def test_a_bag_that_people_committed_is_read_whole_or_says_why_not(facts: dict[str, Any], tmp_path: Path) -> None:
    written = write(tmp_path, facts)
    if "git-lfs" in facts["files"].values():
        with pytest.raises(BagError, match="a git-lfs pointer"):
            Bag(tmp_path)
        return
    with Bag(tmp_path) as bag:
        records, topics, empty = list(bag.records(bag.topics)), bag.topics, bag.empty
        told = "\n".join(map(str, bag.losses))
    stated = facts.get("format")
    if stated and next(iter(facts["files"])).endswith(".mcap"):
        assert (records, topics) == ([], {})
    else:
        assert Counter((one.topic, one.time, bytes(one.data)) for one in records) == written
        assert [one.time for one in records] == sorted(one.time for one in records)
        assert topics == facts["types"]
        assert empty == {name for name in topics if not any(counts[name] for counts in facts["files"].values())}
    expected = dict.fromkeys(set(facts["listed"]) - set(facts["files"]), "does not exist")
    expected |= dict.fromkeys(set(facts["files"]) - set(facts["listed"]), "does not list this file")
    expected |= {f"topic {name}": stated for name in facts["types"] if stated}
    for where, what in expected.items():
        assert any(where in line and what in line for line in told.splitlines()), (where, what, told)
    assert len(told.splitlines()) == len(expected)
