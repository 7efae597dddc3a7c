"""Reads MCAP files, including unfinished and damaged ones; the library ``mcap`` parses the records.

A finished file is read chunk by chunk through its index, so damage is limited to the chunks it is in. A file whose
recorder lost power has no index: it is scanned once when it is opened, up to its last whole record.
"""

import bisect
import io
import os
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Channel, ChunkIndex, Schema, Statistics

from vla_ros_lab.replay.storage import (
    BAD_TIME,
    MAX_CHUNK,
    MAX_TIME,
    BagError,
    Expansion,
    Loss,
    Record,
    decompress,
    full_type_name,
)

MAGIC = b"\x89MCAP0\r\n"
DAMAGE = (McapError, BagError, struct.error, ValueError, OverflowError, MemoryError)
"""What damaged records raise when they are parsed."""

_RUN_BYTES = 4 << 20  # messages outside chunks are grouped into runs of about this size
_HEAD = struct.Struct("<BQ")  # of a record: opcode, and bytes that follow
_MESSAGE = struct.Struct("<HIQQ")  # channel, sequence, receive and publish time; then the data
_CHUNK = struct.Struct("<QQQII")  # start, end, size, checksum, length of the name of the compression
_FOOTER = struct.Struct("<BQQQI8s")  # opcode, 20, start of the summary, start of its offsets, checksum, magic
_KNOWN = frozenset(map(int, Opcode))
_MOST_UNKNOWN = 1000  # records of unknown kinds in a row; what has more is no MCAP
_Message = tuple[int, int, memoryview, int]  # receive time, channel, data, its offset (-1 if compressed)


@dataclass
class _Piece:
    """The position of a chunk, or of a run of messages outside chunks."""

    offset: int
    stop: int  # offset after its last record
    start: int  # ns, time of the first message
    end: int
    channels: set[int] | None  # None if unknown


