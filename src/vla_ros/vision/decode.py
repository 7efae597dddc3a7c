"""Decodes camera messages to RGB, without ROS and without per-pixel Python loops.

``format`` strings of compressed images are interpreted as in ``compressed_image_transport``.
"""

import contextlib
import io
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageFile

from vla_ros.errors import ImageError
from vla_ros.types import Float32Array, UInt8Array
from vla_ros.vision.jpeg import decode_jpeg
from vla_ros.vision.messages import (
    COMPRESSED_IMAGE,
    IMAGE,
    POINTS,
    CdrBytes,
    ImageHeader,
    read_compressed,
    read_image,
    shown,
)

logger = logging.getLogger(__name__)

_MAX_SIDE = 16384
"""Largest accepted width and height in pixels."""

MAX_PIXELS = 64 * 2**20
"""Largest accepted number of pixels, below the number at which Pillow suspects an attack."""


@dataclass(frozen=True)
class Encoding:
    """Layout of an encoding of ``sensor_msgs/image_encodings.hpp``, and its conversion to RGB."""

    channels: int  # values per pixel
    code: int | None  # conversion of cv2.cvtColor; None if the values are RGB
    value_bytes: int = 1
    multiple: int = 1  # valid widths are multiples of this

    @property
    def pixel_bytes(self) -> int:
        return self.channels * self.value_bytes


# The YUV formats are BT.601 with limited range, as sent by UVC cameras and converted by cv_bridge.
_UYVY = Encoding(2, cv2.COLOR_YUV2RGB_UYVY, multiple=2)
_YUY2 = Encoding(2, cv2.COLOR_YUV2RGB_YUY2, multiple=2)

# OpenCV's RGGB constants name the upper left 2 x 2 pixels, as sensor_msgs does; its older BG constants do not.
_MOSAICS = {
    "bayer_rggb": cv2.COLOR_BayerRGGB2RGB,
    "bayer_bggr": cv2.COLOR_BayerBGGR2RGB,
    "bayer_gbrg": cv2.COLOR_BayerGBRG2RGB,
    "bayer_grbg": cv2.COLOR_BayerGRBG2RGB,
}

ENCODINGS = {
    "rgb8": Encoding(3, None),
    "bgr8": Encoding(3, cv2.COLOR_BGR2RGB),
    "rgba8": Encoding(4, cv2.COLOR_RGBA2RGB),
    "bgra8": Encoding(4, cv2.COLOR_BGRA2RGB),
    "mono8": Encoding(1, cv2.COLOR_GRAY2RGB),
    "yuv422": _UYVY,
    "uyvy": _UYVY,
    "yuv422_yuy2": _YUY2,
    "yuyv": _YUY2,
    **{f"{name}8": Encoding(1, code) for name, code in _MOSAICS.items()},
    **{f"{name}16": Encoding(1, code, 2) for name, code in _MOSAICS.items()},
    "rgb16": Encoding(3, None, 2),
    "bgr16": Encoding(3, cv2.COLOR_BGR2RGB, 2),
    "rgba16": Encoding(4, cv2.COLOR_RGBA2RGB, 2),
    "bgra16": Encoding(4, cv2.COLOR_BGRA2RGB, 2),
}


_SEMI_PLANAR = {"nv12": cv2.COLOR_YUV2RGB_NV12, "nv21": cv2.COLOR_YUV2RGB_NV21, "nv24": cv2.COLOR_YUV2RGB_YUY2}
"""YUV with a plane of luma and one of interleaved chroma. ``nv21`` and ``nv24`` are in image_encodings.hpp."""

_WITHOUT_COLOURS = {"8UC1": "mono8", "8UC3": "bgr8", "8UC4": "bgra8"}
"""OpenCV's types, which do not name the channels, and what they mean to cv_bridge's ``cvtColorForDisplay``."""


@cache
def warn_once(text: str) -> None:
    """Log a warning, the first time only; a camera sends thirty images a second."""
    logger.warning("%s", text)


def to_rgb(rows: UInt8Array, layout: Encoding, *, big_endian: bool) -> UInt8Array:
    """Convert rows of bytes [height, width * layout.pixel_bytes] to RGB, uint8 [height, width, 3].

    The result is bit-identical to ``cv_bridge``'s conversion to ``rgb8`` (``test/ros/test_cv_bridge.py``).
    ``big_endian`` is the byte order of 16-bit values (``is_bigendian`` of the message). Mosaics are interpolated
    bilinearly; 65535 becomes 255. For ``rgb8`` the result is a view of ``rows``.
    """
    wide = layout.value_bytes == 2
    if wide:
        rows = np.ascontiguousarray(rows).view(">u2" if big_endian else "<u2").astype(np.uint16, copy=False)
    pixels = rows.reshape(len(rows), -1, layout.channels)  # still a view: only the last axis is split
    result = pixels if layout.code is None else cv2.cvtColor(pixels, layout.code)
    return np.asarray(cv2.convertScaleAbs(result, alpha=255.0 / 65535.0) if wide else result, np.uint8)


