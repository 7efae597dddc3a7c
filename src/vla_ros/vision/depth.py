"""Decodes depth images to metres: ``sensor_msgs/Image``, and ``compressedDepth`` of image_transport_plugins.

RVL is the codec of Wilson, "Fast Lossless Depth Image Compression", 2017: runs of zeros and of differences. A
number has parts of three bits, the lowest first, each with a bit that says whether another follows; eight parts
are in a little-endian word, the first at the top.
"""

import struct
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import ImageError
from vla_ros.types import Float32Array, IntArray
from vla_ros.vision.decode import check_size, pixel_rows
from vla_ros.vision.messages import COMPRESSED_IMAGE, IMAGE, CdrBytes, read_compressed, read_image, shown

DEPTH_ENCODINGS = ("16UC1", "32FC1")
"""Encodings of depth: uint16 millimetres with 0 where unknown, or float32 metres with NaN where unknown."""

_FARTHEST = 65535  # what drivers store where a surface is beyond their range

_HEADER = struct.Struct("<i2f")  # before the data: format of the compression, and two numbers of its quantisation
_SIZE = struct.Struct("<2I")  # before RVL: width, height
_PARTS = 11  # most parts of a number of RVL, which has 32 bits
UInt16Array = NDArray[np.uint16]


class DecodedDepth(NamedTuple):
    """How far each pixel's surface is along the optical axis."""

    depth: Float32Array  # float32 [height, width], metres; NaN where unknown
    stamp: int  # nanoseconds of the ROS clock at exposure
    frame_id: str  # the camera's optical frame: z forward, x right, y down


def decode_depth(cdr: CdrBytes) -> DecodedDepth:
    """Decode a serialised ``sensor_msgs/Image`` with the encoding 16UC1 or 32FC1.

    What is not finite or not positive is unknown: no sensor measures a surface at its own centre. Raises ImageError
    if it has another encoding, or is damaged.
    """
    header, data, stamp = read_image(cdr)
    check_size(IMAGE, header.height, header.width)
    if header.encoding not in DEPTH_ENCODINGS:
        raise _not_depth(IMAGE, "encoding", header.encoding)
    kind = ("u2", "f4")[DEPTH_ENCODINGS.index(header.encoding)]
    rows = np.ascontiguousarray(pixel_rows(header, data, int(kind[1])))
    values = rows.view((">" if header.is_bigendian else "<") + kind)
    return DecodedDepth(_metres(values, header.encoding), stamp, header.frame_id)


def decode_compressed_depth(cdr: CdrBytes) -> DecodedDepth:
    """Decode a serialised ``sensor_msgs/CompressedImage`` of compressed_depth_image_transport: PNG or RVL.

    32FC1 is stored as 16 bits of inverse depth, whose two numbers are in a header. Raises ImageError if it is
    something else, or damaged.
    """
    header, data = read_compressed(cdr)
    encoding, _, rest = (part.strip() for part in header.format.partition(";"))
    codec = rest.removeprefix("compressedDepth").strip() or "png"  # older versions name none
    known = encoding in DEPTH_ENCODINGS and codec in ("png", "rvl")
    if not known or (rest and not rest.startswith("compressedDepth")):
        raise _not_depth(COMPRESSED_IMAGE, "format", header.format)
    if len(data) <= _HEADER.size:
        raise _damaged(f"found {len(data)} bytes")
    _, a, b = _HEADER.unpack_from(data)
    values: NDArray[Any] = (_png if codec == "png" else _rvl)(data[_HEADER.size :])
    if encoding == "32FC1":
        with np.errstate(divide="ignore"):
            depth = np.float32(a) / (values.astype(np.float32) - np.float32(b))
        values = np.where(values, depth, np.float32(np.nan))
    return DecodedDepth(_metres(values, encoding), header.stamp, header.frame_id)


