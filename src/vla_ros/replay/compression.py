"""Decompression that never yields more than was announced: a bag from a stranger cannot fill the memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vla_ros.errors import MissingDependencyError
from vla_ros.replay.records import BagError

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""First bytes of a zstd frame (RFC 8878); CDR begins with a zero byte, so a message tells by itself."""

MAX_CHUNK = 1 << 30
"""Largest decompressed size of one chunk or message in bytes; recorders stay a thousandfold below."""

MAX_RATIO = 500
"""A file that decompresses to more than this many times its size, and to more than 1 GiB, is not believed."""

_BLOCK = 1 << 20


def _zstd() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise MissingDependencyError(
            f"zstd bags need backports.zstd ({error}); run `pip install rosbags`"
        ) from None
    return zstd


def decompress(data: bytes | memoryview, kind: str, size: int | None = None, *, partial: bool = False) -> bytes:
    """``data`` decompressed.

    Args:
        data: One frame.
        kind: ``zstd`` or ``lz4``.
        size: Exact size of the result; None where the format does not tell.
        partial: Accept a frame that was cut off and give what is there.

    Raises:
        BagError: Another compression, damaged data, another size than announced, or more than :data:`MAX_CHUNK`.
    """
    limit = MAX_CHUNK if size is None else size
    if limit > MAX_CHUNK:
        raise BagError(f"announces {limit} decompressed bytes, more than the {MAX_CHUNK} that are accepted")
    if kind == "zstd":
        zstd = _zstd()
        decompressor: Any = zstd.ZstdDecompressor()
        damage: tuple[type[Exception], ...] = (zstd.ZstdError, EOFError)
    elif kind == "lz4":
        try:
            lz4_frame: Any = importlib.import_module("lz4.frame")
        except ImportError as error:
            raise MissingDependencyError(f"lz4 bags need lz4 ({error}); run `pip install lz4`") from None
        decompressor, damage = lz4_frame.LZ4FrameDecompressor(), (RuntimeError, EOFError)
    else:
        raise BagError(f"compression {kind!r} found, expected none, zstd or lz4")
    try:
        result: bytes = decompressor.decompress(bytes(data), max_length=limit)
        if not decompressor.eof and not partial:
            # The frame may have room for its end mark only; a further byte is one too many.
            if decompressor.decompress(b"", max_length=1):
                raise BagError(f"decompresses to more than the {limit} bytes that were announced")
            if not decompressor.eof:
                raise BagError("compressed data end too early")
    except damage as error:
        raise BagError(f"compressed data are damaged ({error})") from None
    if size is not None and len(result) != size and not partial:
        raise BagError(f"decompresses to {len(result)} bytes, {size} were announced")
    return result


def expand_file(source: Path, target: Path) -> str:
    """Decompress a ``.zstd`` file as far as possible, block by block.

    Returns:
        "" where all went well, else what is wrong from where on.
    """
    zstd = _zstd()
    written, limit = 0, max(MAX_CHUNK, MAX_RATIO * source.stat().st_size)
    with target.open("wb") as out:
        try:
            for block in _blocks(zstd, source):
                if written + len(block) > limit:
                    return f"compressed file has more than {limit} bytes, {MAX_RATIO} times its size; cut off there"
                out.write(block)
                written += len(block)
        except (zstd.ZstdError, EOFError) as error:
            return f"compressed file is damaged or cut off ({error}); {written} decompressed bytes were saved"
    return ""


def _blocks(zstd: Any, source: Path) -> Iterator[bytes]:
    with source.open("rb") as raw, zstd.open(raw, "rb") as stream:
        while True:
            block: bytes = stream.read1(_BLOCK)
            if not block:
                return
            yield block