class DecodedImage(NamedTuple):
    """A decoded camera image."""

    # Uint8 [height, width, 3] RGB; for ``rgb8`` a view of the message's bytes: copy it before reusing the buffer.
    image: UInt8Array
    stamp: int  # nanoseconds of the ROS clock at exposure


_DEPTH = ("16uc1", "16sc1", "mono16", "32fc1", "64fc1")


def decode_image(cdr: CdrBytes) -> DecodedImage:
    """Decode a serialised ``sensor_msgs/Image``.

    ``is_bigendian`` is ignored for channels of one byte; the CDR itself may have either byte order.

    Raises:
        ImageError: The CDR is truncated or damaged, the image has no or too many pixels, the step or the data
            length does not fit the size, or the encoding is neither colour nor 8-bit grey.
    """
    header, data, stamp = read_image(cdr)
    height, width = header.height, header.width
    _check_size(IMAGE, height, width)
    if header.encoding == "rgb8" and header.step == 3 * width and len(data) == 3 * width * height:  # most cameras
        return DecodedImage(np.frombuffer(data, np.uint8).reshape(height, width, 3), stamp)
    if header.encoding in _SEMI_PLANAR:
        return DecodedImage(_semi_planar(header, data), stamp)
    if meant := _WITHOUT_COLOURS.get(header.encoding):
        warn_once(
            f"encoding {header.encoding} does not name its channels; they are read as {meant}, OpenCV's order"
        )
    layout = ENCODINGS.get(meant or header.encoding)
    if layout is None:
        raise _other(header)
    if header.width % layout.multiple:
        raise ImageError(
            f"{IMAGE}: found width {header.width} with {header.encoding}, expected a multiple of {layout.multiple}"
        )
    rows = _rows(header, data, layout.pixel_bytes)
    if layout.value_bytes == 2:
        _warn_of_few_bits(rows, header)
    image = to_rgb(rows, layout, big_endian=header.is_bigendian)
    return DecodedImage(image, stamp)


class DecodedPoints(NamedTuple):
    """Where each pixel's surface is."""

    points: Float32Array  # float32 [height, width, 3], metres; NaN where unknown
    stamp: int  # nanoseconds of the ROS clock at exposure
    frame_id: str  # in which the points are


def decode_points(cdr: CdrBytes) -> DecodedPoints:
    """Decode a serialised ``sensor_msgs/Image`` of points; a pixel that is not finite is unknown.

    Raises ImageError if it has another encoding, or is damaged.
    """
    header, data, stamp = read_image(cdr)
    _check_size(IMAGE, header.height, header.width)
    if header.encoding != POINTS:
        raise ImageError(f"{IMAGE}: found encoding {shown(header.encoding)}, expected {POINTS}: points in metres")
    rows = np.ascontiguousarray(_rows(header, data, 12)).view(">f4" if header.is_bigendian else "<f4")
    points = rows.reshape(header.height, header.width, 3).astype(np.float32)
    points[~np.isfinite(points).all(axis=2)] = np.nan
    return DecodedPoints(points, stamp, header.frame_id)


