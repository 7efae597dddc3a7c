"""CDR of ``sensor_msgs/Image`` and ``sensor_msgs/CompressedImage``: reading without a copy, and writing.

The layout is the OMG's plain CDR, version 1: a 4-byte encapsulation header (second byte 0: big endian, 1: little
endian), then the fields, each aligned to a multiple of its size from the end of that header. Strings and byte
sequences are a uint32 length followed by the bytes; strings end with a zero byte, which the length includes. Both
messages begin with a ``std_msgs/Header``: ``int32 sec, uint32 nanosec, string frame_id``.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from vla_ros.errors import ImageError
from vla_ros.types import Float32Array, UInt8Array

CdrBytes = bytes | bytearray | memoryview

IMAGE = "sensor_msgs/Image"
COMPRESSED_IMAGE = "sensor_msgs/CompressedImage"
IMAGE_TYPES = {"raw": "sensor_msgs/msg/Image", "compressed": "sensor_msgs/msg/CompressedImage"}
"""``camera.transport`` to the type of its messages."""

POINTS = "32FC3"
"""Encoding of a ``sensor_msgs/Image`` whose pixels are points (x, y, z) in metres."""

_SECOND = 1_000_000_000
_SECONDS = 2**31


class ImageHeader(NamedTuple):
    """All fields of a ``sensor_msgs/Image`` except its stamp and its pixels."""

    frame_id: str
    height: int
    width: int
    encoding: str  # pixel format, a name in ``sensor_msgs/image_encodings.hpp``
    is_bigendian: bool  # byte order of channels wider than a byte; meaningless for 8-bit encodings
    step: int  # bytes from one row to the next, including padding


@dataclass(frozen=True)
class CompressedHeader:
    """All fields of a ``sensor_msgs/CompressedImage`` except its data."""

    stamp: int  # nanoseconds of the ROS clock at exposure
    frame_id: str
    format: str  # the publisher's description of the data, such as ``rgb8; jpeg compressed bgr8``


def shown(text: str, limit: int = 60) -> str:
    """Quote ``text`` for an error message, truncated to ``limit`` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _bytes_of(cdr: CdrBytes, message: str) -> memoryview:
    try:
        return memoryview(cdr).cast("B")
    except TypeError as error:
        raise ImageError(f"{message}: expected one contiguous run of bytes, found {error}") from None


class _Reader:
    """Reads CDR fields in order and checks every length against the remaining bytes."""

    def __init__(self, cdr: CdrBytes, message: str) -> None:
        self._message, self.offset, self._bytes = message, 0, _bytes_of(cdr, message)
        kind = bytes(self.take(4, "the encapsulation header")[:2])
        if kind not in (b"\0\0", b"\0\1"):
            raise ImageError(
                f"{message}: found encapsulation {kind[0]:#04x} {kind[1]:#04x}, expected plain CDR (0x00 0x00 big"
                " endian or 0x00 0x01 little endian); the publisher must use XCDR1, as ROS 2 does"
            )
        self._order: Literal["little", "big"] = "little" if kind[1] else "big"

    def take(self, count: int, what: str) -> memoryview:
        start, self.offset = self.offset, self.offset + count
        if self.offset > len(self._bytes):
            raise ImageError(
                f"{self._message}: {what} needs {count} bytes at offset {start}, but the message has"
                f" {len(self._bytes)}; it is truncated or has another type"
            )
        return self._bytes[start : self.offset]

    def uint32(self, what: str) -> int:
        self.offset += -self.offset % 4  # the header's 4 bytes do not change the alignment
        return int.from_bytes(self.take(4, what), self._order)

    def sequence(self, what: str) -> memoryview:
        return self.take(self.uint32(f"the length of {what}"), what)

    def string(self, what: str) -> str:
        data = bytes(self.sequence(what))
        if data and data[-1]:
            raise ImageError(f"{self._message}: {what} does not end in a zero byte; the CDR is damaged")
        # A frame_id in another encoding must not make the image unusable.
        return data[:-1].decode("utf-8", errors="replace")

    def stamp(self) -> int:
        sec = self.uint32("header.stamp.sec")
        nanosec = self.uint32("header.stamp.nanosec")
        if sec >= _SECONDS or nanosec >= _SECOND:  # sec is an int32: the upper half is negative
            raise ImageError(
                f"{self._message}: found header.stamp with sec {sec} and nanosec {nanosec}, expected sec below"
                f" {_SECONDS} and nanosec below {_SECOND}; the CDR is damaged, or the driver sets no valid stamp"
            )
        return sec * _SECOND + nanosec


class _Head(NamedTuple):
    """What precedes the pixels; another message of the same length and bytes differs in stamp and pixels only."""

    alike: bytes  # all but the stamp
    pixels: slice
    unpack: Callable[[memoryview, int], tuple[int, ...]]  # reads the stamp in the message's byte order
    header: ImageHeader


_MOST_HEADS = 64
_heads: dict[tuple[int, bytes], _Head] = {}
"""Heads that were read, by length and first bytes. A camera's messages are alike; to read one anew takes 15 us."""


