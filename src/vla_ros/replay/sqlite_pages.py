"""Large rows of a SQLite table straight from the mapped file: a third of the time that SQLite's own reading takes.

SQLite fetches a row of a megabyte page by page, 4 kB and a system call each, and copies it three times; camera
frames are such rows, and their pages lie one after the other because a recorder only appends. Here the row is
looked up in the table's tree and its pages are gathered with one copy. The layout is that of "Database File Format"
(sqlite.org/fileformat2.html), sections 1.3 to 1.6 and 2.1.

Whatever is not as expected (a write-ahead log, a page of another kind, a chain that ends early) gives None, and the
caller asks SQLite, which then also says what is wrong. This reader is fast, SQLite is the authority.
"""

from __future__ import annotations

import bisect
import mmap
import struct
from pathlib import Path

import numpy as np

_INTERIOR, _LEAF = 5, 13  # kinds of b-tree pages of tables
_MAX_DEPTH = 20
_RESIDENT_BYTES = 64 << 20  # of the mapped file in memory, about
_REMEMBERED = 32  # interior pages of the tree


class RowReader:
    """Reads one column of single rows of one table. Used from one thread.

    Args:
        path: A file in which no transaction is going on.
        root: The table's first page (``sqlite_master.rootpage``).
        column: Which column of the table, counted from 0; it must hold a BLOB.
    """

    def __init__(self, path: Path, root: int, column: int) -> None:
        self._root, self._column = root, column
        self._passed = 0
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            self._map.madvise(mmap.MADV_SEQUENTIAL)
        size = int(struct.unpack_from(">H", self._map, 16)[0])
        self._size = 65536 if size == 1 else size
        self._usable = self._size - self._map[20]
        whole = len(self._map) // self._size
        self._pages = np.frombuffer(self._map, np.uint8, whole * self._size).reshape(whole, self._size)
        self._interior: dict[int, tuple[list[int], list[int]]] = {}

    def read(self, row: int) -> memoryview | None:
        """The column's bytes of the row with this rowid; None where SQLite must be asked."""
        try:
            cell = self._find(row)
            found = self._blob(cell) if cell is not None else None
        except (IndexError, ValueError, struct.error):  # an offset beyond the page or the file: damage
            return None
        if found is not None:
            self._release(len(found))
        return found

    def _find(self, row: int) -> int | None:
        """Offset in the file of the row's cell."""
        page = self._root
        for _ in range(_MAX_DEPTH):
            start = (page - 1) * self._size
            head = start + (100 if page == 1 else 0)
            kind = self._map[head]
            if kind == _LEAF:
                (cells,) = struct.unpack_from(">H", self._map, head + 3)
                for pointer in struct.unpack_from(f">{cells}H", self._map, head + 8):
                    cell = start + int(pointer)
                    if self._key(cell, kind) == row:
                        return cell
                return None
            if kind != _INTERIOR:
                return None
            keys, children = self._children(page, start, head)
            page = children[bisect.bisect_left(keys, row)]
        return None

    def _children(self, page: int, start: int, head: int) -> tuple[list[int], list[int]]:
        """The keys [C] of an interior page, ascending, and its children [C + 1]."""
        known = self._interior.get(page)
        if known is None:
            (cells,) = struct.unpack_from(">H", self._map, head + 3)
            pointers = struct.unpack_from(f">{cells}H", self._map, head + 12)
            keys = [self._key(start + pointer, _INTERIOR) for pointer in pointers]
            children = [struct.unpack_from(">I", self._map, start + pointer)[0] for pointer in pointers]
            known = keys, [*children, struct.unpack_from(">I", self._map, head + 8)[0]]
            if len(self._interior) >= _REMEMBERED:
                self._interior.clear()
            self._interior[page] = known
        return known

    def _key(self, cell: int, kind: int) -> int:
        """The rowid of a cell."""
        return self._number(cell + 4 if kind == _INTERIOR else self._number(cell)[1])[0]

    def _number(self, at: int) -> tuple[int, int]:
        """A variable-length integer and where it ends."""
        value = 0
        for index in range(8):
            byte = self._map[at + index]
            value = value << 7 | byte & 0x7F
            if byte < 0x80:
                return value, at + index + 1
        return value << 8 | self._map[at + 8], at + 9

    def _blob(self, cell: int) -> memoryview | None:
        """The column of the record in a cell of a leaf page."""
        length, at = self._number(cell)
        _, at = self._number(at)
        head, types = self._number(at)
        end, skipped = at + head, head
        for _ in range(self._column):
            kind, types = self._number(types)
            skipped += _width(kind)
        kind, types = self._number(types)
        if kind < 12 or kind % 2 or types > end:
            return None
        size = (kind - 12) // 2
        local = self._local(length)
        if skipped > local or skipped + size > length or length > len(self._map):
            return None
        if local == length:
            return memoryview(self._map)[at + skipped : at + skipped + size]
        result = np.empty(length - skipped, np.uint8)
        result[: local - skipped] = np.frombuffer(self._map, np.uint8, local - skipped, at + skipped)
        following = struct.unpack_from(">I", self._map, at + local)[0]
        return result.data[:size] if self._follow(following, result[local - skipped :]) else None

    def _local(self, length: int) -> int:
        """How many of a record's bytes lie in its leaf page (section 1.6)."""
        most = self._usable - 35
        if length <= most:
            return length
        least = (self._usable - 12) * 32 // 255 - 23
        fitting = least + (length - least) % (self._usable - 4)
        return fitting if fitting <= most else least

    def _follow(self, page: int, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
        """Fill ``target`` from the chain of overflow pages that begins at ``page``; False where it ends early."""
        each, done = self._usable - 4, 0
        while done < len(target):
            count = -(-(len(target) - done) // each)
            if not 1 <= page <= len(self._pages):
                return False
            run = self._pages[page - 1 : page - 1 + count]
            following = np.ascontiguousarray(run[:, :4]).view(">u4")[:, 0]
            breaks = np.flatnonzero(following != np.arange(page + 1, page + 1 + len(run)))
            run = run[: breaks[0] + 1] if len(breaks) else run
            whole = min(len(run), (len(target) - done) // each)
            target[done : done + whole * each].reshape(whole, each)[:] = run[:whole, 4 : self._usable]
            done += whole * each
            if whole < len(run):
                rest = len(target) - done
                target[done:] = run[whole, 4 : 4 + rest]
                done += rest
            page = int(following[len(run) - 1])
        return page == 0

    def _release(self, passed: int) -> None:
        """Give mapped pages back once enough bytes have been passed."""
        self._passed += passed
        if self._passed >= _RESIDENT_BYTES and hasattr(self._map, "madvise"):
            self._passed = 0
            self._map.madvise(mmap.MADV_DONTNEED)


def _width(kind: int) -> int:
    """Bytes of a value of a serial type (section 2.1)."""
    if kind >= 12:
        return (kind - 12) // 2 if kind % 2 == 0 else (kind - 13) // 2
    return (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)[kind]
