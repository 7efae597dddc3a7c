"""Reads SQLite bags (``.db3``) of every distribution, including damaged ones.

rosbag2_storage_sqlite3 writes the tables ``topics(id, name, type, serialization_format, ...)`` and ``messages(id,
topic_id, timestamp, data)``.
"""

import sqlite3
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from vla_ros_lab.replay.storage import BAD_TIME, MAX_TIME, BagError, Loss, Record, full_type_name

_STEPS = 100_000  # of SQLite's virtual machine, between two looks at how much it has done
_STEPS_PER_BYTE = 20  # of the file, for one answer; sorting the rows of the smallest messages takes less than 2
_ROW_BYTES = 8  # that a row has at least
_GIVE_UP = 2000  # consecutive unreadable rows; after that, the rest counts as lost
_MOST_TOPICS = 10_000
_SETTINGS = (
    "PRAGMA writable_schema = ON",  # otherwise SQLite refuses a file that is shorter than its header states
    "PRAGMA cache_size = 16",  # pages; each image is read once, and a large cache only makes it slower
)


class SqliteFile:
    """An open ``.db3`` file; ``topics`` maps name to type, ``losses`` grows while reading.

    Raises BagError if the file is not a SQLite bag, or its list of topics cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._name, self.size = path.name, path.stat().st_size
        self._losses: dict[Loss, None] = {}
        self.topics: dict[str, str] = {}
        self._ids: dict[int, str] = {}
        self._steps = 0
        try:
            if missing := _missing_bytes(path):
                self._lose(f"byte {self.size}", f"the file was cut off; its last {missing} bytes are lost")
            self._database, topics = _connect(path)
        except sqlite3.Error as error:
            raise BagError(f"{path}: cannot be read as a SQLite bag ({error})") from None
        self._database.set_progress_handler(self._count_steps, _STEPS)
        for key, name, kind, encoding in topics:
            problem, found = "", full_type_name(str(kind))
            if encoding != "cdr":
                problem = f"messages are in {encoding!r}, expected cdr; they are left out"
            elif self.topics.get(name, found) != found:
                problem = f"has messages of {self.topics[name]} and of {found}; the latter are left out"
            if problem:
                self._lose(f"topic {name}", problem)
            elif isinstance(key, int) and isinstance(name, str):
                self._ids[key], self.topics[name] = name, found

    @property
    def losses(self) -> list[Loss]:
        return list(self._losses)

    @property
    def silent(self) -> frozenset[str]:
        """The topics that certainly have no messages."""
        try:
            self._steps = 0
            filled = {key for (key,) in self._database.execute("SELECT DISTINCT topic_id FROM messages")}
        except sqlite3.DatabaseError:
            return frozenset()
        return frozenset(self.topics) - {name for key, name in self._ids.items() if key in filled}

    def close(self) -> None:
        self._database.close()

    def records(self, topics: Collection[str], start: int = 0) -> Iterator[Record]:
        """Yield messages in order of time, and of their rows if times are equal."""
        wanted = {key: name for key, name in self._ids.items() if name in topics}
        marks = ",".join(map(str, wanted))
        last, seen, count, self._steps = start, set[int](), 0, 0
        try:
            # Ids are selected first, so that SQLite never sorts images.
            order = f"SELECT id, topic_id, timestamp FROM messages WHERE topic_id IN ({marks})"
            order += f" AND timestamp >= {start}" if start else ""
            for row, key, time in self._database.execute(f"{order} ORDER BY timestamp, id"):
                count += 1
                if count * _ROW_BYTES > self.size:
                    raise sqlite3.DatabaseError("more rows than fit into the file")
                if not isinstance(time, int) or time < 0:
                    self._lose(f"topic {wanted[key]}", BAD_TIME)
                    continue
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
        row = missing = first_lost = self._steps = 0
        found: list[tuple[int, int, int]] = []  # time, row, topic
        while missing < _GIVE_UP:
            row += 1
            stored: tuple[object, object] | None
            try:
                query = "SELECT topic_id, timestamp FROM messages WHERE id = ?"
                stored = self._database.execute(query, (row,)).fetchone()
            except sqlite3.DatabaseError:
                stored, first_lost = None, first_lost or row
            if stored is None:  # unreadable, deleted, or past the end
                missing += 1
                continue
            missing = 0
            key, time = stored
            if isinstance(time, int) and isinstance(key, int) and key in wanted and last <= time < MAX_TIME:
                found.append((time, row, key))
        first_lost = first_lost or row - _GIVE_UP
        for time, one, key in sorted(found):
            if time == last and one in seen:
                continue
            try:
                row_data = self._database.execute("SELECT data FROM messages WHERE id = ?", (one,)).fetchone()
                data = row_data[0] if row_data else None
            except sqlite3.DatabaseError:
                data = None
            if isinstance(data, bytes):
                yield Record(time, wanted[key], data)
            else:
                first_lost = min(first_lost, one)
        detail = f"the file is damaged or cut off ({why}); from row {first_lost}, damaged rows are lost"
        self._lose(f"row {first_lost}", detail)

    def _count_steps(self) -> bool:
        """End a query that works for longer than the file's size explains, in a damaged or malicious file."""
        self._steps += _STEPS
        return self._steps > 100 * _STEPS + _STEPS_PER_BYTE * self.size

    def _lose(self, where: str, what: str) -> None:
        self._losses[Loss(self._name, where, what)] = None


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
            for table in ("topics", "messages"):
                _check_table(database, table)
            query = "SELECT id, name, type, serialization_format FROM topics"
            topics = database.execute(query).fetchmany(_MOST_TOPICS + 1)
            if len(topics) > _MOST_TOPICS:
                raise sqlite3.DatabaseError(f"it has more than {_MOST_TOPICS} topics")
            return database, topics
        except sqlite3.Error as error:
            problem = problem or error
        except UnicodeDecodeError:  # in SQLite's error message, which quotes the damaged schema
            problem = problem or sqlite3.DatabaseError("its schema is damaged")
        database.close()
    assert problem is not None
    raise problem


def _check_table(database: sqlite3.Connection, name: str) -> None:
    """Raise DatabaseError unless ``name`` is a table that stores what it has; a view may be endless."""
    found = database.execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    kind, text = found or ("nothing", "")
    columns = database.execute(f"PRAGMA table_xinfo({name})").fetchall()
    if kind != "table" or "virtual" in str(text).lower().split()[:2] or any(column[-1] for column in columns):
        raise sqlite3.DatabaseError(f"{name}: found {kind}, expected a table without computed columns")


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