def _metres(values: NDArray[Any], encoding: str) -> Float32Array:
    depth: Float32Array = values.astype(np.float32)
    if encoding == "16UC1":
        depth *= np.float32(0.001)
        depth[values == _FARTHEST] = np.nan
    depth[~((depth > 0) & np.isfinite(depth))] = np.nan
    return depth


def _png(data: memoryview) -> UInt16Array:
    """Return the uint16 [height, width] of a PNG of 16 bits."""
    if bytes(data[:8]) != b"\x89PNG\r\n\x1a\n" or bytes(data[12:16]) != b"IHDR" or len(data) < 33:
        raise _damaged("found no PNG")
    width, height = struct.unpack_from(">2I", data, 16)
    check_size(f"{COMPRESSED_IMAGE} (PNG)", height, width)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise _damaged(str(error)) from None
    if image is None or image.dtype != np.uint16 or image.shape != (height, width):
        found = "that cannot be decoded" if image is None else f"of {image.dtype} {list(image.shape)}"
        raise _damaged(f"found a PNG {found}, expected uint16 [{height}, {width}]")
    return np.asarray(image, np.uint16)


def _rvl(data: memoryview) -> UInt16Array:
    """Return the uint16 [height, width] of an RVL stream, which begins with width and height."""
    if len(data) < _SIZE.size or len(data) % 4:
        raise _damaged(f"found {len(data)} bytes of RVL")
    width, height = _SIZE.unpack_from(data)
    check_size(f"{COMPRESSED_IMAGE} (RVL)", height, width)
    numbers = _numbers(np.frombuffer(data, "<u4", offset=_SIZE.size))
    firsts, lengths, sources, at, place, pixels = [], [], [], 0, 0, width * height
    counts = numbers.tolist()
    while place < pixels and at + 1 < len(counts):
        zeros, run = counts[at], counts[at + 1]
        firsts.append(place + zeros)
        lengths.append(run)
        sources.append(at + 2)
        at, place = at + 2 + run, place + zeros + run
    if place != pixels or at > len(counts):
        raise _damaged(f"found RVL of {place} pixels, expected {pixels}")
    long = np.array(lengths, np.int64)
    inside = np.arange(long.sum()) - np.repeat(np.cumsum(long) - long, long)
    coded = numbers[np.repeat(sources, long) + inside]
    values = np.zeros(pixels, np.uint16)
    values[np.repeat(firsts, long) + inside] = np.cumsum((coded >> 1) ^ -(coded & 1)) & 0xFFFF
    return values.reshape(height, width)


def _numbers(words: NDArray[np.uint32]) -> IntArray:
    """Return the numbers int64 [N] of RVL's words uint32 [M]; parts after the last one that ends are left out."""
    parts = (words.astype(np.int64)[:, None] >> np.arange(28, -1, -4, dtype=np.int64) & 0xF).ravel()
    ends = np.flatnonzero(parts < 8)
    if not len(ends):
        raise _damaged("found no number of RVL")
    begins = np.concatenate(([0], ends[:-1] + 1))
    if (ends - begins).max() >= _PARTS:
        raise _damaged("found a number of RVL without an end")
    parts = parts[: ends[-1] + 1]
    places = np.arange(len(parts)) - np.repeat(begins, ends - begins + 1)
    found: IntArray = np.add.reduceat((parts & 7) << 3 * places, begins)
    return found


def _not_depth(message: str, what: str, name: str) -> ImageError:
    expected = " or ".join(DEPTH_ENCODINGS) if what == "encoding" else "16UC1 or 32FC1; compressedDepth png or rvl"
    return ImageError(
        f"{message}: found {what} {shown(name)}, expected depth: {expected}; subscribe to the camera's depth topic"
    )


def _damaged(found: str) -> ImageError:
    return ImageError(
        f"{COMPRESSED_IMAGE}: {found}; expected one whole depth image of compressed_depth_image_transport; check "
        "the camera driver, and the network for lost fragments"
    )
