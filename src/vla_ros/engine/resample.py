"""Resampling steps of :mod:`vla_ros.vision` on the network's device, bit-identical to the host.

Steps compute in integers, as Pillow and libjpeg-turbo do, or in individually rounded float32 operations.
JPEG and Lanczos-3 run only in Triton, the other steps also in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.engine.jpeg import make_round_trip
from vla_ros.errors import ConfigError
from vla_ros.types import (
    BilinearCrop,
    FixedPointResize,
    FloatResize,
    ImageProcessor,
    JpegRoundTrip,
    Padding,
    Resampling,
)
from vla_ros.vision.resample import PRECISION_BITS

_Pipeline = Callable[[Tensor], Tensor]
"""Converts RGB images, uint8 [B, H, W, 3], to RGB images, uint8 [B, height, width, 3]."""

_AT_ONCE = 2**22  # products held at a time; their 16 MiB fit into the cache of a large GPU


@dataclass(frozen=True)
class Taps:
    """A resize along one axis: each of M samples is a sum over K samples of the source."""

    at: Tensor  # int64 [K * M]; element k * M + m is the source position of tap k of sample m
    weights: Tensor  # int32 [K, M, 1], multiples of 2^-22; zero where a sample has fewer taps

    @classmethod
    def of(cls, step: FixedPointResize, device: torch.device) -> Taps:
        """Return one step's taps on ``device``."""
        return cls(_to(step.positions, device).reshape(-1), _to(step.weights, device)[:, :, None])

    def __call__(self, images: Tensor) -> Tensor:
        """Resize uint8 [A, N, C] to uint8 [A, M, C], rounding like Pillow."""
        count, samples, _ = self.weights.shape
        rows = max(1, _AT_ONCE // (count * samples * images.shape[2]))
        parts = [self._sums(images[start : start + rows]) for start in range(0, images.shape[0], rows)]
        sums = parts[0] if len(parts) == 1 else torch.cat(parts)
        return sums.add_(1 << (PRECISION_BITS - 1)).bitwise_right_shift_(PRECISION_BITS).clamp_(0, 255).byte()

    def _sums(self, images: Tensor) -> Tensor:
        count, samples, _ = self.weights.shape
        taken = images.index_select(1, self.at).view(-1, count, samples, images.shape[2])  # [A, K, M, C]
        return (taken * self.weights).sum(1, dtype=torch.int32)  # below 2^31: weights sum to 1, a few are negative


def make_turn(name: str) -> _Pipeline:
    """Return the rotation or flip for a value of ``camera.orientation``, on images [B, H, W, 3]."""
    turns: dict[str, _Pipeline] = {
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


def resampling_on(device: torch.device, processor: ImageProcessor, source: tuple[int, int]) -> Resampling | None:
    """Return the steps for upright images of size ``source``; None if ``device`` cannot run all steps."""
    steps = processor.resampling(source)
    if steps is None or _kernels(device) is not None:
        return steps
    return None if any(isinstance(step, JpegRoundTrip | FloatResize) for step in steps) else steps


def make_pipeline(
    processor: ImageProcessor, source: tuple[int, int], device: torch.device, orientation: str = "none"
) -> _Pipeline:
    """Return a function that orients and processes images of one size on ``device``.

    ``source`` is (height, width) before the rotation. Raises ConfigError if :func:`resampling_on` returns None.
    """
    turn = make_turn(orientation)
    upright = source[::-1] if orientation in ("rotate_90", "rotate_270") else source
    resampling = resampling_on(device, processor, upright)
    if resampling is None:
        raise ConfigError(f"camera.pipeline: {processor} runs only on the host; process the images there first")
    steps = [make_step(step, device) for step in resampling]

    def pipeline(images: Tensor) -> Tensor:
        images = turn(images)
        for step in steps:
            images = step(images)
        return images.contiguous()

    return pipeline


def make_step(step: Any, device: torch.device) -> _Pipeline:
    """Return the function for one step of an image processor."""
    if isinstance(step, JpegRoundTrip):
        return make_round_trip(step.size, device, _kernels(device, "jpeg"))
    makers: dict[type, Callable[[Any, torch.device], _Pipeline]] = {
        BilinearCrop: _crop, FixedPointResize: _resize, FloatResize: _float_resize, Padding: _pad,
    }  # fmt: skip
    return makers[type(step)](step, device)


def _crop(step: BilinearCrop, device: torch.device) -> _Pipeline:
    rows, columns = step.rows, step.columns
    above, below = _to(rows.below, device), _to(rows.above, device)
    left, right = _to(columns.below, device), _to(columns.above, device)
    across, down = _to(columns.share, device), _to(rows.share, device)
    if (kernels := _kernels(device)) is not None:
        return _one_kernel(kernels.crop_kernel, (above, below, left, right, across, down), (1 / 255,))

    def between(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        return one + (other - one) * share

    def along_columns(images: Tensor) -> Tensor:
        one, other = (images.index_select(2, at).float() * (1 / 255) for at in (left, right))
        return between(one, other, across[:, None])

    def crop(images: Tensor) -> Tensor:
        top, bottom = (along_columns(images.index_select(1, at)) for at in (above, below))
        return (between(top, bottom, down[:, None, None]).clamp_(0, 1) * 255.5).byte()

    return crop


def _resize(step: FixedPointResize, device: torch.device) -> _Pipeline:
    taps = Taps.of(step, device)
    if step.axis == 1:
        return lambda images: taps(images.flatten(0, 1)).view(*images.shape[:2], -1, images.shape[3])
    return lambda images: taps(images.flatten(2)).view(images.shape[0], -1, *images.shape[2:])


def _float_resize(step: FloatResize, device: torch.device) -> _Pipeline:
    tables = [_to(part, device) for axis in (step.rows, step.columns) for part in axis]
    taps = tables[0].shape[1], tables[2].shape[1]
    return _one_kernel(_kernels(device).float_resize_kernel, tables, taps)


def _kernels(device: torch.device, module: str = "resample") -> Any:
    """Return a module of Triton kernels, or None if they cannot run on ``device``."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module(f"vla_ros.engine.kernels.{module}")


def _one_kernel(kernel: Any, tables: Sequence[Tensor], numbers: Sequence[float], block: int = 256) -> _Pipeline:
    """Return a step that runs ``kernel`` with one program per block of a row.

    The output has as many rows as the first table and as many columns as the third.
    """
    height, width = len(tables[0]), len(tables[2])

    def run(images: Tensor) -> Tensor:
        out = images.new_empty(len(images), height, width, 3)
        grid = len(images) * height, -(-3 * width // block)
        kernel[grid](
            images.contiguous(), *tables, out, *images.shape[1:3], height, width, *numbers, BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    return run


def _pad(step: Padding, device: torch.device) -> _Pipeline:
    def pad(images: Tensor) -> Tensor:
        (height, width), (top, left) = step.size, step.corner
        result = images.new_zeros(images.shape[0], height, width, images.shape[3])
        result[:, top : top + images.shape[1], left : left + images.shape[2]] = images
        return result

    return pad


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.tensor(array, device=device)  # a copy: the steps are shared