def read_image(cdr: CdrBytes) -> tuple[ImageHeader, memoryview, int]:
    """Return header, pixel bytes (a view, no copy) and stamp (ns, at exposure) of a ``sensor_msgs/Image``.

    Raises ImageError if the bytes are truncated, a length exceeds the buffer or the stamp is invalid.
    `decode.decode_image` checks that size, step and data agree.
    """
    data = _bytes_of(cdr, IMAGE)
    key = len(data), bytes(data[12:48])
    if (head := _heads.get(key)) is not None:
        sec, nanosec = head.unpack(data, 4)
        alike = bytes(data[:4]) + bytes(data[12 : head.pixels.start]) == head.alike
        if alike and sec < _SECONDS and nanosec < _SECOND:
            return head.header, data[head.pixels], sec * _SECOND + nanosec
    head = _read_head(data)
    if len(_heads) >= _MOST_HEADS:
        _heads.clear()
    _heads[key] = head
    return head.header, data[head.pixels], image_stamp(data)


def _read_head(message: memoryview) -> _Head:
    reader = _Reader(message, IMAGE)
    reader.stamp()
    frame_id = reader.string("header.frame_id")
    height = reader.uint32("height")
    width = reader.uint32("width")
    encoding = reader.string("encoding")
    is_bigendian = reader.take(1, "is_bigendian")[0] != 0
    step = reader.uint32("step")
    size = len(reader.sequence("data"))
    pixels = slice(reader.offset - size, reader.offset)
    header = ImageHeader(frame_id, height, width, encoding, is_bigendian, step)
    alike = bytes(message[:4]) + bytes(message[12 : pixels.start])
    return _Head(alike, pixels, struct.Struct("<II" if message[1] else ">II").unpack_from, header)


def read_compressed(cdr: CdrBytes) -> tuple[CompressedHeader, memoryview]:
    """Return the header and compressed bytes (a view, no copy) of a serialised ``sensor_msgs/CompressedImage``."""
    reader = _Reader(cdr, COMPRESSED_IMAGE)
    stamp = reader.stamp()
    frame_id = reader.string("header.frame_id")
    image_format = reader.string("format")
    return CompressedHeader(stamp, frame_id, image_format), reader.sequence("data")


def read_video(cdr: CdrBytes) -> tuple[CompressedHeader, memoryview]:
    """Return the header and the bytes (a view, no copy) of a serialised ``foxglove_msgs/CompressedVideo``."""
    reader = _Reader(cdr, "foxglove_msgs/CompressedVideo")
    stamp = reader.stamp()
    frame_id = reader.string("frame_id")
    data = reader.sequence("data")
    return CompressedHeader(stamp, frame_id, reader.string("format")), data


def image_header(cdr: CdrBytes) -> ImageHeader:
    return read_image(cdr)[0]


def image_stamp(cdr: CdrBytes) -> int:
    """Return ``header.stamp``, in nanoseconds, of any message that begins with a ``std_msgs/Header``."""
    return _Reader(cdr, "std_msgs/Header").stamp()


def with_stamp(cdr: CdrBytes, stamp: int) -> bytes:
    """Return a copy of any message that begins with a ``std_msgs/Header``, with another stamp in nanoseconds."""
    data = memoryview(cdr).cast("B")
    image_stamp(data)
    order = "<" if data[1] & 1 else ">"
    return b"".join((data[:4], struct.pack(f"{order}iI", *divmod(stamp, _SECOND)), data[12:]))


def _string(text: str) -> bytes:
    data = text.encode("utf-8") + b"\0"
    return struct.pack("<I", len(data)) + data


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _header(stamp: int, frame_id: str) -> bytes:
    sec, nanosec = divmod(stamp, _SECOND)
    if not 0 <= sec < 2**31:
        raise ImageError(
            f"found a stamp of {stamp} ns, expected 0 to {2**31 - 1} s, the range of builtin_interfaces/Time"
        )
    return _aligned(b"\0\1\0\0" + struct.pack("<iI", sec, nanosec) + _string(frame_id))


def encode_image(
    image: UInt8Array, stamp: int, frame_id: str, encoding: str = "rgb8", step: int | None = None
) -> bytes:
    """Return the little-endian CDR of a ``sensor_msgs/Image`` with the bytes of ``image``, without conversion.

    ``image`` is uint8 [height, width] or [height, width, channels] in the channel order of ``encoding``. ``stamp``
    is in nanoseconds; ``step`` is the number of bytes from row to row (None: no padding).
    """
    if image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise ImageError(
            f"found an image of type {image.dtype} and shape {image.shape}, expected uint8 [height, width] or"
            " [height, width, channels]"
        )
    height, width = image.shape[:2]
    row = width * (image.shape[2] if image.ndim == 3 else 1)
    step = row if step is None else step
    if step < row:
        raise ImageError(f"found step {step}, expected at least the {row} bytes of a row")
    pixels: UInt8Array = np.ascontiguousarray(image).reshape(height, row)
    if step > row:
        pixels = np.pad(pixels, ((0, 0), (0, step - row)))
    head = _aligned(_header(stamp, frame_id) + struct.pack("<II", height, width) + _string(encoding) + b"\0")
    return b"".join((head, struct.pack("<II", step, pixels.size), pixels.reshape(-1).data))


def encode_points(points: Float32Array, stamp: int, frame_id: str) -> bytes:
    """Return the little-endian CDR of a ``sensor_msgs/Image`` of points, float32 [height, width, 3], metres."""
    return encode_image(np.ascontiguousarray(points, "<f4").view(np.uint8), stamp, frame_id, POINTS)


def encode_compressed(data: CdrBytes, stamp: int, frame_id: str, image_format: str = "jpeg") -> bytes:
    """Return the little-endian CDR of a ``sensor_msgs/CompressedImage`` with the bytes ``data``."""
    head = _aligned(_header(stamp, frame_id) + _string(image_format))
    return b"".join((head, struct.pack("<I", memoryview(data).nbytes), data))
