"""Resizes images without distortion and pads them with black, as openpi and LeRobot do.

When images shrink, openpi uses Pillow's antialiasing filter, whereas LeRobot interpolates between four pixels. On
fine textures, the results differ by up to 70 levels, so a checkpoint needs the method it was trained with.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vla_ros.types import UInt8Array

Levels = NDArray[np.float32]
Pixels = TypeVar("Pixels", UInt8Array, NDArray[np.float32])
Taps = tuple[NDArray[np.intp], NDArray[np.intp], Levels]


def fitted_size(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Scale the size ``source`` (height, width) to fit into ``target``; each side is at least one pixel."""
    ratio = max(source[0] / target[0], source[1] / target[1])
    return max(1, int(source[0] / ratio)), max(1, int(source[1] / ratio))


def resize_with_pad(image: UInt8Array, target: tuple[int, int] = (224, 224)) -> UInt8Array:
    """Resize uint8 [H, W, 3] with Pillow's antialiased bilinear filter, bit for bit as openpi does.

    Returns uint8 [height, width, 3], which is ``image`` itself if it already has this size.
    """
    if image.shape[:2] == target:
        return image
    small = pillow_resized(image, fitted_size(image.shape[:2], target), Image.Resampling.BILINEAR)
    return _centred(np.asarray(small), target)


def pillow_resized(image: UInt8Array, size: tuple[int, int], kernel: Image.Resampling) -> Image.Image:
    """Resize to (height, width) with Pillow: columns first, then rows, rounded to 8 bits in between.

    Pillow versions used in training have this order; newer versions may resize the rows of tall images first.
    """
    height, width = size
    resized = Image.fromarray(np.ascontiguousarray(image))
    for step in ((width, resized.height), (width, height)):
        if resized.size != step:
            resized = resized.resize(step, kernel)
    return resized


def resize_with_pad_linear(image: UInt8Array, target: tuple[int, int] = (224, 224)) -> Levels:
    """Resize uint8 [H, W, 3] as LeRobot does: bilinear, without antialiasing or rounding.

    Returns float32 [height, width, 3] in [0, 1].
    """
    height, width = fitted_size(image.shape[:2], target)
    levels = image.astype(np.float32) / np.float32(255)
    above, below, down = _taps(image.shape[0], height)
    rows = _between(levels[above], levels[below], down[:, None, None])
    left, right, across = _taps(image.shape[1], width)
    small = _between(rows[:, left], rows[:, right], across[:, None])
    return _centred(np.clip(small, 0, 1), target)


@lru_cache(maxsize=32)
def _taps(source: int, target: int) -> Taps:
    """Return the two neighbours in ``source`` of each sample of ``target``, and the second neighbour's weight."""
    scale = np.float64(np.float32(source) / np.float32(target))
    # Rounded once, as in a fused multiply-add.
    position = np.maximum(((np.arange(target) + 0.5) * scale - 0.5).astype(np.float32), np.float32(0))
    first = np.minimum(position.astype(np.intp), source - 1)
    return first, np.minimum(first + 1, source - 1), position - first.astype(np.float32)


def _between(one: Levels, other: Levels, share: Levels) -> Levels:
    result: Levels = one * (np.float32(1) - share) + other * share
    return result


def centred_corner(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Return the corner (row, column) of a centred image; an odd pixel of padding is at the bottom or right."""
    return (target[0] - source[0]) // 2, (target[1] - source[1]) // 2


def _centred(small: Pixels, target: tuple[int, int]) -> Pixels:
    height, width = small.shape[:2]
    top, left = centred_corner((height, width), target)
    result = np.zeros((*target, small.shape[2]), small.dtype)
    result[top : top + height, left : left + width] = small
    return result
