"""Where the surface in each patch of an image is, of the points of its pixels; for training and inference."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.types import Float32Array
from vla_ros.vision.processors import centred_corner, fitted_size
from vla_ros.vision.resample import crop_taps


def patch_positions(points: Float32Array, image_size: int, patch_size: int, area: float = 0.0) -> Float32Array:
    """Return the median of the known points of each patch, float32 [patches, 3]; NaN where none is known.

    ``points`` are [H, W, 3] with NaN where unknown, aligned to a camera's image. They are fitted to the network's
    square image as the image is, with the nearest point of each pixel: in its proportions, or, with an ``area``,
    without them, and only the centre that has this share of the area (1: all).
    """
    fitted = _cropped(points, image_size, area) if area else _fitted(points, image_size)
    side = image_size // patch_size
    used = fitted[: side * patch_size, : side * patch_size]
    patches = used.reshape(side, patch_size, side, patch_size, 3).transpose(0, 2, 4, 1, 3)
    ordered = np.sort(patches.reshape(side * side, 3, -1), axis=-1)  # NaN last
    count = np.isfinite(ordered).sum(axis=-1, keepdims=True)
    low, high = (
        np.take_along_axis(ordered, np.maximum(at, 0), axis=-1)[..., 0] for at in ((count - 1) // 2, count // 2)
    )
    median: Float32Array = np.float32(0.5) * (low + high)
    return median


def _fitted(points: Float32Array, size: int) -> Float32Array:
    if points.shape[:2] == (size, size):
        return points
    height, width = small = fitted_size(points.shape[:2], (size, size))
    rows, columns = (
        ((np.arange(target) + 0.5) * source / target).astype(np.intp)
        for source, target in zip(points.shape[:2], small, strict=True)
    )
    top, left = centred_corner(small, (size, size))
    result = np.full((size, size, 3), np.nan, np.float32)
    result[top : top + height, left : left + width] = points[rows][:, columns]
    return result


def _cropped(points: Float32Array, size: int, area: float) -> Float32Array:
    taps = crop_taps(size, size, area)  # of the image that was resized to the square
    at = taps.below + taps.share + np.float32(0.5)
    rows, columns = ((at * np.float32(source / size)).astype(np.intp) for source in points.shape[:2])
    return points[rows][:, columns]


def camera_positions(
    given: Mapping[str, Float32Array],
    points: Sequence[tuple[str, str]],
    images: Sequence[str],
    image_size: int,
    patches: int,
    area: float = 0.0,
) -> Float32Array:
    """Return the positions of all patches of ``images``, float32 [images, patches, 3].

    ``given`` are an observation's points, ``points`` the pairs of ``PolicySpec.points``; ``area`` is as for
    :func:`patch_positions`. An image without points has NaN. Raises ConfigError if points of the spec are missing.
    """
    keys = dict(points)
    found: list[Float32Array] = []
    for image in images:
        if image not in keys:
            found.append(np.full((patches, 3), np.nan, np.float32))
            continue
        one = given.get(keys[image])
        if one is None or one.ndim != 3 or one.shape[2] != 3:
            raise ConfigError(
                f"points '{keys[image]}' of '{image}': found {None if one is None else list(one.shape)}, expected "
                "float32 [H, W, 3] in metres; bind them with camera.topics and camera.keys"
            )
        found.append(patch_positions(one, image_size, image_size // math.isqrt(patches), area))
    return np.stack(found)
