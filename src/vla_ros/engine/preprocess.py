"""The pipelines of :mod:`vla_ros.vision` as matrix products, so that a frame is resized where the network runs.

A resize along an axis is a matrix; the camera does not change, so the matrices are made once. Differences to the
pipelines on the host: none for turns and for the bicubic resize, whose integers (22-bit weights times levels)
float64 sums exactly; for Lanczos-3 and for the crop at most one level on at most one pixel in a thousand, where a
float32 sum in another order rounds a tie the other way.
The JPEG round trip of ``libero`` stays on the host: what comes here has been through it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.errors import ConfigError
from vla_ros.vision.resample import crop_matrix, lanczos3_matrix

Matrix = NDArray[np.float32] | NDArray[np.float64]
Pipeline = Callable[[Tensor], Tensor]
"""Uint8 [B, H, W, 3] to uint8 [B, height, width, 3], both RGB."""

_PRECISION_BITS = 22  # of Pillow's fixed-point weights
_CUBIC = -0.5  # Pillow's parameter a of the cubic


def bicubic_matrix(source: int, target: int) -> Matrix:
    """Weights of Pillow's bicubic resize with antialias along one axis, rounded as Pillow rounds them.

    Returns:
        Float64 [target, source], whole multiples of 2^-22.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    matrix = np.zeros((target, source), np.float64)
    for index in range(target):
        center = (index + 0.5) * scale
        first = max(0, int(center - support + 0.5))
        last = min(source, int(center + support + 0.5))
        distance = np.abs((np.arange(first, last) - center + 0.5) / stretch)
        weights = _cubic(distance)
        matrix[index, first:last] = weights / weights.sum()
    fixed = np.trunc(matrix * (1 << _PRECISION_BITS) + np.copysign(0.5, matrix))
    return np.asarray(fixed / (1 << _PRECISION_BITS))


def make_turn(name: str) -> Pipeline:
    """The turn that ``camera.orientation`` names, for [B, H, W, 3].

    Raises:
        ConfigError: No such orientation.
    """
    turns: dict[str, Pipeline] = {
        "none": lambda images: images,
        "rotate_90": lambda images: images.rot90(-1, (1, 2)),
        "rotate_180": lambda images: images.flip(1, 2),
        "rotate_270": lambda images: images.rot90(1, (1, 2)),
        "flip_horizontal": lambda images: images.flip(2),
        "flip_vertical": lambda images: images.flip(1),
    }
    if name not in turns:
        raise ConfigError(f"camera.orientation: found {name!r}, expected one of {', '.join(turns)}")
    return turns[name]


def make_pipeline(
    name: str,
    source: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
    crop_area: float = 1.0,
    orientation: str = "none",
) -> Pipeline:
    """What :func:`vla_ros.vision.pipelines.make_pipeline` makes, for pictures of one size on ``device``.

    Args:
        name: ``openvla``, or ``libero`` (without its JPEG round trip).
        source: (height, width) of the camera's pictures, before the turn.
        size: (height, width) of the result.
        device: Where the pictures are.
        crop_area: Share of the area that the centre crop keeps.
        orientation: ``camera.orientation``.

    Raises:
        ConfigError: No such pipeline or orientation, or an area out of range.
    """
    turn = make_turn(orientation)
    upright = source[::-1] if orientation in ("rotate_90", "rotate_270") else source
    steps: list[Pipeline] = []
    if name == "openvla" and crop_area == 1.0:
        # Columns first, then rows, each rounded: Pillow's order at the time of training.
        columns, rows = (
            _to(bicubic_matrix(upright[1], size[1]), device),
            _to(bicubic_matrix(upright[0], size[0]), device),
        )
        if upright[1] != size[1]:
            steps.append(lambda images: _levels(_along_columns(images, columns)))
        if upright[0] != size[0]:
            steps.append(lambda images: _levels(_along_rows(images, rows)))
    elif name in ("openvla", "libero"):
        current = upright
        if name == "libero" and upright != size:
            steps.append(_separable(lanczos3_matrix, upright, size, device, torch.round, 1.0))
            current = size
        if crop_area != 1.0:
            steps.append(
                _separable(
                    lambda s, t: crop_matrix(s, t, crop_area), current, size, device, torch.floor, 255.5 / 255
                )
            )
    else:
        raise ConfigError(f"camera.pipeline: found {name!r}, expected one of openvla, libero")

    def pipeline(images: Tensor) -> Tensor:
        images = turn(images)
        for step in steps:
            images = step(images)
        return images.contiguous()

    return pipeline


def _separable(
    matrix: Callable[[int, int], Matrix],
    source: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
    rounding: Callable[[Tensor], Tensor],
    gain: float,
) -> Pipeline:
    rows, columns = _to(matrix(source[0], size[0]), device), _to(matrix(source[1], size[1]), device)
    return lambda images: (
        rounding(_along_columns(_along_rows(images, rows), columns) * gain).clamp_(0, 255).to(torch.uint8)
    )


def _along_rows(images: Tensor, matrix: Tensor) -> Tensor:
    """[B, H, W, 3] to [B, height, W, 3] in the type of the matrix."""
    batch, height, width, channels = images.shape
    flat = images.reshape(batch, height, width * channels).to(matrix.dtype)
    return torch.matmul(matrix, flat).view(batch, -1, width, channels)


def _along_columns(images: Tensor, matrix: Tensor) -> Tensor:
    """[B, H, W, 3] to [B, H, width, 3] in the type of the matrix."""
    return torch.matmul(matrix, images.to(matrix.dtype))


def _levels(images: Tensor) -> Tensor:
    """Rounded half up to uint8, as integers shifted right are."""
    return (images + 0.5).floor_().clamp_(0, 255).to(torch.uint8)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    a, d = _CUBIC, distance
    near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1
    far = (((d - 5) * d + 8) * d - 4) * a
    return np.where(d < 1.0, near, np.where(d < 2.0, far, 0.0))


def _to(matrix: Matrix, device: torch.device) -> Tensor:
    return torch.from_numpy(matrix).to(device)
