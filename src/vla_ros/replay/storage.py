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
"""Maximum compression ratio of a file that decompresses to more than :data:`MAX_CHUNK`."""

_BLOCK = 1 << 20


class BagError(VlaRosError):
    """A bag cannot be read or contains nothing usable."""


class Record(NamedTuple):
    """One recorded message."""

    time: int  # time at which the recorder received the message, nanoseconds
    topic: str  # fully qualified topic name
    data: bytes | memoryview  # CDR bytes with their 4-byte header; may be a view of the file, so copy it to keep it


class Loss(NamedTuple):
    """Something that could not be read."""

    file: str  # name of the storage file
    where: str  # byte offset, row or time
    what: str  # the damage found, and what is lost

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.what}"


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
    not have this size or exceed :data:`MAX_CHUNK`.
    """
    limit = MAX_CHUNK if size is None else size
    if limit > MAX_CHUNK:
        raise BagError(f"declares {limit} decompressed bytes; at most {MAX_CHUNK} are accepted")
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
                raise BagError(f"decompresses to more than the announced {limit} bytes")
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
