"""Resampling steps of :mod:`vla_ros.vision` on the network's device, bit-identical to the host.

Steps compute in integers, as Pillow and libjpeg-turbo do, or in individually rounded float32 operations. JPEG and
Lanczos-3 run only in Triton, the other steps also in torch. A JPEG round trip equals ``tf.io.encode_jpeg`` and
``decode_jpeg`` with their defaults: quality 95, 4:2:0, accurate forward DCT, fast inverse DCT, smooth upsampling.
Huffman coding is omitted, because it is lossless.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.errors import ConfigError
from vla_ros.types import (
    BilinearCrop,
    BilinearPad,
    FixedPointResize,
    FloatResize,
    ImageProcessor,
    JpegRoundTrip,
    Padding,
    Resampling,
)
from vla_ros.vision.resample import PRECISION_BITS

_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61), (12, 12, 14, 19, 26, 58, 60, 55), (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62), (18, 22, 37, 56, 68, 109, 103, 77), (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101), (72, 92, 95, 98, 112, 100, 103, 99),
)  # fmt: skip
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99), (18, 21, 26, 66, 99, 99, 99, 99), (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99), *((99,) * 8,) * 4,
)  # fmt: skip
"""Quantisation tables of the standard's Annex K, for quality 50."""

_TO_YCC = ((19595, 38470, 7471), (-11059, -21709, 32768), (32768, -27439, -5329))
_FROM_CHROMA = ((0, 91881), (-22554, -46802), (116130, 0))
"""Colour conversions in multiples of 2^-16."""

_AAN = (1.0, 1.387039845, 1.306562965, 1.175875602, 1.0, 0.785694958, 0.541196100, 0.275899379)
"""Factors along each axis by which the fast inverse DCT expects its coefficients to be multiplied."""


_Pipeline = Callable[[Tensor], Tensor]
"""Converts RGB images, uint8 [B, H, W, 3], to [B, height, width, 3], uint8 or as the processor is ``floating``."""


