"""MCAP files that are complete up to the last write, whatever ends their writer.

A file is a run of chunks, each followed by its message indexes. The summary is appended at the end; repairing
appends it as well, after the last chunk was rewritten with those of its messages that are whole. Chunks are not
compressed and have no checksums: at two cameras of 640x480 and 30 Hz, either would take as much processor time as
everything else.
"""

import fcntl
import io
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from mcap.data_stream import ReadDataStream, RecordBuilder
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Channel, ChunkIndex, DataEnd, Footer, Header, MessageIndex, Schema, Statistics

from vla_ros import __version__
from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.graph.qos import profile
from vla_ros.record.topics import Recorded, Topic

_MAGIC = b"\x89MCAP0\r\n"
_RECORD = struct.Struct("<BQ")  # opcode, and bytes that follow
# A message record up to its data: opcode, bytes that follow, channel, sequence, receive and publish time.
_MESSAGE = struct.Struct("<BQHIQQ")
# A chunk record up to its data: opcode, bytes that follow, start, end, size, checksum, compression, size.
_CHUNK = struct.Struct("<BQQQQIIQ")
_PARTS = 1000  # that one call writes at most; Linux allows 1024
_LIBRARY = "vla_ros"  # first word of the header's library
_FOREVER = {"sec": 9223372036, "nsec": 854775807}


class RecordError(VlaRosError):
    """A recording cannot be written or repaired."""


