"""Reads MCAP files (specification version 0), including unfinished and damaged ones.

The file is read record by record from its start, so only the last records are lost if the recorder lost power.
Uncompressed messages are views of the mapped file, so images are not copied before they are used. Mapped pages are
released, so memory does not grow with the bag. (The library rosbags needs the index at the end and copies
messages.)
"""

from __future__ import annotations

import bisect
import mmap
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from vla_ros.replay.compression import decompress
from vla_ros.replay.records import BagError, Loss, Record

MAGIC = b"\x89MCAP0\r\n"

_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _MESSAGE_INDEX, _CHUNK_INDEX = 2, 3, 4, 5, 6, 7, 8
_KNOWN = frozenset(range(1, 16))
_HEAD = struct.Struct("<BQ")
_MESSAGE_HEAD = struct.Struct("<HIQQ")
_CHUNK_HEAD = struct.Struct("<QQQI")
_RESIDENT_BYTES = 64 << 20  # approximate part of the mapped file in memory
_RUN_BYTES = 4 << 20  # messages outside chunks are grouped into runs of about this size


@dataclass
class _Chunk:
    """The position of a chunk, or of a run of messages outside chunks."""

    offset: int
    stored: int  # bytes in the file
    size: int  # bytes when decompressed
    crc: int
    compression: str
    start: int  # ns, time of the first message
    end: int
    whole: bool = True  # False if the file ends within these records
    channels: set[int] = field(default_factory=set)


