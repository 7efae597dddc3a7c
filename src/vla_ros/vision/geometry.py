"""Image orientation and the box of the centre crop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import cv2
import numpy as np

from vla_ros.config.sections import ORIENTATIONS
from vla_ros.errors import ConfigError
from vla_ros.types import UInt8Array

_TURNS: dict[str, Callable[[UInt8Array], UInt8Array]] = {
    "none": lambda image: image,
    "rotate_90": partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
    "rotate_180": partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
    "rotate_270": partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
    "flip_horizontal": partial(cv2.flip, flipCode=1),
    "flip_vertical": partial(cv2.flip, flipCode=0),
}


def make_orientation(name: str) -> Callable[[UInt8Array], UInt8Array]:
    """Return the function that applies ``camera.orientation`` to uint8 [H, W, 3].

    ``name`` is ``none`` (returns the image itself), ``rotate_90``, ``rotate_180`` or ``rotate_270`` clockwise,
    ``flip_horizontal`` (swaps left and right) or ``flip_vertical``. Images of LIBERO's renderer need
    ``rotate_180``, which the OpenVLA evaluation applies as ``[::-1, ::-1]``. Results are contiguous except with
    ``none``.
    """
    if name not in _TURNS:
        raise ConfigError(f"camera.orientation: found {name!r}, expected one of {', '.join(ORIENTATIONS)}")
    return _TURNS[name]


def center_crop_box(area: float) -> tuple[np.float32, np.float32]:
    """Start and end of the centre crop that keeps ``area`` of the image, as shares of each side.

    Sides are scaled by ``sqrt(area)`` in float32, as in the OpenVLA evaluation code (``crop_scale=0.9`` mirrors the
    random crops of training). The shares are those of ``tf.image.crop_and_resize``: 0 is the centre of the first
    pixel and 1 that of the last.
    """
    if not 0.0 < area <= 1.0:
        raise ConfigError(f"camera.crop_area: found {area}, expected more than 0 and at most 1")
    side = np.sqrt(np.float32(area))  # of the rounded area, as TensorFlow does
    low = (np.float32(1) - side) / np.float32(2)
    return low, low + side
