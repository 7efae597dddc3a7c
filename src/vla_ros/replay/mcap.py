"""Reads MCAP files with the library ``mcap``, including unfinished and damaged ones.

A finished file is read chunk by chunk through its index, so damage is limited to the chunks it is in. A file whose
recorder lost power has no index: it is scanned once when it is opened, up to its last whole record.
"""

import bisect
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from mcap.exceptions import McapError
from mcap.reader import SeekingReader
from mcap.records import Channel, Chunk, McapRecord, Message, Schema
from mcap.stream_reader import StreamReader, breakup_chunk

from vla_ros.replay.storage import MAX_CHUNK, BagError, Loss, Record, decompress

MAGIC = b"\x89MCAP0\r\n"
DAMAGE = (McapError, BagError, struct.error, ValueError, OverflowError, MemoryError)
"""What the library raises on damaged records."""

_RUN_BYTES = 4 << 20  # messages outside chunks are grouped into runs of about this size


@dataclass
class _Piece:
    """The position of a chunk, or of a run of messages outside chunks."""

    offset: int
    stop: int  # offset after its last record
    start: int  # ns, time of the first message
    end: int
    channels: set[int]  # empty if unknown


class McapFile:
    """An open MCAP file; ``losses`` grows while reading. Raises BagError if the file is not MCAP."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.losses: list[Loss] = []
        self._schemas: dict[int, str] = {}
        self._channels: dict[int, tuple[str, str]] = {}
        self._pieces: list[_Piece] = []
        self._file = path.open("rb")
        magic = self._file.read(len(MAGIC))
        if magic != MAGIC:
            self._file.close()
            raise BagError(
                f"{path}: does not begin like an MCAP file; found {magic!r}" if magic else f"{path}: is empty"
            )
        if not self._read_index():
            self._scan()
        self._pieces.sort(key=lambda piece: piece.start)

    @property
    def topics(self) -> dict[str, str]:
        return dict(self._channels.values())

    def close(self) -> None:
        self._file.close()

    def records(self, topics: Collection[str], start: int = 0, *, verify: bool = True) -> Iterator[Record]:
        wanted = {key: topic for key, (topic, _) in self._channels.items() if topic in topics}
        pending: list[Record] = []  # chunks overlap in time
        for piece in self._pieces:
            if piece.end < start or (piece.channels and not piece.channels & wanted.keys()):
                continue
            ready = bisect.bisect_left(pending, piece.start, key=itemgetter(0))
            yield from pending[:ready]
            del pending[:ready]
            for message in self._messages(piece, verify):
                topic = wanted.get(message.channel_id)
                if topic is not None and message.log_time >= start:
                    pending.append(Record(message.log_time, topic, message.data))
            pending.sort(key=itemgetter(0))
        yield from pending

    def _read_index(self) -> bool:
        """Take pieces, schemas and channels from the summary; return False if there is none, or it is damaged."""
        self._file.seek(0)
        try:
            summary = SeekingReader(self._file, record_size_limit=MAX_CHUNK).get_summary()
        except (*DAMAGE, OSError):
            return False
        if summary is None or not summary.chunk_indexes or not summary.channels:
            return False
        for record in (*summary.schemas.values(), *summary.channels.values()):
            self._define(record)
        for one in summary.chunk_indexes:
            stop, channels = one.chunk_start_offset + one.chunk_length, set(one.message_index_offsets)
            piece = _Piece(one.chunk_start_offset, stop, one.message_start_time, one.message_end_time, channels)
            self._pieces.append(piece)
        return True

    def _scan(self) -> None:
        at, run = len(MAGIC), None
        self._file.seek(at)
        try:
            for record in self._stream():
                stop = self._file.tell()
                if isinstance(record, Chunk):
                    inside = self._break_up(record, at, verify=False)
                    for one in inside:
                        self._define(one)
                    channels = {one.channel_id for one in inside if isinstance(one, Message)}
                    times = record.message_start_time, record.message_end_time
                    self._pieces.append(_Piece(at, stop, *times, channels))
                elif isinstance(record, Message):
                    if run is None or run.stop != at or run.stop - run.offset > _RUN_BYTES:
                        run = _Piece(at, stop, record.log_time, record.log_time, set())
                        self._pieces.append(run)
                    run.stop = stop
                    run.start, run.end = min(run.start, record.log_time), max(run.end, record.log_time)
                    run.channels.add(record.channel_id)
                else:
                    self._define(record)
                at = stop
        except DAMAGE:
            self._lose(at, "the file was not finished: it ends with the last whole record")

    def _stream(self) -> Iterator[McapRecord]:
        reader = StreamReader(self._file, skip_magic=True, emit_chunks=True, record_size_limit=MAX_CHUNK)
        return reader.records

    def _messages(self, piece: _Piece, verify: bool) -> Iterator[Message]:
        """Yield the messages of a piece; nothing of a chunk that is damaged."""
        self._file.seek(piece.offset)
        found = False
        try:
            for record in self._stream():
                if isinstance(record, Chunk):
                    inside = self._break_up(record, piece.offset, verify)
                    yield from (one for one in inside if isinstance(one, Message))
                elif isinstance(record, Message):
                    yield record
                else:
                    break
                found = True
                if self._file.tell() >= piece.stop:
                    break
        except DAMAGE:
            found = False
        if not found:
            span = f"from {piece.start / 1e9:.3f} to {piece.end / 1e9:.3f} s"
            detail = f"a damaged record; {piece.stop - piece.offset} bytes are lost, with the messages {span}"
            self._lose(piece.offset, detail)

    def _break_up(self, chunk: Chunk, offset: int, verify: bool) -> list[McapRecord]:
        """Return the records in a chunk; none, with a loss, if it is damaged."""
        try:
            if chunk.compression:
                data = decompress(chunk.data, chunk.compression, chunk.uncompressed_size)
                chunk = replace(chunk, compression="", data=data)
            return breakup_chunk(chunk, validate_crc=verify)
        except DAMAGE as error:
            span = f"from {chunk.message_start_time / 1e9:.3f} to {chunk.message_end_time / 1e9:.3f} s"
            self._lose(offset, f"chunk is damaged ({error}); its messages {span} are lost")
            return []

    def _define(self, record: McapRecord) -> None:
        if isinstance(record, Schema):
            self._schemas[record.id] = record.name
        elif isinstance(record, Channel) and record.id not in self._channels:
            if record.message_encoding == "cdr":
                self._channels[record.id] = record.topic, self._schemas.get(record.schema_id, "")
            else:
                found = f"messages are in {record.message_encoding!r}, expected cdr; they are left out"
                self.losses.append(Loss(self._name, f"topic {record.topic}", found))

    def _lose(self, offset: int, what: str) -> None:
        self.losses.append(Loss(self._name, f"byte {offset}", what))
