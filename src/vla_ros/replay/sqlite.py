"""SQLite bags (``.db3``) of every distribution, damaged ones too: rows that cannot be read are counted.

The tables are those of rosbag2_storage_sqlite3: ``topics(id, name, type, ...)`` and
``messages(id, topic_id, timestamp, data)``.
"""

from __future__ import annotations

import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from vla_ros.replay.records import BagError, Loss, Record
from vla_ros.replay.sqlite_pages import RowReader

_GIVE_UP = 2000  # unreadable rows in succession after which the rest is taken to be lost
_LARGE = 64 << 10  # bytes of a row from which the direct way is faster


class SqliteFile:
    """One open ``.db3`` file.

    Raises:
        BagError: It is no SQLite bag, or its list of topics cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.losses: list[Loss] = []
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        try:
            missing = _missing_bytes(path)
            if missing:
                self._lose(
                    f"byte {path.stat().st_size}", f"the file was cut off; its last {missing} bytes are lost"
                )
                self._copy = tempfile.TemporaryDirectory(prefix="vla_ros_bag_")
                path = _padded(path, missing, Path(self._copy.name))
            self._database, topics = _connect(path)
        except sqlite3.Error as error:
            raise BagError(f"{path}: cannot be read as a SQLite bag ({error})") from None
        self._large = _row_reader(path, self._database)
        self._types: dict[str, str] = {}
        self._ids: dict[int, str] = {}
        for key, name, kind, encoding in topics:
            if encoding == "cdr":
                self._ids[key], self._types[name] = name, kind
            else:
                self.losses.append(Loss(self._name, f"topic {name}", f"messages are in {encoding!r}, expected cdr"))

    @property
    def topics(self) -> dict[str, str]:
        """Topic name to type."""
        return dict(self._types)

    def close(self) -> None:
        """Close the file."""
        self._large = None
        self._database.close()
        if self._copy is not None:
            self._copy.cleanup()

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        """See :class:`~vla_ros.replay.records.Storage`. The format has no checksums."""
        wanted = {key: name for key, name in self._ids.items() if name in topics}
        if not wanted:
            return
        marks = ",".join(str(key) for key in wanted)
        last, seen = start, set[int]()
        try:
            # SQLite tells a row's length without reading it; large ones are read below.
            small = f"CASE WHEN length(data) < {_LARGE} THEN data END"
            query = f"SELECT id, topic_id, timestamp, {small} FROM messages WHERE topic_id IN ({marks})"
            rows = self._database.execute(f"{query} AND timestamp >= ? ORDER BY timestamp, id", (start,))
            for row, key, time, found in rows:
                data = found if found is not None else self._read_large(row)
                if time > last:
                    last, seen = time, set()
                seen.add(row)
                yield Record(time, wanted[key], data)
        except sqlite3.DatabaseError as error:
            yield from self._salvage(wanted, last, seen, str(error))

    def _read_large(self, row: int) -> bytes | memoryview:
        """The data of a large row, by SQLite itself where the direct way does not go."""
        data = self._large.read(row) if self._large is not None else None
        if data is not None:
            return data
        found: bytes = self._database.execute("SELECT data FROM messages WHERE id = ?", (row,)).fetchone()[0]
        return found

    def _salvage(self, wanted: dict[int, str], last: int, seen: set[int], why: str) -> Iterator[Record]:
        """Row by row, from the time ``last`` on, leaving out ``seen``: what a damaged file still gives."""
        row = in_succession = first_failed = 0
        while in_succession < _GIVE_UP:
            row += 1
            try:
                found = self._database.execute(
                    "SELECT topic_id, timestamp, data FROM messages WHERE id = ?", (row,)
                ).fetchone()
            except sqlite3.DatabaseError:
                in_succession += 1
                first_failed = first_failed or row
                continue
            if found is None:
                in_succession += 1  # past the end, or a row that was deleted
                continue
            in_succession = 0
            key, time, data = found
            if key in wanted and (time > last or (time == last and row not in seen)):
                yield Record(time, wanted[key], data)
        what = (
            f"the file is damaged or cut off ({why}); rows from {first_failed} on that lie in the damage are lost"
        )
        self._lose(f"row {first_failed or row - _GIVE_UP}", what)

    def _lose(self, where: str, what: str) -> None:
        loss = Loss(self._name, where, what)
        if loss not in self.losses:
            self.losses.append(loss)


def _connect(path: Path) -> tuple[sqlite3.Connection, list[tuple[int, str, str, str]]]:
    """Open read-only and list the topics; where the folder cannot be written, without the write-ahead log."""
    problem: sqlite3.Error | None = None
    for mode in ("mode=ro", "immutable=1"):
        database = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, check_same_thread=False)
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")  # names in a damaged file
        try:
            rows = database.execute("SELECT id, name, type, serialization_format FROM topics").fetchall()
            return database, rows
        except sqlite3.Error as error:
            problem = problem or error
            database.close()
        except UnicodeDecodeError:  # of SQLite's own message, which quotes the damaged schema
            problem = problem or sqlite3.DatabaseError("its schema is damaged")
            database.close()
    assert problem is not None
    raise problem


def _row_reader(path: Path, database: sqlite3.Connection) -> RowReader | None:
    """The direct way to ``messages.data``; None where the file alone does not tell all."""
    logs = [path.with_name(path.name + ending) for ending in ("-wal", "-journal")]
    try:
        if any(log.exists() and log.stat().st_size for log in logs):
            return None
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'").fetchone()
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(messages)")]
        return RowReader(path, root, columns.index("data"))
    except (sqlite3.Error, OSError, TypeError, ValueError):
        return None


def _missing_bytes(path: Path) -> int:
    """By how much the file is shorter than its header says (SQLite file format, section 1.3); 0 for sound files."""
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
        return 0
    page: int = struct.unpack_from(">H", head, 16)[0]
    counter, pages = struct.unpack_from(">II", head, 24)
    if counter != struct.unpack_from(">I", head, 92)[0]:  # the size in the header is not up to date
        return 0
    size: int = pages * (65536 if page == 1 else page)
    return max(0, size - path.stat().st_size)


def _padded(path: Path, missing: int, folder: Path) -> Path:
    """A copy with a hole in place of the missing end: SQLite opens nothing shorter than announced."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    with copy.open("r+b") as file:
        file.truncate(path.stat().st_size + missing)
    return copy
