"""Applies the EXIF orientation of compressed images, as ``cv2.imdecode``, cv_bridge and image_transport do."""

from __future__ import annotations

import contextlib

import numpy as np
from PIL.Image import Exif

from vla_ros.types import UInt8Array

_ORIENTATION = 0x0112


def jpeg_exif(data: memoryview) -> bytes:
    """Return the EXIF segment of a JPEG, or empty bytes; reads only the segments before the pixels."""
    at = 2  # after the start marker
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        segment = data[at + 4 : at + 2 + length]
        if data[at + 1] == 0xE1 and bytes(segment[:6]) == b"Exif\0\0":
            return bytes(segment)
        at += 2 + length
    return b""


def turned(image: UInt8Array, exif: bytes) -> UInt8Array:
    """Apply the orientation (2 to 8) in the image's EXIF data; ignore missing or damaged data."""
    orientation: object = 1
    if exif:
        with contextlib.suppress(Exception):  # Pillow raises many kinds of errors for damaged bytes
            parsed = Exif()
            parsed.load(exif)
            orientation = parsed.get(_ORIENTATION)
    if orientation in (5, 6, 7, 8):
        image = image.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)
