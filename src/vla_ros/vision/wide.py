"""Camera encodings that need arithmetic on every pixel: Bayer mosaics, and 16 bits a channel.

The result equals ``cv_bridge``'s conversion to ``rgb8`` to the bit (``test/ros/test_cv_bridge.py``) without needing
it, so a bag yields the same image without ROS.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from vla_ros.types import UInt8Array


@dataclass(frozen=True)
class WideEncoding:
    """Layout of one encoding: values per pixel, bytes per value, and how the values become RGB."""

    channels: int
    value_bytes: int
    code: int | None  # of cv2.cvtColor; None if the values are RGB already

    @property
    def pixel_bytes(self) -> int:
        """Bytes of one pixel in a row."""
        return self.channels * self.value_bytes


# OpenCV's RGGB constants name the upper left two by two pixels, as sensor_msgs does; its older BG constants do not.
_MOSAICS = {
    "bayer_rggb": cv2.COLOR_BayerRGGB2RGB,
    "bayer_bggr": cv2.COLOR_BayerBGGR2RGB,
    "bayer_gbrg": cv2.COLOR_BayerGBRG2RGB,
    "bayer_grbg": cv2.COLOR_BayerGRBG2RGB,
}

WIDE_ENCODINGS = {
    **{f"{name}8": WideEncoding(1, 1, code) for name, code in _MOSAICS.items()},
    **{f"{name}16": WideEncoding(1, 2, code) for name, code in _MOSAICS.items()},
    "rgb16": WideEncoding(3, 2, None),
    "bgr16": WideEncoding(3, 2, cv2.COLOR_BGR2RGB),
    "rgba16": WideEncoding(4, 2, cv2.COLOR_RGBA2RGB),
    "bgra16": WideEncoding(4, 2, cv2.COLOR_BGRA2RGB),
}
"""By the name in ``sensor_msgs/image_encodings.hpp``."""


def wide_to_rgb(rows: UInt8Array, layout: WideEncoding, *, big_endian: bool) -> UInt8Array:
    """Convert rows of bytes [height, width * layout.pixel_bytes] to RGB, uint8 [height, width, 3].

    ``big_endian`` is the order of values of two bytes (``is_bigendian`` of the message). Mosaics are interpolated
    bilinearly; 65535 becomes 255.
    """
    values = np.ascontiguousarray(rows)
    if layout.value_bytes == 2:
        values = values.view(">u2" if big_endian else "<u2").astype(np.uint16, copy=False)
    pixels = values.reshape(len(rows), -1, layout.channels)
    result = pixels if layout.code is None else cv2.cvtColor(pixels, layout.code)
    if layout.value_bytes == 2:
        result = cv2.convertScaleAbs(result, alpha=255.0 / 65535.0)
    return np.asarray(result, np.uint8)
