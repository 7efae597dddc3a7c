"""Applies the EXIF orientation of compressed images, as ``cv2.imdecode``, cv_bridge and image_transport do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import cv2
import numpy as np
from PIL.Image import Exif

from vla_ros.types import UInt8Array

_ORIENTATION = 0x0112
_TURNS: dict[int, Callable[[UInt8Array], UInt8Array]] = {
    2: partial(cv2.flip, flipCode=1),
    3: partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
    4: partial(cv2.flip, flipCode=0),
    5: cv2.transpose,
    6: partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
    7: lambda image: cv2.transpose(cv2.rotate(image, cv2.ROTATE_180)),
    8: partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
}


def jpeg_exif(data: memoryview) -> bytes:
    """Return the EXIF segment of a JPEG, or empty bytes; takes microseconds, because it stops before the pixels."""
    at = 2  # after the start marker
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        segment = data[at + 4 : at + 2 + length]
        if data[at + 1] == 0xE1 and bytes(segment[:6]) == b"Exif\0\0":
            return bytes(segment)
        at += 2 + length
    return b""


def turned(image: UInt8Array, exif: bytes) -> UInt8Array:
    """Apply the orientation in the image's EXIF data, if they are present and intact."""
    orientation = None
    if exif:
        with contextlib.suppress(Exception):  # foreign bytes: whatever Pillow raises, they say nothing
            parsed = Exif()
            parsed.load(exif)
            orientation = parsed.get(_ORIENTATION)
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else np.ascontiguousarray(turn(image))
