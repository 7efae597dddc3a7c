"""Reads SQLite bags (``.db3``) of every distribution, including damaged ones.

rosbag2_storage_sqlite3 writes the tables ``topics(id, name, type, serialization_format, ...)`` and ``messages(id,
topic_id, timestamp, data)``.
"""

import sqlite3
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from vla_ros.replay.storage import BagError, Loss, Record

_GIVE_UP = 2000  # consecutive unreadable rows; after that, the rest counts as lost
_SETTINGS = (
    "PRAGMA writable_schema = ON",  # otherwise SQLite refuses a file that is shorter than its header states
    "PRAGMA cache_size = 16",  # pages; each image is read once, and a large cache only makes it slower
)


class SqliteFile:
    """An open ``.db3`` file; ``topics`` maps name to type, ``losses`` grows while reading.

    Raises BagError if the file is not a SQLite bag, or its list of topics cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.losses: list[Loss] = []
        self.topics: dict[str, str] = {}
        self._ids: dict[int, str] = {}
        try:
            if missing := _missing_bytes(path):
                detail = f"the file was cut off; its last {missing} bytes are lost"
                self.losses.append(Loss(path.name, f"byte {path.stat().st_size}", detail))
            self._database, topics = _connect(path)
        except sqlite3.Error as error:
            raise BagError(f"{path}: cannot be read as a SQLite bag ({error})") from None
        for key, name, kind, encoding in topics:
            if encoding == "cdr":
                self._ids[key], self.topics[name] = name, kind
            else:
                self.losses.append(Loss(path.name, f"topic {name}", f"messages are in {encoding!r}, expected cdr"))

    def close(self) -> None:
        self._database.close()

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        wanted = {key: name for key, name in self._ids.items() if name in topics}
        marks = ",".join(map(str, wanted))
        last, seen = start, set[int]()
        try:
            # Ids are selected first, so that SQLite never sorts images.
            order = f"SELECT id, topic_id, timestamp FROM messages WHERE topic_id IN ({marks}) AND timestamp >= ?"
            for row, key, time in self._database.execute(f"{order} ORDER BY timestamp, id", (start,)):
                stored = self._database.execute("SELECT data FROM messages WHERE id = ?", (row,)).fetchone()
                if stored is None or not isinstance(stored[0], bytes):
                    raise sqlite3.DatabaseError(f"row {row} has no data")
                if time > last:
                    last, seen = time, set()
                seen.add(row)
                yield Record(time, wanted[key], stored[0])
        except sqlite3.DatabaseError as error:
            yield from self._salvage(wanted, last, seen, str(error))

    def _salvage(self, wanted: dict[int, str], last: int, seen: set[int], why: str) -> Iterator[Record]:
        """Read the rows of a damaged file one by one, starting at the time ``last``, except those in ``seen``."""
        row = missing = first_lost = 0
        while missing < _GIVE_UP:
            row += 1
            try:
                query = "SELECT topic_id, timestamp, data FROM messages WHERE id = ?"
                stored = self._database.execute(query, (row,)).fetchone()
            except sqlite3.DatabaseError:
                stored, first_lost = None, first_lost or row
            if stored is None:  # unreadable, deleted, or past the end
                missing += 1
                continue
            missing = 0
            key, time, data = stored
            if key in wanted and isinstance(data, bytes) and (time > last or (time == last and row not in seen)):
                yield Record(time, wanted[key], data)
        first_lost = first_lost or row - _GIVE_UP
        detail = f"the file is damaged or cut off ({why}); from row {first_lost}, damaged rows are lost"
        self.losses.append(Loss(self._name, f"row {first_lost}", detail))


def _connect(path: Path) -> tuple[sqlite3.Connection, list[tuple[int, str, str, str]]]:
    """Open the file read-only and list its topics; skip the write-ahead log in a read-only folder."""
    problem: sqlite3.Error | None = None
    for mode in ("mode=ro", "immutable=1"):
        database = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, check_same_thread=False)
        database.set_authorizer(_allowed)
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")  # names in a damaged file
        try:
            for setting in _SETTINGS:
                database.execute(setting)
            query = "SELECT id, name, type, serialization_format FROM topics"
            return database, database.execute(query).fetchall()
        except sqlite3.Error as error:
            problem = problem or error
        except UnicodeDecodeError:  # in SQLite's error message, which quotes the damaged schema
            problem = problem or sqlite3.DatabaseError("its schema is damaged")
        database.close()
    assert problem is not None
    raise problem


def _missing_bytes(path: Path) -> int:
    """Return how many bytes are missing according to the header; 0 for intact files.

    See section 1.3 of the SQLite file format.
    """
    with path.open("rb") as file:
        head = file.read(100).ljust(100, b"\0")
    size = path.stat().st_size
    page, changes, pages, valid_for = struct.unpack(">16xH6xII60xI4x", head)
    if not head.startswith(b"SQLite format 3\0") or changes != valid_for:  # no valid page count
        return 0
    return max(0, int(pages) * (65536 if page == 1 else int(page)) - size)


_RECURSIVE = 33  # SQLITE_RECURSIVE of sqlite3.h: a recursive common table expression


def _allowed(action: int, first: object, second: object, database: object, view: str | None) -> int:
    """Deny SQLite what only a view can ask for: rosbag2 writes tables, and a view may have rows without end."""
    return sqlite3.SQLITE_DENY if view is not None or action == _RECURSIVE else sqlite3.SQLITE_OK