class RecordingFile:
    """An MCAP file and what its summary says, a context manager. Open, nobody else repairs it."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._end = file, 0  # offset after the last whole record
        self._schemas: dict[int, Schema] = {}
        self.channels: dict[int, Channel] = {}
        self._chunks: list[bytes] = []  # their indexes, serialized: a recording of hours has many
        self.span = 0, 0  # times of the first and last message in nanoseconds
        self.counts: Counter[int] = Counter()  # messages of each channel
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RecordError(f"{file.name}: another process is recording it") from None

    def __enter__(self) -> "RecordingFile":
        return self

    def __exit__(self, *details: object) -> None:
        self._file.close()

    @property
    def name(self) -> str:
        return Path(str(self._file.name)).name

    @property
    def is_there(self) -> bool:
        """True while the file has its name; a removed or moved file can still be written, and nobody finds it."""
        try:
            return os.path.samestat(Path(str(self._file.name)).stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    @property
    def is_removed(self) -> bool:
        """True if the file has no name at all, so that its content is lost."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def sync(self) -> None:
        """Wait for the disk, and free the memory that the file had: nobody reads it now."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def begin(self, topics: Sequence[Topic]) -> None:
        """Write the header, and define the topics."""
        builder = RecordBuilder()
        builder.write(_MAGIC)
        Header(profile="ros2", library=f"{_LIBRARY} {__version__}").write(builder)
        self._append(_end(builder))
        self.define(topics)

    def define(self, topics: Sequence[Topic]) -> None:
        """Write the channels of topics, and the schemas of their types that are new."""
        types, builder = message_types(), RecordBuilder()
        kinds = {schema.name: number for number, schema in self._schemas.items()}
        for topic in topics:
            if topic.type not in kinds:
                kinds[topic.type] = len(kinds) + 1
                text = types.text(topic.type).encode()
                schema = Schema(id=kinds[topic.type], name=topic.type, encoding="ros2msg", data=text)
                self._take(schema)
                schema.write(builder)
            offered = yaml.safe_dump([_offered(topic.qos)], sort_keys=False)
            more = {"offered_qos_profiles": offered, "topic_type_hash": types.type_hash(topic.type)}
            number, schema_id = len(self.channels) + 1, kinds[topic.type]
            channel = Channel(number, message_encoding="cdr", metadata=more, schema_id=schema_id, topic=topic.name)
            self._take(channel)
            channel.write(builder)
        self._append(_end(builder))

    def write(self, messages: Sequence[Recorded]) -> None:
        """Append one chunk."""
        ids = {channel.topic: number for number, channel in self.channels.items()}
        parts: list[bytes | memoryview] = [b""]
        size, indexes = 0, dict[int, MessageIndex]()
        for message in messages:
            channel, length = ids[message.topic], len(message.data)
            entry = indexes.setdefault(channel, MessageIndex(channel, []))
            entry.records.append((message.time, size))
            number = self.counts[channel] + len(entry.records) & 0xFFFFFFFF
            times = message.time, message.published
            parts += [_MESSAGE.pack(Opcode.MESSAGE, length + 22, channel, number, *times), message.data]
            size += _MESSAGE.size + length
        span = min(message.time for message in messages), max(message.time for message in messages)
        parts[0] = _CHUNK.pack(Opcode.CHUNK, _CHUNK.size - _RECORD.size + size, *span, size, 0, 0, size)
        tail, offsets, stop = RecordBuilder(), dict[int, int](), self._end + _CHUNK.size + size
        for channel, entry in indexes.items():
            offsets[channel] = stop + tail.count
            entry.write(tail)
        chunk = _chunk_index(self._end, stop, *span, size)
        chunk.message_index_offsets, chunk.message_index_length = offsets, tail.count
        self._append(*parts, _end(tail))
        self._keep(chunk)
        self.counts.update({channel: len(entry.records) for channel, entry in indexes.items()})

    def finish(self) -> None:
        """Append the summary."""
        builder = RecordBuilder()
        DataEnd(0).write(builder)
        summary = self._end + builder.count
        for record in (*self._schemas.values(), *self.channels.values()):
            record.write(builder)
        start, end = self.span
        Statistics(
            message_count=self.counts.total(),
            schema_count=len(self._schemas),
            channel_count=len(self.channels),
            attachment_count=0,
            metadata_count=0,
            chunk_count=len(self._chunks),
            message_start_time=start,
            message_end_time=end,
            channel_message_counts=self.counts,
        ).write(builder)
        footer = RecordBuilder()
        Footer(summary_start=summary, summary_offset_start=0, summary_crc=0).write(footer)
        self._append(_end(builder), *self._chunks, _end(footer) + _MAGIC)

    def _keep(self, chunk: ChunkIndex) -> None:
        start, end = chunk.message_start_time, chunk.message_end_time
        self.span = (min(self.span[0], start), max(self.span[1], end)) if self._chunks else (start, end)
        builder = RecordBuilder()
        chunk.write(builder)
        self._chunks.append(_end(builder))

    def scan(self) -> bool:
        """Read the index of a file; return whether it has a summary. If not, rewrite its last chunk."""
        size = os.fstat(self._file.fileno()).st_size
        if self._read(0, len(_MAGIC)) != _MAGIC:
            raise RecordError(f"{self._file.name}: found {size} bytes that do not begin like an MCAP file")
        at, counts, chunks = len(_MAGIC), Counter[int](), list[ChunkIndex]()
        while at + _RECORD.size <= size:
            opcode, length = _RECORD.unpack(self._read(at, _RECORD.size))
            start, stop = at + _RECORD.size, at + _RECORD.size + length
            if opcode == Opcode.CHUNK and at + _CHUNK.size <= size:
                self.counts += counts
                counts.clear()
                chunks.append(self._read_chunk(at, stop))
            if opcode == Opcode.DATA_END or stop > size or not opcode:  # zeros are no record
                break
            if opcode == Opcode.MESSAGE_INDEX and chunks:
                entry = self._parse(MessageIndex, start, length)
                chunks[-1].message_index_offsets[entry.channel_id] = at
                chunks[-1].message_index_length += stop - at
                counts[entry.channel_id] += len(entry.records)
            elif opcode == Opcode.HEADER:
                self._check_writer(self._parse(Header, start, length).library)
            elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
                self._take(self._parse(Schema if opcode == Opcode.SCHEMA else Channel, start, length))
            at = stop
        complete = at + _RECORD.size <= size and opcode == Opcode.DATA_END
        last = chunks.pop() if chunks and not complete else None
        for chunk in chunks:
            self._keep(chunk)
        if complete:
            self.counts += counts
            self._end = at
            if stop < size and self._read(size - len(_MAGIC), len(_MAGIC)) == _MAGIC:
                return True
            self._truncate()
            return False
        self._end = last.chunk_start_offset if last else at
        kept = self._whole_messages(last, size) if last else []
        self._truncate()
        if kept:
            self.write(kept)
        return False

    def _check_writer(self, library: str) -> None:
        """Raise RecordError if another program wrote the file; it may still do so, and takes no lock."""
        if library.partition(" ")[0] != _LIBRARY:
            raise RecordError(f"{self._file.name}: {library or 'another program'} wrote it; see `ros2 bag reindex`")

    def _read_chunk(self, at: int, stop: int) -> ChunkIndex:
        _, _, start, end, size, _, compression, _ = _CHUNK.unpack(self._read(at, _CHUNK.size))
        if compression:
            raise RecordError(f"{self._file.name}: has compressed chunks, so `vla-ros record` did not write it")
        return _chunk_index(at, stop, start, end, size)

    def _whole_messages(self, chunk: ChunkIndex, size: int) -> list[Recorded]:
        """Return the messages of a chunk that may be cut off."""
        at, stop = chunk.chunk_start_offset + _CHUNK.size, chunk.chunk_start_offset + chunk.chunk_length
        found: list[Recorded] = []
        while at + _MESSAGE.size <= min(stop, size):
            opcode, length, channel, _, time, published = _MESSAGE.unpack(self._read(at, _MESSAGE.size))
            after = at + _RECORD.size + length
            if opcode != Opcode.MESSAGE or channel not in self.channels or after > min(stop, size):
                if not opcode and found and not any(found[-1].data[-4:]):
                    found.pop()  # zeros follow, and may be its end, too
                break
            data = self._read(at + _MESSAGE.size, after - at - _MESSAGE.size)
            found.append(Recorded(time, published, self.channels[channel].topic, data))
            at = after
        return found

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, at)

    def _parse(self, kind: Any, at: int, length: int) -> Any:
        try:
            return kind.read(ReadDataStream(io.BytesIO(self._read(at, length))))
        except (McapError, struct.error, UnicodeDecodeError) as error:
            raise RecordError(f"{self._file.name}: has a damaged {kind.__name__} ({error})") from None

    def _take(self, record: Schema | Channel) -> None:
        if isinstance(record, Schema):
            self._schemas[record.id] = record
        else:
            self.channels[record.id] = record

    def _append(self, *parts: bytes | memoryview) -> None:
        """Write whole records, or nothing: after an OSError, the file ends where it did."""
        try:
            for first in range(0, len(parts), _PARTS):
                some = parts[first : first + _PARTS]
                written = os.writev(self._file.fileno(), some)
                rest = memoryview(b"".join(some) if written < sum(map(len, some)) else b"")[written:]
                while rest:
                    rest = rest[self._file.write(rest) :]
        except BaseException:
            self._truncate()
            raise
        self._end += sum(map(len, parts))

    def _truncate(self) -> None:
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def described(self) -> Iterator[tuple[Channel, str, int]]:
        """Yield each channel with its type and number of messages."""
        for number, channel in self.channels.items():
            yield channel, self._schemas[channel.schema_id].name, self.counts[number]


def _chunk_index(at: int, stop: int, start: int, end: int, size: int) -> ChunkIndex:
    return ChunkIndex(
        chunk_start_offset=at,
        chunk_length=stop - at,
        message_start_time=start,
        message_end_time=end,
        message_index_offsets={},
        message_index_length=0,
        compression="",
        compressed_size=size,
        uncompressed_size=size,
    )


def _end(builder: RecordBuilder) -> bytes:
    return bytes(builder.end())  # type: ignore[no-untyped-call]


def _offered(name: str) -> dict[str, Any]:
    """Return the QoS profile called ``name`` as rosbag2 writes it."""
    qos = profile(name)
    return {
        "history": qos.history.value,
        "depth": qos.depth,
        "reliability": qos.reliability.value,
        "durability": qos.durability.value,
        "deadline": dict(_FOREVER),
        "lifespan": dict(_FOREVER),
        "liveliness": "automatic",
        "liveliness_lease_duration": dict(_FOREVER),
        "avoid_ros_namespace_conventions": False,
    }