class McapFile:
    """An open MCAP file; ``losses`` grows while reading. Raises BagError if the file is not MCAP."""

    def __init__(self, path: Path) -> None:
        self._path, self._name = path, path.name
        self._losses: dict[Loss, None] = {}
        self._schemas: dict[int, str] = {}
        self._channels: dict[int, tuple[str, str]] = {}
        self._counts: dict[int, int] | None = None  # messages per channel, if the file says so
        self._pieces: list[_Piece] = []
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        magic = self._file.read(len(MAGIC))
        if magic != MAGIC:
            self._file.close()
            found = f"does not begin like an MCAP file; found {magic!r}" if magic else "is empty"
            raise BagError(f"{path}: {found}")
        if not self._read_index():
            self._pieces.clear()
            self._scan()
        self._pieces.sort(key=lambda piece: (piece.start, piece.offset))

    @property
    def losses(self) -> list[Loss]:
        return list(self._losses)

    @property
    def topics(self) -> dict[str, str]:
        return dict(self._channels.values())

    @property
    def silent(self) -> frozenset[str]:
        """The topics that certainly have no messages."""
        known = [piece.channels for piece in self._pieces if piece.channels is not None]
        filled = set().union(*known)
        if len(known) < len(self._pieces):
            counts = self._counts
            filled |= {key for key in self._channels if counts is None or counts.get(key)}
        return frozenset(self.topics) - {self._channels[key][0] for key in filled & self._channels.keys()}

    def close(self) -> None:
        self._file.close()

    def records(self, topics: Collection[str], start: int = 0) -> Iterator[Record]:
        """Yield messages in order of time, and of the file if times are equal."""
        wanted = {key: topic for key, (topic, _) in self._channels.items() if topic in topics}
        expansion, last, held = Expansion(self.size), 0, 0
        pending: list[tuple[int, int, Record]] = []  # time, offset of the chunk; chunks overlap in time
        ends = [*(piece.start for piece in self._pieces[1:]), MAX_TIME]
        for piece, following in zip(self._pieces, ends, strict=False):
            if piece.end < start or (piece.channels is not None and not piece.channels & wanted.keys()):
                continue
            ready = bisect.bisect_left(pending, (piece.start, piece.offset), key=itemgetter(0, 1))
            if held > MAX_CHUNK:  # one message of another time in each chunk makes all chunks overlap
                ready = max(ready, len(pending) // 2)
            for last, _, record in pending[:ready]:  # noqa: B007 - the last one's time is used
                held -= len(record.data)
                yield record
            del pending[:ready]
            for time, channel, data, offset in self._messages(piece, expansion):
                topic = wanted.get(channel)
                if topic is None or time < start:
                    continue
                if time >= MAX_TIME:
                    self._lose(f"topic {topic}", BAD_TIME)
                elif time < last:
                    self._lose(f"topic {topic}", "messages far earlier than the ones before them are left out")
                else:
                    held += len(data)
                    # What waits is copied: a view would keep its whole chunk.
                    kept = bytes(data) if time >= following else data
                    place = (self._path, offset) if offset >= 0 else None
                    pending.append((time, piece.offset, Record(time, topic, kept, place)))
            pending.sort(key=itemgetter(0, 1))
            if why := expansion.spend(0):
                self._lose(piece.offset, why)
                break
        yield from (record for _, _, record in pending)

    def _read_index(self) -> bool:
        """Take pieces, schemas and channels from the summary; return False if there is none, or it is damaged."""
        try:
            _, _, summary, _, checksum, magic = _FOOTER.unpack(self._read(self.size - _FOOTER.size, self.size))
            if magic != MAGIC or not summary or (checksum and checksum != self._checksum(summary)):
                return False
            covered: list[tuple[int, int]] = [(len(MAGIC), len(MAGIC))]
            for opcode, begin, end in self._walk(summary, self.size - _FOOTER.size):
                if opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
                    self._define(opcode, self._read(begin, end))
                elif opcode == Opcode.STATISTICS:
                    self._counts = _parse(Statistics, self._read(begin, end)).channel_message_counts
                elif opcode == Opcode.CHUNK_INDEX:
                    one = _parse(ChunkIndex, self._read(begin, end))
                    at, stop, indexed = one.chunk_start_offset, one.chunk_length, one.message_index_length
                    times = one.message_start_time, one.message_end_time
                    self._pieces.append(_Piece(at, at + stop, *times, set(one.message_index_offsets) or None))
                    covered.append((at, at + stop + indexed))
        except (*DAMAGE, OSError):
            return False
        covered.sort()
        edges = zip(covered, [*covered[1:], (summary, summary)], strict=True)
        return bool(self._pieces and self._channels) and all(self._is_complete(a, b) for (_, a), (b, _) in edges)

    def _checksum(self, summary: int) -> int:
        """Return the checksum of the summary and of the footer up to its own checksum."""
        return zlib.crc32(self._read(summary, self.size - len(MAGIC) - 4))

    def _is_complete(self, at: int, stop: int) -> bool:
        """Return False if pieces of the index overlap, or if there are messages between them."""
        try:
            return at <= stop and {Opcode.CHUNK, Opcode.MESSAGE}.isdisjoint(one[0] for one in self._walk(at, stop))
        except BagError:
            return True

    def _scan(self) -> None:
        at, run, expansion = len(MAGIC), None, Expansion(self.size)
        before = at  # where the record before begins
        try:
            for opcode, begin, end in self._walk(at, self.size):
                if opcode == Opcode.FOOTER:
                    return
                if opcode == Opcode.CHUNK:
                    start, stop, *_ = _CHUNK.unpack(self._read(begin, begin + _CHUNK.size))
                    channels = {one[1] for one in self._chunk(begin, end, expansion, verify=False)}
                    self._pieces.append(_Piece(at, end, start, stop, channels))
                    if why := expansion.spend(0):
                        self._lose(at, why)
                        return
                elif opcode == Opcode.MESSAGE:
                    channel, _, time, _ = _MESSAGE.unpack(self._read(begin, begin + _MESSAGE.size))
                    if run is None or run.stop != at or run.stop - run.offset > _RUN_BYTES:
                        run = _Piece(at, end, time, time, set())
                        self._pieces.append(run)
                    run.stop, run.start, run.end = end, min(run.start, time), max(run.end, time)
                    assert run.channels is not None
                    run.channels.add(channel)
                elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
                    self._define(opcode, self._read(begin, end))
                before, at = at, end
            raise BagError("it has no end")
        except DAMAGE as error:
            if run is not None and run.stop == at and _ends_in_zeros(memoryview(self._read(before, at))):
                run.stop = before  # its own end may be what was lost
            self._lose(at, f"the file was not finished: it ends with the last whole record ({error})")

    def _walk(self, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield opcode, start and end of each record's content, until ``stop`` or the end of the data.

        Raises BagError where there is no whole record. The opcode 0 is none, so that zeros end the file.
        """
        unknown = 0
        while at < stop:
            self._file.seek(at)
            head = self._file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise BagError("cut off")
            opcode, length = _HEAD.unpack(head)
            begin, end = at + _HEAD.size, at + _HEAD.size + length
            unknown = 0 if opcode in _KNOWN else unknown + 1
            if not opcode or unknown > _MOST_UNKNOWN:
                raise BagError("what follows has no records, such as zeros")
            if end > stop and opcode != Opcode.CHUNK:
                raise BagError("cut off")
            end = min(end, stop)  # a chunk that is cut off has messages, too
            yield opcode, begin, end
            at = end

    def _read(self, begin: int, end: int) -> bytes:
        self._file.seek(begin)
        return self._file.read(end - begin)

    def _messages(self, piece: _Piece, expansion: Expansion) -> list[_Message]:
        """Return the messages of a piece, those before its damage; nothing of a chunk with a wrong checksum."""
        found: list[_Message] = []
        try:
            for opcode, begin, end in self._walk(piece.offset, piece.stop):
                if opcode == Opcode.CHUNK:  # whose own length may be damaged, where the index has it
                    return self._chunk(begin, piece.stop, expansion)
                if opcode != Opcode.MESSAGE:
                    raise BagError("another record")
                found.append(_message(memoryview(self._read(begin, end)), begin))
        except (*DAMAGE, OSError):
            span = f"from {piece.start / 1e9:.3f} to {piece.end / 1e9:.3f} s"
            detail = f"a damaged record; {piece.stop - piece.offset} bytes are lost, with messages {span}"
            self._lose(piece.offset, detail)
        return found

    def _chunk(self, begin: int, end: int, expansion: Expansion, *, verify: bool = True) -> list[_Message]:
        """Return the messages in a chunk, those before its damage, and take its definitions.

        Returns nothing if it cannot be decompressed or, with ``verify``, has another checksum than stated.
        """
        content, found = memoryview(self._read(begin, end)), list[_Message]()
        start, stop, size, checksum, at = _CHUNK.unpack_from(content)
        try:
            at += _CHUNK.size
            compression = str(content[_CHUNK.size : at], "utf-8")
            (length,) = struct.unpack_from("<Q", content, at)
            data = content[at + 8 : at + 8 + length]
            first = begin + at + 8
            if compression:
                if expansion.spend(size):
                    return []
                data = memoryview(decompress(data, compression, size))
            is_cut = len(data) < min(length, size)  # of which one may be damaged
            if verify and checksum and not is_cut and checksum != (actual := zlib.crc32(data)):
                raise BagError(f"its checksum is {actual:#x}, expected {checksum:#x}")
            for opcode, at, record in _records_in(data):
                if opcode == Opcode.MESSAGE:
                    found.append(_message(record, -1 if compression else first + at))
                else:
                    self._define(opcode, record)
            if is_cut:
                raise BagError("cut off")
        except DAMAGE as error:
            if found and _ends_in_zeros(found[-1][2]):
                found.pop()  # its own end may be what was lost
            lost = "its other messages" if found else "its messages"
            span = f"from {start / 1e9:.3f} to {stop / 1e9:.3f} s"
            self._lose(begin - _HEAD.size, f"chunk is damaged ({error}); {lost} {span} are lost")
        return found

    def _define(self, opcode: int, content: bytes | memoryview) -> None:
        """Take a schema or a channel; other records are ignored."""
        if opcode == Opcode.SCHEMA:
            schema = _parse(Schema, content)
            self._schemas[schema.id] = full_type_name(schema.name)
        elif opcode == Opcode.CHANNEL:
            channel = _parse(Channel, content)
            if channel.id in self._channels:
                return
            topic, kind = channel.topic, self._schemas.get(channel.schema_id, "")
            problem, before = "", self.topics.get(topic, kind)
            if channel.message_encoding != "cdr":
                problem = f"messages are in {channel.message_encoding!r}, expected cdr; they are left out"
            elif before != kind:
                problem = f"has messages of {before} and of {kind}; the latter are left out"
            if problem:
                self._lose(f"topic {topic}", problem)
            else:
                self._channels[channel.id] = topic, kind

    def _lose(self, where: int | str, what: str) -> None:
        self._losses[Loss(self._name, f"byte {where}" if isinstance(where, int) else where, what)] = None


def _records_in(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield opcode, start and content of each record in a chunk; raises BagError where there is no whole record."""
    at = unknown = 0
    while at < len(data):
        opcode, length = _HEAD.unpack_from(data, at)
        begin, at = at + _HEAD.size, at + _HEAD.size + length
        unknown = 0 if opcode in _KNOWN else unknown + 1
        if not opcode or unknown > _MOST_UNKNOWN or at > len(data):
            raise BagError(f"no whole record at its byte {begin - _HEAD.size}")
        yield opcode, begin, data[begin:at]


def _ends_in_zeros(data: memoryview) -> bool:
    return not any(data[-1:])  # one byte of it may be all that was lost


def _message(record: memoryview, at: int) -> _Message:
    """Return the message of a record at the offset ``at``, negative if it is in no file."""
    channel, _, time, _ = _MESSAGE.unpack_from(record)
    return time, channel, record[_MESSAGE.size :], at + _MESSAGE.size if at >= 0 else -1


def _parse(kind: Any, content: bytes | memoryview) -> Any:
    return kind.read(ReadDataStream(io.BytesIO(content)))