def _jpeg(step: JpegRoundTrip, device: torch.device) -> _Pipeline:
    """Encode and decode images as JPEG does; they must be at least 5 pixels wide."""
    (height, width), kernels = step.size, _kernels(device)
    tiles = {"ROWS": -(-height // 16), "COLUMNS": -(-width // 16)}
    quantisation = np.clip((np.array([_LUMA, _CHROMA]) * 10 + 50) // 100, 1, 255)  # quality 95
    scales = (quantisation * np.round(np.outer(_AAN, _AAN) * 2**14).astype(np.int64) + (1 << 11)) >> 12
    offsets = (1 << 15, (128 << 16) + (1 << 15) - 1, (128 << 16) + (1 << 15) - 1)
    before, factors, after = _fast_inverse()  # padded to powers of two below
    tables = [
        torch.tensor(np.asarray(table), dtype=torch.int32, device=device)
        for table in (
            _TO_YCC, offsets, _forward(), np.pad(before, ((0, 3), (0, 0))), np.pad(factors, (0, 3)),
            np.pad(after, ((0, 0), (0, 3))), 8 * quantisation, scales,  # coefficients are 8 times too large
        )
    ]  # fmt: skip
    from_chroma = torch.tensor(_FROM_CHROMA, dtype=torch.int32, device=device)

    def round_trip(images: Tensor) -> Tensor:
        images, batch = images.contiguous(), len(images)
        luma = images.new_empty(batch, 16 * tiles["ROWS"], 16 * tiles["COLUMNS"])
        chroma = images.new_empty(batch, 2, 8 * tiles["ROWS"], 8 * tiles["COLUMNS"])
        out = torch.empty_like(images)
        grid = (batch * tiles["ROWS"] * tiles["COLUMNS"],)
        kernels.code_kernel[grid](images, *tables, luma, chroma, height, width, **tiles, num_warps=8)
        kernels.merge_kernel[(batch * height, -(-width // 256))](
            luma, chroma, from_chroma, out, height, width, **tiles, BLOCK=256, num_warps=4
        )
        return out

    return round_trip


def _forward() -> np.ndarray:
    """Return the DCT of Loeffler, Ligtenberg and Moschytz as a matrix, in multiples of 2^-13."""
    x = np.eye(8, dtype=np.int64)
    s0, s1, s2, s3 = (x[i] + x[7 - i] for i in range(4))
    d4, d5, d6, d7 = (x[i] - x[7 - i] for i in (3, 2, 1, 0))
    t10, t13, t11, t12 = s0 + s3, s0 - s3, s1 + s2, s1 - s2
    even = (t12 + t13) * 4433
    z5 = (d4 + d6 + d5 + d7) * 9633
    z1, z2, z3, z4 = (d4 + d7) * -7373, (d5 + d6) * -20995, (d4 + d6) * -16069 + z5, (d5 + d7) * -3196 + z5
    return np.stack([
        (t10 + t11) << 13, d7 * 12299 + z1 + z4, even + t13 * 6270, d6 * 25172 + z2 + z3,
        (t10 - t11) << 13, d5 * 16819 + z2 + z4, even - t12 * 15137, d4 * 2446 + z1 + z3,
    ])  # fmt: skip


def _fast_inverse() -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Return the inverse DCT of Arai, Agui and Nakajima: inputs of its five products, their factors, outputs."""
    unit = np.eye(13, dtype=np.int64)
    x, (m0, m1, m2, m3, m4) = unit[:8], unit[8:]
    z13, z10, z11, z12 = x[5] + x[3], x[5] - x[3], x[1] + x[7], x[1] - x[7]
    before = np.stack([x[2] - x[6], z11 - z13, z10 + z12, z12, z10])[:, :8]
    t10, t11, t13 = x[0] + x[4], x[0] - x[4], x[2] + x[6]
    t12, t7 = m0 - t13, z11 + z13
    t6 = m4 + m2 - t7
    t5 = m1 - t6
    t4 = m3 - m2 + t5
    e0, e1, e2, e3 = t10 + t13, t11 + t12, t11 - t12, t10 - t13
    return (
        before,
        (362, 362, 473, 277, -669),
        np.stack([e0 + t7, e1 + t6, e2 + t5, e3 - t4, e3 + t4, e2 - t5, e1 - t6, e0 - t7]),
    )


_AT_ONCE = 2**22  # products held at a time; their 16 MiB fit into the cache of a large GPU


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
        raise ConfigError(f"camera.processor: {processor} runs only on the host; process the images there first")
    steps = [make_step(step, device) for step in resampling]

    def pipeline(images: Tensor) -> Tensor:
        images = turn(images)
        for step in steps:
            images = step(images)
        return images.contiguous()

    return pipeline


def make_step(step: Any, device: torch.device) -> _Pipeline:
    """Return the function for one step of an image processor."""
    makers: dict[type, Callable[[Any, torch.device], _Pipeline]] = {
        BilinearCrop: _crop, BilinearPad: _bilinear_pad, FixedPointResize: _resize, FloatResize: _float_resize,
        JpegRoundTrip: _jpeg, Padding: _pad,
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


def _bilinear_pad(step: BilinearPad, device: torch.device) -> _Pipeline:
    levels = _to(np.arange(256, dtype=np.float32) / np.float32(255), device)  # a GPU divides with other bits
    if (kernels := _kernels(device)) is not None:
        tables = []
        for axis, size, begin in zip((step.rows, step.columns), step.size, step.corner, strict=True):
            beside = (begin, size - begin - len(axis.share)), (0, 0)
            pairs = (axis.below, axis.above), (1 - axis.share, axis.share)
            tables += [_to(np.pad(np.stack(pair, 1), beside), device) for pair in pairs]
        return _one_kernel(kernels.float_resize_kernel, tables, (2, 2, levels), dtype=torch.float32)
    (above, below, down), (left, right, across) = (
        [_to(part, device) for part in (axis.below, axis.above, axis.share)] for axis in (step.rows, step.columns)
    )
    top, start = step.corner

    def resize(images: Tensor) -> Tensor:
        wide = levels[images.int()]
        wide = wide.index_select(1, above) * (1 - down)[:, None, None] + (
            wide.index_select(1, below) * down[:, None, None]
        )
        wide = wide.index_select(2, left) * (1 - across)[:, None] + wide.index_select(2, right) * across[:, None]
        result = wide.new_zeros(len(images), *step.size, 3)
        result[:, top : top + len(down), start : start + len(across)] = wide.clamp_(0, 1)
        return result

    return resize


def _resize(step: FixedPointResize, device: torch.device) -> _Pipeline:
    """Resize along one axis: each of M samples is a sum over K samples of the source, rounded like Pillow."""
    at = _to(step.positions, device).reshape(-1)  # int64 [K * M]; element k * M + m is of tap k of sample m
    weights = _to(step.weights, device)[:, :, None]  # int32 [K, M, 1], zero where a sample has fewer taps
    (count, samples, _), kernels = weights.shape, _kernels(device)

    def sums(images: Tensor) -> Tensor:
        taken = images.index_select(1, at).view(-1, count, samples, images.shape[2])  # [A, K, M, C]
        return (taken * weights).sum(1, dtype=torch.int32)  # below 2^31: weights sum to 1, a few are negative

    def resize(images: Tensor) -> Tensor:
        """Resize uint8 [A, N, C] to uint8 [A, M, C]."""
        if kernels is not None:
            images, out = images.contiguous(), images.new_empty(len(images), samples, images.shape[2])
            grid = (len(images) * -(-out[0].numel() // 256),)
            kernels.taps_kernel[grid](
                images, at, weights, out, *images.shape[1:2], *out.shape[1:], count, PRECISION_BITS, BLOCK=256,
                num_warps=4,
            )  # fmt: skip
            return out
        rows = max(1, _AT_ONCE // (count * samples * images.shape[2]))
        parts = [sums(part) for part in torch.split(images, rows)]
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        return total.add_(1 << (PRECISION_BITS - 1)).bitwise_right_shift_(PRECISION_BITS).clamp_(0, 255).byte()

    if step.axis == 1:
        return lambda images: resize(images.flatten(0, 1)).view(*images.shape[:2], -1, images.shape[3])
    return lambda images: resize(images.flatten(2)).view(images.shape[0], -1, *images.shape[2:])


def _float_resize(step: FloatResize, device: torch.device) -> _Pipeline:
    tables = [_to(part, device) for axis in (step.rows, step.columns) for part in axis]
    taps = tables[0].shape[1], tables[2].shape[1]
    return _one_kernel(_kernels(device).float_resize_kernel, tables, (*taps, None))


def _kernels(device: torch.device) -> Any:
    """Return the module of Triton kernels, or None if they cannot run on ``device``."""
    if device.type == "cpu" or find_spec("triton") is None:
        return None
    return import_module("vla_ros_models.engine.kernels.resample")


def _one_kernel(
    kernel: Any, tables: Sequence[Tensor], more: Sequence[Any], block: int = 256, dtype: torch.dtype = torch.uint8
) -> _Pipeline:
    """Return a step that runs ``kernel`` with one program per block of a row.

    The output has as many rows as the first table and as many columns as the third.
    """
    height, width = len(tables[0]), len(tables[2])

    def run(images: Tensor) -> Tensor:
        out = images.new_empty(len(images), height, width, 3, dtype=dtype)
        grid = len(images) * height, -(-3 * width // block)
        kernel[grid](
            images.contiguous(), *tables, out, *images.shape[1:3], height, width, *more, BLOCK=block,
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
