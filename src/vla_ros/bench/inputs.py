"""Distinct camera messages of a measurement, made on demand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_ros.vision.messages import encode_image
from vla_ros.vision.processors import resize_bicubic

_SHIFT = 7  # pixels from one frame to the next; more than one pixel of the network covers at 1280x720


def make_messages(height: int, width: int, seed: int = 0, grain: int = 1) -> Callable[[int], bytes]:
    """Return a function that makes the ``sensor_msgs/Image`` message of an index.

    The messages are shifts of one random frame, because zeros run faster than real data. The first ``height * width
    / 7`` messages differ. With a coarser ``grain`` in pixels, compression takes as long as for a real image.
    """
    small = np.random.default_rng(seed).integers(
        0, 256, (-(-height // grain), -(-width // grain), 3), dtype=np.uint8
    )
    base = resize_bicubic(small, (height, width)).reshape(-1, 3) if grain > 1 else small.reshape(-1, 3)

    def make(index: int) -> bytes:
        pixels = np.roll(base, _SHIFT * index, axis=0).reshape(height, width, 3)
        return encode_image(pixels, index, "camera")

    return make
