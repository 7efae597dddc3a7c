"""Image orientations, and the box of the centre crop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import cv2
import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.types import UInt8Array

TURNS: dict[str, Callable[[UInt8Array], UInt8Array]] = {
    "none": lambda image: image,
    "rotate_90": partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
    "rotate_180": partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
    "rotate_270": partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
    "flip_horizontal": partial(cv2.flip, flipCode=1),
    "flip_vertical": partial(cv2.flip, flipCode=0),
}
"""``camera.orientation`` to the function that applies it to uint8 [H, W, 3]; rotations are clockwise.

Images of LIBERO's renderer need ``rotate_180``, which the OpenVLA evaluation applies as ``[::-1, ::-1]``.
"""


def center_crop_box(area: float) -> tuple[np.float32, np.float32]:
    """Return start and end of the centre crop that keeps the share ``area`` of the image, for both axes.

    Sides are scaled by ``sqrt(area)`` in float32, as in the OpenVLA evaluation code. As in
    ``tf.image.crop_and_resize``, 0 is the centre of the first pixel and 1 the centre of the last pixel.
    """
    if not 0.0 < area <= 1.0:
        raise ConfigError(f"camera.crop_area: found {area}, expected more than 0 and at most 1")
    side = np.sqrt(np.float32(area))  # of the rounded area, as in TensorFlow
    low = (np.float32(1) - side) / np.float32(2)
    return low, low + side
