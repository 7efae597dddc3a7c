"""Decodes JPEGs strictly, but accepts the stray bytes that USB cameras leave between complete parts.

libjpeg skips bytes between the end of a part and the marker that follows it ("extraneous bytes before marker"), and
the pixels are right, as OpenCV's are. Its warning does not tell such a file from one that has lost data, because it
reports the first damage only. Here every restart interval of such a file is therefore decoded by itself: only an
interval that is complete and whose *first* warning are stray bytes at its end is accepted.
"""

import re
from dataclasses import dataclass

import numpy as np
import simplejpeg

from vla_ros.types import UInt8Array

MAX_SCANS = 64
"""Most scans of an accepted file. Encoders write 1 to 15; each scan of a file costs a pass over all its pixels."""

MOST_STRAY = 16
"""Most stray bytes of a restart interval. More of them look like an interval whose data changed."""

_STRAY = "extraneous bytes before marker"
_AT_END = re.compile(rf"(\d+) {_STRAY} 0xd9")
_MOST_INTERVALS, _MOST_SEGMENTS, _MOST_TABLES = 4096, 1000, 8192  # the last one in bytes
_MOST_WIDTH = 65500  # pixels, libjpeg's limit
_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_SOF, _DHT, _SOS, _DQT, _DRI = (0xC0, 0xC1), 0xC4, 0xDA, 0xDB, 0xDD
_OTHER_SOF = frozenset(range(0xC0, 0xD0)) - {*_SOF, _DHT, 0xC8, 0xCC}
_RESTART = range(0xD0, 0xD8)
_STANDALONE = frozenset((0x01, *_RESTART, 0xD8, 0xD9))


def decode_jpeg(data: bytes) -> UInt8Array:
    """Decode a whole JPEG, grey or YCbCr, to RGB, uint8 [H, W, 3]; the caller has checked its size.

    Raises ValueError, with the reason, if data are missing or damaged, or if there are more than
    :data:`MAX_SCANS` scans.
    """
    if (scans := count_scans(data)) > MAX_SCANS:
        raise ValueError(f"{scans} scans, allowed {MAX_SCANS}")
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True), np.uint8)
    except ValueError as error:
        if _STRAY not in str(error):
            raise
    _check_parts(data)
    return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB", strict=False), np.uint8)


def count_scans(data: bytes) -> int:
    """Return how often the marker of a scan occurs; a thumbnail in the file counts, too."""
    values = np.frombuffer(data, np.uint8)  # bytes.count would hold the GIL for 0.1 s, if a file is 16 MiB of 0xff
    pairs = (values[begin : begin + (len(values) - begin) // 2 * 2].view("<u2") for begin in (0, 1))
    return sum(int(np.count_nonzero(one == int.from_bytes(b"\xff\xda", "little"))) for one in pairs)


@dataclass
class _Header:
    """What the segments before the only scan state."""

    tables: list[bytes]  # segments that decoding needs, but for the frame's size and the restart interval
    frame: bytes = b""  # body of the SOF segment
    interval: int = 0  # MCUs between restart markers; 0 for none
    scan: bytes = b""  # SOS segment
    end: int = 0  # where the scan's data begin


def _check_parts(data: bytes) -> None:
    """Raise ValueError unless each restart interval of a baseline JPEG is complete."""
    header = _read_header(data)
    parts = _intervals(data, header.end)
    width, height, count = _size_in_mcus(header.frame)
    total = width * height
    each = header.interval or total
    expected = -(-total // each)
    if len(parts) != expected:
        raise ValueError(f"{len(parts)} of {expected} restart intervals")
    if expected > _MOST_INTERVALS:
        raise ValueError(f"stray bytes among {expected} restart intervals, allowed {_MOST_INTERVALS}")
    for index, part in enumerate(parts):
        mcus = min(each, total - index * each)
        columns = width if mcus % width == 0 else mcus
        if columns * count[0] > _MOST_WIDTH:
            raise ValueError("stray bytes in a file whose restart intervals are too long to check")
        size = (mcus // columns * count[1]).to_bytes(2, "big") + (columns * count[0]).to_bytes(2, "big")
        frame = header.frame[:1] + size + header.frame[5:]
        alone = [_SOI, *header.tables, _segment(_SOF[0], frame), header.scan, part, _EOI]
        try:
            simplejpeg.decode_jpeg(b"".join(alone), colorspace="GRAY", fastdct=True, strict=True)
        except ValueError as error:
            stray = _AT_END.search(str(error))
            if stray is None or int(stray[1]) > MOST_STRAY:
                raise ValueError(f"restart interval {index} of {expected}: {error}") from None


def _read_header(data: bytes) -> _Header:
    header, at = _Header([]), 2
    for _ in range(_MOST_SEGMENTS):
        at = _next_marker(data, at)
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        body = data[at + 4 : at + 2 + length]
        if marker in _STANDALONE or marker in _OTHER_SOF or length < 2 or len(body) != length - 2:
            raise ValueError("stray bytes in a file that is not baseline, or whose header is damaged")
        if marker in _SOF:
            header.frame = body
        elif marker == _DRI:
            header.interval = int.from_bytes(body[:2], "big")
        elif marker == _SOS:
            header.scan = _segment(marker, body)
            at += 2 + length
            break
        elif marker in (_DHT, _DQT):
            header.tables.append(_segment(marker, body))
        at += 2 + length
    parts = header.frame[5] if len(header.frame) > 5 else 0
    if (
        len(header.scan) < 5
        or len(header.frame) != 6 + 3 * parts
        or header.scan[4] != parts
        or sum(map(len, header.tables)) > _MOST_TABLES
    ):
        raise ValueError("stray bytes in a file that is not baseline, or whose header is damaged")
    header.end = at
    return header


def _next_marker(data: bytes, at: int) -> int:
    """Return where the next marker begins; raises ValueError if there is none within a few bytes."""
    for place in range(at, min(at + 4 * MOST_STRAY, len(data) - 4)):
        if data[place] == 0xFF and data[place + 1] not in (0x00, 0xFF):
            return place
    raise ValueError("no image data")


def _segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body


def _intervals(data: bytes, begin: int) -> list[bytes]:
    """Split a scan's data at its restart markers; raises ValueError unless they are in order and an EOI follows."""
    values = np.frombuffer(data, np.uint8)[begin:]
    real = (values[:-1] == 0xFF) & (values[1:] != 0x00) & (values[1:] != 0xFF)
    parts: list[bytes] = []
    for place in (np.flatnonzero(real)[: _MOST_INTERVALS + 1] + begin).tolist():
        marker = data[place + 1]
        parts.append(data[begin:place])
        begin = place + 2
        if marker == _EOI[1]:
            return parts
        if marker != _RESTART[(len(parts) - 1) % 8]:
            raise ValueError(f"marker 0x{marker:02x} instead of 0x{_RESTART[(len(parts) - 1) % 8]:02x}")
    raise ValueError("no end of the image")


def _size_in_mcus(frame: bytes) -> tuple[int, int, tuple[int, int]]:
    """Return columns and rows of MCUs, and the width and height in pixels of one."""
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    factors = [divmod(frame[7 + 3 * index], 16) for index in range(frame[5])]
    if not height or not width or not all(1 <= one <= 4 for pair in factors for one in pair):
        raise ValueError("damaged sampling factors")
    across, down = (max(one) for one in zip(*factors, strict=True)) if len(factors) > 1 else (1, 1)
    return -(-width // (8 * across)), -(-height // (8 * down)), (8 * across, 8 * down)
