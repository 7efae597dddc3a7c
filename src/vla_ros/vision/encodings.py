"""Converts the colour and 8-bit grey encodings of ``sensor_msgs/Image`` to RGB.

Names are those of ``sensor_msgs/image_encodings.hpp``. The result is bit-identical to ``cv_bridge``'s conversion
to ``rgb8`` (``test/ros/test_cv_bridge.py``), without ROS.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from vla_ros.types import UInt8Array


@dataclass(frozen=True)
class Encoding:
    """Layout of an encoding, and its conversion to RGB."""

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


def to_rgb(rows: UInt8Array, layout: Encoding, *, big_endian: bool) -> UInt8Array:
    """Convert rows of bytes [height, width * layout.pixel_bytes] to RGB, uint8 [height, width, 3].

    ``big_endian`` is the byte order of 16-bit values (``is_bigendian`` of the message). Mosaics are interpolated
    bilinearly; 65535 becomes 255. For ``rgb8`` the result is a view of ``rows``.
    """
    wide = layout.value_bytes == 2
    if wide:
        rows = np.ascontiguousarray(rows).view(">u2" if big_endian else "<u2").astype(np.uint16, copy=False)
    pixels = rows.reshape(len(rows), -1, layout.channels)  # still a view: only the last axis is split
    result = pixels if layout.code is None else cv2.cvtColor(pixels, layout.code)
    return np.asarray(cv2.convertScaleAbs(result, alpha=255.0 / 65535.0) if wide else result, np.uint8)