def decode_compressed(cdr: CdrBytes) -> DecodedImage:
    """Decode a serialised ``sensor_msgs/CompressedImage``: 8-bit JPEG or PNG, grey or colour.

    The EXIF orientation is applied, as in cv_bridge and image_transport. The leading bytes of the data identify the
    format, because drivers set ``format`` inconsistently; ``format`` is used only to detect depth, raw Bayer
    mosaics and swapped channels.

    Raises:
        ImageError: The CDR or the image is truncated or damaged, the image has too many pixels, or the data are
            depth, a Bayer mosaic or in another format.
    """
    header, data = read_compressed(cdr)
    _refuse_depth(COMPRESSED_IMAGE, "format", header.format)
    description = header.format.strip().lower()
    # compressed_image_transport converts a mosaic to "mono8" before JPEG; older versions compress the mosaic.
    if description.startswith("bayer_") and not description.endswith("jpeg compressed mono8"):
        raise ImageError(
            f"{COMPRESSED_IMAGE}: found format {shown(header.format)}, a raw Bayer mosaic, whose colours are mixed"
            " by compression; run image_proc's debayer node and compress its image_color"
        )
    if not data:
        raise ImageError(f"{COMPRESSED_IMAGE}: found no data, expected a JPEG or PNG; check the camera driver")
    start = bytes(data[:8])
    if start.startswith(b"\xff\xd8\xff"):
        image = _decode_jpeg(data)
    elif start == b"\x89PNG\r\n\x1a\n":
        image = _decode_png(data)
    elif _is_video(start, header.format):
        raise ImageError(f"{COMPRESSED_IMAGE}: found format {shown(header.format)}, {VIDEO_HINT}")
    else:
        raise ImageError(
            f"{COMPRESSED_IMAGE}: found data of format {shown(header.format)} that begin with {start.hex(' ')},"
            " expected JPEG (ff d8 ff) or PNG (89 50 4e 47); set the camera's image_transport to one of them"
        )
    # compressed_image_transport names the channel order that it passed to OpenCV's encoder, which expects BGR.
    # "compressed rgb8" therefore means a file with swapped channels, which the transport's subscriber swaps back.
    if "compressed rgb" in header.format.lower():
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return DecodedImage(image, header.stamp)


VIDEO_HINT = (
    "a video stream (H.264 or the like), in which an image needs those before it, but a policy takes the newest"
    " image alone; set the driver's image_transport to compressed (JPEG or PNG) or raw, and camera.topic to that"
    " topic"
)
"""What to do about a camera that publishes video."""

_VIDEO = ("h264", "h.264", "avc", "hevc", "h265", "h.265", "av1", "vp8", "vp9")


def _is_video(start: bytes, image_format: str) -> bool:
    """Return whether data begin as an Annex B stream of H.264 or H.265, or are called a video."""
    return start.startswith((b"\0\0\0\1", b"\0\0\1")) or any(one in image_format.lower() for one in _VIDEO)


def _check_size(message: str, height: int, width: int) -> None:
    if height == 0 or width == 0:
        raise ImageError(
            f"{message}: found size {width} x {height}, expected an image with pixels; check the camera driver"
        )
    if height > _MAX_SIDE or width > _MAX_SIDE or height * width > MAX_PIXELS:
        raise ImageError(
            f"{message}: found size {width} x {height}, expected at most {_MAX_SIDE} a side and {MAX_PIXELS}"
            " pixels; the message is damaged, or the camera must publish smaller images"
        )


def _rows(header: ImageHeader, data: memoryview, pixel_bytes: int) -> UInt8Array:
    """Return a view of the pixel bytes without the padding of rows, [height, width * pixel_bytes]."""
    height, width = header.height, header.width
    row = width * pixel_bytes
    if header.step < row:
        raise ImageError(
            f"{IMAGE}: found step {header.step}, expected at least {row} ({width} pixels of {header.encoding});"
            " the driver sets step or encoding incorrectly"
        )
    if header.step * height != len(data):  # cv_bridge requires equality, too; otherwise the image is cut or sheared
        raise ImageError(
            f"{IMAGE}: found {len(data)} bytes of data, expected {header.step * height} (step {header.step} x"
            f" {height} rows); the driver sets the image size or step incorrectly"
        )
    return np.frombuffer(data, np.uint8).reshape(height, header.step)[:, :row]