class McapFile:
    """An open MCAP file; ``losses`` grows while reading. Raises BagError if the file is not MCAP."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.losses: list[Loss] = []
        self._schemas: dict[int, str] = {}
        self._channels: dict[int, tuple[str, str]] = {}
        self._chunks: list[_Chunk] = []
        self._passed = 0
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise BagError(f"{path}: is empty") from None
        self._bytes = memoryview(self._map)
        self._advise("MADV_RANDOM")  # the walk reads one page of each chunk
        if bytes(self._bytes[:8]) != MAGIC:
            raise BagError(f"{path}: does not begin like an MCAP file; found {bytes(self._bytes[:8])!r}")
        self._walk()
        for chunk in self._chunks:  # an unfinished file has no summary of all topics
            if not chunk.channels or chunk.channels - self._channels.keys():
                for kind, body in self._contents(chunk, verify=False):
                    if kind in (_SCHEMA, _CHANNEL):
                        self._define(kind, body)
        self._chunks.sort(key=lambda chunk: chunk.start)

    @property
    def topics(self) -> dict[str, str]:
        """Topic name to type."""
        return dict(self._channels.values())

    def close(self) -> None:
        """Release the file; it stays mapped as long as views of it exist."""
        self._chunks = []

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        """See :meth:`vla_ros.replay.bag.Bag.records`."""
        wanted = {key: topic for key, (topic, _) in self._channels.items() if topic in topics}
        every_byte = verify or any(chunk.compression for chunk in self._chunks)
        self._advise("MADV_SEQUENTIAL" if every_byte else "MADV_RANDOM")
        pending: list[Record] = []  # chunks overlap in time
        for chunk in self._chunks:
            if chunk.end < start or (chunk.channels and not chunk.channels & wanted.keys()):
                continue
            ready = bisect.bisect_left(pending, chunk.start, key=itemgetter(0))
            yield from pending[:ready]
            del pending[:ready]
            for kind, body in self._contents(chunk, verify):
                if kind == _MESSAGE and len(body) >= _MESSAGE_HEAD.size:
                    channel, _, time, _ = _MESSAGE_HEAD.unpack_from(body)
                    topic = wanted.get(channel)
                    if topic is not None and time >= start:
                        pending.append(Record(time, topic, body[_MESSAGE_HEAD.size :]))
            pending.sort(key=itemgetter(0))
            self._release(chunk.stored)
        yield from pending
        self._release()

    def _lose(self, where: str, what: str) -> None:
        self.losses.append(Loss(self._name, where, what))

    def _walk(self) -> None:
        """Find the chunks, schemas and channels at the top level of the file."""
        at, size = len(MAGIC), len(self._bytes)
        run: _Chunk | None = None
        while at + _HEAD.size <= size:
            kind, length = _HEAD.unpack_from(self._bytes, at)
            body, end = at + _HEAD.size, at + _HEAD.size + length
            if kind == _FOOTER:
                return
            is_chunk = kind == _CHUNK and self._add_chunk(body, min(end, size), end <= size)
            if not is_chunk and (kind == _CHUNK or end > size or (kind not in _KNOWN and kind < 0x80)):
                at = self._after_damage(at, kind)
                continue
            if kind == _MESSAGE and length >= _MESSAGE_HEAD.size:
                run = self._extend(run, at, end)
            elif kind == _MESSAGE_INDEX and self._chunks and length >= 2:
                self._chunks[-1].channels.add(struct.unpack_from("<H", self._bytes, body)[0])
            elif kind in (_SCHEMA, _CHANNEL):
                self._define(kind, self._bytes[body:end])
            self._release(end - at)
            at = end
        self._lose(f"byte {min(at, size)}", "the file was not finished: it ends with the last whole record")

    def _after_damage(self, at: int, kind: int) -> int:
        """Report the damage at ``at`` and return the offset at which reading continues."""
        onward = min((offset for offset in self._indexed() if offset > at), default=len(self._bytes))
        self._lose(f"byte {at}", f"a damaged record (kind {kind}); {onward - at} bytes are lost")
        return onward

    def _indexed(self) -> Iterator[int]:
        """Yield the chunk offsets in the summary at the end of the file, if it is intact."""
        foot = len(self._bytes) - len(MAGIC) - 20 - _HEAD.size
        if foot < len(MAGIC) or bytes(self._bytes[-8:]) != MAGIC:
            return
        kind, length = _HEAD.unpack_from(self._bytes, foot)
        at = struct.unpack_from("<Q", self._bytes, foot + _HEAD.size)[0]
        if kind != _FOOTER or length != 20 or at == 0:
            return
        while at + _HEAD.size <= foot:
            kind, length = _HEAD.unpack_from(self._bytes, at)
            if kind == _CHUNK_INDEX and length >= 24:
                yield struct.unpack_from("<QQQ", self._bytes, at + _HEAD.size)[2]
            at += _HEAD.size + length

    def _extend(self, run: _Chunk | None, at: int, end: int) -> _Chunk:
        """Add a message outside chunks to the current run of such messages, or begin a new run."""
        channel, _, time, _ = _MESSAGE_HEAD.unpack_from(self._bytes, at + _HEAD.size)
        if run is None or run.offset + run.size != at or run.size > _RUN_BYTES:
            run = _Chunk(at, 0, 0, 0, "", time, time)
            self._chunks.append(run)
        run.stored = run.size = end - run.offset
        run.start, run.end = min(run.start, time), max(run.end, time)
        run.channels.add(channel)
        return run

    def _add_chunk(self, body: int, end: int, whole: bool) -> bool:
        """Record the position of a chunk; return False if its header is invalid."""
        try:
            start, last, size, crc = _CHUNK_HEAD.unpack_from(self._bytes, body)
            compression, at = _text(self._bytes, body + _CHUNK_HEAD.size)
            stored = struct.unpack_from("<Q", self._bytes, at)[0]
        except (struct.error, BagError):
            return False
        offset = at + 8
        if offset + stored > end:
            if whole:
                return False
            missing, stored = offset + stored - end, end - offset
            what = f"the last chunk is cut off: {missing} of its {missing + stored} bytes are missing"
            self._lose(f"byte {body - _HEAD.size}", what)
        self._chunks.append(_Chunk(offset, stored, size, crc, compression, start, last, whole))
        return True

    def _define(self, kind: int, body: memoryview) -> None:
        """Register a schema or channel; if it is damaged, skip it and its messages."""
        try:
            if kind == _SCHEMA:
                self._schemas[struct.unpack_from("<H", body)[0]] = _text(body, 2)[0]
                return
            channel, schema = struct.unpack_from("<HH", body)
            topic, at = _text(body, 4)
            encoding, _ = _text(body, at)
        except (struct.error, BagError):
            return
        if encoding == "cdr":
            self._channels[channel] = (topic, self._schemas.get(schema, ""))
        else:
            self._lose(f"topic {topic}", f"messages are in {encoding!r}, expected cdr; they are left out")

    def _contents(self, chunk: _Chunk, verify: bool) -> Iterator[tuple[int, memoryview]]:
        """Yield the kind and body of each record in a chunk; nothing if it is damaged."""
        data = self._bytes[chunk.offset : chunk.offset + chunk.stored]
        try:
            if chunk.compression:
                data = memoryview(decompress(data, chunk.compression, chunk.size, partial=not chunk.whole))
            if verify and chunk.whole and chunk.crc and zlib.crc32(data) != chunk.crc:
                raise BagError("fails its checksum")
        except BagError as error:
            span = f"from {chunk.start / 1e9:.3f} to {chunk.end / 1e9:.3f} s"
            self._lose(f"byte {chunk.offset}", f"chunk {error}; its messages {span} are lost")
            return
        at, size = 0, len(data)
        while at + _HEAD.size <= size:
            kind, length = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + length
            if end > size:
                return
            yield kind, data[at + _HEAD.size : end]
            at = end

    def _release(self, passed: int = _RESIDENT_BYTES) -> None:
        """Release mapped pages after every 64 MiB; the kernel reloads pages that are still in use."""
        self._passed += passed
        if self._passed >= _RESIDENT_BYTES:
            self._passed = 0
            self._advise("MADV_DONTNEED")

    def _advise(self, name: str) -> None:
        """Tell the kernel how the file will be read, if the system supports it."""
        if hasattr(mmap, name):
            self._map.madvise(getattr(mmap, name))


def _text(data: memoryview, at: int) -> tuple[str, int]:
    """Return a length-prefixed string and the offset after it."""
    length = struct.unpack_from("<I", data, at)[0]
    end = at + 4 + length
    if end > len(data):
        raise BagError("a string is longer than its record")
    return bytes(data[at + 4 : end]).decode("utf-8", errors="replace"), end
