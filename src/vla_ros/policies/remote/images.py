"""Images in messages: JPEG, and 8-bit PNG in RGB."""

from __future__ import annotations

import io
from typing import Any, TypeGuard

import numpy as np
import simplejpeg
from PIL import Image

from vla_ros.policies.remote.messages import WireError
from vla_ros.types import UInt8Array
from vla_ros.vision.decode import check_png
from vla_ros.vision.jpeg import decode_jpeg

MAX_SIDE = 4096
"""Largest accepted width and height in pixels."""
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_HEADER = 33  # bytes of a PNG's signature and first chunk
_RGB = b"\x08\x02"  # of a PNG: 8 bits, colour type 2


def is_encoded(value: Any) -> TypeGuard[bytes]:
    """Return True for bytes that begin as a JPEG or a PNG."""
    return isinstance(value, bytes) and value.startswith((_JPEG, _PNG))


def encoded_size(image: bytes) -> tuple[int, int]:
    """Return (height, width) as an image's header states them; raises WireError if it is damaged or not RGB."""
    if not image.startswith(_PNG):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(image)
        except ValueError as error:
            raise WireError(f"found a damaged JPEG ({str(error)[:80]})") from None
        return height, width
    if len(image) < _HEADER or image[12:16] != b"IHDR":
        raise WireError("found a damaged PNG (no IHDR chunk)")
    if image[24:26] != _RGB:
        raise WireError(f"found a PNG of {image[24]} bits and colour type {image[25]}, expected RGB of 8 bits")
    return int.from_bytes(image[20:24], "big"), int.from_bytes(image[16:20], "big")


def decode_encoded(image: bytes, most: int = 1 << 22) -> UInt8Array:
    """Decode a JPEG or PNG of up to ``most`` pixels to RGB, uint8 [H, W, 3]; raises WireError if it is none."""
    height, width = encoded_size(image)
    kind = "PNG" if image.startswith(_PNG) else "JPEG"
    if max(height, width) > MAX_SIDE or not 1 <= height * width <= most:
        raise WireError(
            f"found a {kind} of {width}x{height}, allowed {MAX_SIDE} per side and {most / 1e6:.1f} million pixels"
        )
    try:
        if kind == "JPEG":
            return decode_jpeg(image)
        with Image.open(io.BytesIO(image), formats=("PNG",)) as opened:
            check_png(opened, (width, height))
            if opened.mode != "RGB":
                raise ValueError(f"its headers differ: RGB and {opened.mode}")
            return np.asarray(opened, np.uint8)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
        raise WireError(f"found a damaged {kind} ({str(error)[:80]})") from None