def _semi_planar(header: ImageHeader, data: memoryview) -> UInt8Array:
    """Convert luma rows of ``step`` bytes and the chroma rows behind them, BT.601 with limited range, to RGB."""
    height, width, step = header.height, header.width, header.step
    full = header.encoding == "nv24"  # chroma for each pixel, otherwise for each block of 2 x 2
    if not full and (height % 2 or width % 2):
        raise ImageError(f"{IMAGE}: found size {width} x {height} with {header.encoding}, expected even numbers")
    expected = height * step * 3 if full else height * step * 3 // 2
    if step < width or len(data) != expected:
        raise ImageError(
            f"{IMAGE}: found step {step} and {len(data)} bytes of data with {header.encoding}, expected at least "
            f"{width} and {expected}; step is the bytes of a luma row; the driver sets the image size or step "
            "incorrectly"
        )
    values = np.frombuffer(data, np.uint8)
    luma = values[: height * step].reshape(height, step)[:, :width]
    if not full:
        chroma = values[height * step :].reshape(height // 2, step)[:, :width].reshape(height // 2, -1, 2)
        return np.asarray(cv2.cvtColorTwoPlane(luma, chroma, _SEMI_PLANAR[header.encoding]), np.uint8)
    chroma = values[height * step :].reshape(height, 2 * step)[:, : 2 * width]
    doubled = np.stack([np.repeat(luma, 2, axis=1), chroma], axis=2)  # each pixel as the two that share a chroma
    return np.ascontiguousarray(cv2.cvtColor(doubled, _SEMI_PLANAR["nv24"])[:, ::2])


def _warn_of_few_bits(rows: UInt8Array, header: ImageHeader) -> None:
    """Warn of 16-bit values that use 12 bits or fewer; white is 65535."""
    if int(rows[::4, int(not header.is_bigendian) :: 2].max(initial=0)) < 1 << 4:  # the upper bytes
        warn_once(
            f"{header.encoding}: no value of an image is above 4095 of 65535, so that it is nearly black; if the "
            "camera has 10 or 12 bits, have the driver shift them to the upper bits, or publish 8 bits"
        )


def _other(header: ImageHeader) -> ImageError:
    _refuse_depth(IMAGE, "encoding", header.encoding)
    known = ", ".join(name for name in (*ENCODINGS, *_SEMI_PLANAR) if not name.startswith("bayer_"))
    return ImageError(
        f"{IMAGE}: found encoding {shown(header.encoding)}, expected one of {known} or a Bayer mosaic; set the"
        " camera driver to one of them"
    )


def _refuse_depth(message: str, what: str, name: str) -> None:
    """Raise ImageError if the encoding or format is for depth or for more than 8 bits a channel."""
    base = name.split(";")[0].strip().lower()
    if base in _DEPTH or "compresseddepth" in name.lower():
        raise ImageError(
            f"{message}: found {what} {shown(name)}, which is depth or has more than 8 bits a channel, expected"
            " a colour image as the checkpoint saw in training; subscribe to the camera's colour topic"
        )


def _damaged(kind: str, data: memoryview, error: Exception) -> ImageError:
    return ImageError(
        f"{COMPRESSED_IMAGE}: {kind} of {len(data)} bytes is damaged or not supported ({error}), expected"
        " one whole 8-bit image; check the camera driver, and the network for lost fragments"
    )


def _decode_jpeg(data: memoryview) -> UInt8Array:
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except Exception as error:  # whatever the decoder raises, the image is damaged
        raise _damaged("JPEG", data, error) from error
    _check_size(f"{COMPRESSED_IMAGE} (JPEG)", height, width)
    if colorspace in ("CMYK", "YCCK"):
        raise ImageError(f"{COMPRESSED_IMAGE}: found a JPEG in {colorspace}, expected YCbCr or greyscale")
    file = bytes(data)
    try:
        # Strict: an image whose lower half is missing must not steer an arm.
        image = decode_jpeg(file)
    except Exception as error:
        raise _damaged("JPEG", data, error) from error
    return turned(image, data) if b"Exif\0\0" in file else image  # opening it takes 0.1 ms


def _decode_png(data: memoryview) -> UInt8Array:
    if len(data) < 33 or bytes(data[12:16]) != b"IHDR":
        raise _damaged("PNG", data, ValueError("IHDR chunk missing or misplaced"))
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    _check_size(f"{COMPRESSED_IMAGE} (PNG)", height, width)
    if data[24] > 8:
        raise ImageError(
            f"{COMPRESSED_IMAGE}: found a PNG with {data[24]} bits a channel, expected 8; subscribe to a colour"
            " image instead of depth, or set the camera to 8 bits"
        )
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            check_png(image, (width, height))
            return turned(np.asarray(image.convert("RGB"), np.uint8), data)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
        raise _damaged("PNG", data, error) from error


def check_png(opened: ImageFile.ImageFile, size: tuple[int, int]) -> None:
    """Raise ValueError unless an opened PNG has the (width, height) of its first header, and 8 bits a channel.

    A file may have a second header, which the decoder uses.
    """
    if opened.size != size:
        raise ValueError(f"its headers differ: {size[0]} x {size[1]} and {opened.size[0]} x {opened.size[1]}")
    if "16" in str(opened.tile[0][3] if opened.tile else ""):
        raise ValueError("its headers differ: 8 and 16 bits a channel")


def turned(image: UInt8Array, file: memoryview | Path) -> UInt8Array:
    """Apply the EXIF orientation (2 to 8) of the image's ``file``, as cv_bridge does; ignore damaged data."""
    orientation: object = 1
    source = file if isinstance(file, Path) else io.BytesIO(file)
    with contextlib.suppress(Exception), Image.open(source) as opened:  # damaged bytes raise many kinds of errors
        orientation = opened.getexif().get(ExifTags.Base.Orientation)
    if orientation in (5, 6, 7, 8):
        image = image.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)
