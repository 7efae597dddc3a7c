"""Recorded messages and what could not be read; decompression that cannot exhaust memory."""

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from vla_ros.errors import MissingDependencyError, VlaRosError

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""First bytes of a zstd frame (RFC 8878); CDR starts with a zero byte, so these bytes mark a compressed message."""

MAX_CHUNK = 1 << 30
"""Maximum decompressed size of a chunk or message in bytes; recorders stay far below it."""

MAX_RATIO = 500
"""Maximum compression ratio of a chunk or message above 64 MiB, and of a file above :data:`MAX_CHUNK`."""

MAX_TIME = 1 << 63
"""Receive times are at least 0 and below this, in nanoseconds; MCAP and SQLite can store others."""

_BLOCK = 1 << 20
_ALWAYS = 64 << 20  # bytes that a chunk or message may have at any compression ratio


BAD_TIME = f"messages with a receive time that is no number from 0 to {MAX_TIME - 1} ns are left out"


def at_one_time(what: str, time: int) -> str:
    """Say that ``what`` was received at one time, nanoseconds, and why."""
    return f"all {what} have the receive time {time} ns, as of a recorder with simulated time that gets no /clock"


class BagError(VlaRosError):
    """A bag cannot be read or contains nothing usable."""


class Record(NamedTuple):
    """One recorded message."""

    time: int  # time at which the recorder received the message, nanoseconds
    topic: str  # fully qualified topic name
    data: bytes | memoryview  # CDR bytes with their 4-byte header; may be a view of the file, so copy it to keep it
    place: tuple[Path, int] | None = None  # file and offset of ``data``; None if no file has these bytes


class Loss(NamedTuple):
    """Something that could not be read."""

    file: str  # name of the storage file
    where: str  # byte offset, row or time
    what: str  # the damage found, and what is lost

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.what}"


class Expansion:
    """Counts what the parts of a file of ``size`` bytes decompress to; recordings stay far below the limit."""

    def __init__(self, size: int) -> None:
        self._limit = self._left = max(MAX_CHUNK, MAX_RATIO * size)

    def spend(self, count: int) -> str:
        """Count bytes; returns why the rest of the file is not read, or ""."""
        self._left -= count
        return "" if self._left >= 0 else f"decompresses to more than {self._limit} bytes; the rest is left out"


def full_type_name(name: str) -> str:
    """Return ``pkg/msg/Type`` for a type that was recorded as ``pkg/Type``, as in ROS 1."""
    parts = name.split("/")
    return f"{parts[0]}/msg/{parts[1]}" if len(parts) == 2 else name


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"this bag needs {package} ({error}); run `pip install {package}`") from None


def _zstd() -> Any:
    return _library("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "backports.zstd")


def decompress(data: bytes | memoryview, kind: str, size: int | None = None) -> bytes:
    """Decompress one frame; ``kind`` is ``zstd`` or ``lz4``.

    ``size`` is the exact size of the result if the format stores it. Raises BagError if the data are damaged, do
    not have this size or exceed :data:`MAX_CHUNK` or :data:`MAX_RATIO`.
    """
    most = min(MAX_CHUNK, max(_ALWAYS, MAX_RATIO * len(data)))
    limit = most if size is None else size
    if limit > most:
        raise BagError(f"declares {limit} decompressed bytes for {len(data)}; at most {most} are accepted")
    damage: tuple[type[Exception], ...]
    if kind == "zstd":
        zstd = _zstd()
        decompressor, damage = zstd.ZstdDecompressor(), (zstd.ZstdError, EOFError)
    elif kind == "lz4":
        decompressor, damage = _library("lz4.frame", "lz4").LZ4FrameDecompressor(), (RuntimeError, EOFError)
    else:
        raise BagError(f"found compression {kind!r}, expected none, zstd or lz4")
    try:
        result: bytes = decompressor.decompress(bytes(data), max_length=limit)
        if not decompressor.eof:
            # Only the frame's end mark may remain, but no data.
            if decompressor.decompress(b"", max_length=1):
                announced = "the announced " if size is not None else ""
                raise BagError(f"decompresses to more than {announced}{limit} bytes")
            if not decompressor.eof:
                raise BagError("compressed data end too early")
    except damage as error:
        raise BagError(f"compressed data are damaged ({error})") from None
    if size is not None and len(result) != size:
        raise BagError(f"decompresses to {len(result)} bytes, but {size} were announced")
    return result


def expand_file(source: Path, target: Path) -> str:
    """Decompress a ``.zstd`` file block by block until its end or the first damage; return the problem or ""."""
    zstd = _zstd()
    written, limit = 0, max(MAX_CHUNK, MAX_RATIO * source.stat().st_size)
    with target.open("wb") as out, source.open("rb") as raw, zstd.open(raw, "rb") as stream:
        try:
            while block := stream.read1(_BLOCK):
                if written + len(block) > limit:
                    return f"compressed file has more than {limit} bytes, {MAX_RATIO} times its size; cut off there"
                out.write(block)
                written += len(block)
        except (zstd.ZstdError, EOFError) as error:
            return f"compressed file is damaged or cut off ({error}); {written} decompressed bytes were saved"
    return ""
