"""Applies a JPEG round trip on any device, bit-identical to libjpeg-turbo.

It follows ``tf.io.encode_jpeg`` and ``decode_jpeg`` with their defaults: quality 95, 4:2:0, accurate forward DCT,
fast inverse DCT, smooth upsampling. All of it is integer arithmetic; Huffman coding is lossless and omitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
"""Factors along each axis that the fast inverse DCT expects in its coefficients."""


class _Transforms(NamedTuple):
    """Matrices int32 [outputs, inputs]."""

    to_ycc: Tensor  # [3, 3], with ``ycc_offsets`` [3]
    ycc_offsets: Tensor  # see above
    from_chroma: Tensor  # [3, 2]
    forward: Tensor  # DCT in multiples of 2^-13
    before: Tensor  # [5, 8], of an inverse DCT: what its products take
    factors: Tensor  # [5], of the products, in multiples of 2^-8
    after: Tensor  # [8, 13], takes the input with the products behind it

    @classmethod
    def on(cls, device: torch.device) -> _Transforms:
        offsets = (1 << 15, (128 << 16) + (1 << 15) - 1, (128 << 16) + (1 << 15) - 1)
        arrays = _TO_YCC, offsets, _FROM_CHROMA, _forward(), *_fast_inverse()
        return cls(*(_int32(one, device) for one in arrays))


def make_round_trip(size: tuple[int, int], device: torch.device, kernels: Any = None) -> Callable[[Tensor], Tensor]:
    """Return the round trip of uint8 images [B, *size, 3] on ``device``; they must be at least five pixels wide.

    ``kernels`` is :mod:`vla_ros.engine.kernels.jpeg` if it can run: two launches instead of sixty.
    """
    height, width = size
    transforms = _Transforms.on(device)
    tables = np.clip((np.array([_LUMA, _CHROMA]) * 10 + 50) // 100, 1, 255)  # quality 95
    aan = np.round(np.outer(_AAN, _AAN) * 2**14).astype(np.int64)
    coefficient_scales = (tables * aan + (1 << 11)) >> 12
    if kernels is not None:
        return _fused(size, kernels, transforms, _int32(8 * tables, device), _int32(coefficient_scales, device))
    rows, columns = -(-height // 16) * 2, -(-width // 16) * 2  # blocks of luma; of chroma half as many
    small_rows = -(-height // 16)
    counts = [rows * columns, 2 * small_rows * columns // 2]
    steps = _int32(np.repeat(8 * tables, counts, axis=0), device)  # coefficients are 8 times too large
    half, scales = steps // 2, _int32(np.repeat(coefficient_scales, counts, axis=0), device)
    dither = _int32(1 + np.arange(columns * 4) % 2, device)
    up, across = _neighbours(-(-height // 2), device), _neighbours(-(-width // 2), device)
    rounding = _int32((8, 7), device)

    def round_trip(images: Tensor) -> Tensor:
        batch = len(images)
        ycc = (_multiply(images, transforms.to_ycc) + transforms.ycc_offsets) >> 16
        luma = _extend(ycc[..., 0], 8 * rows - height, 8 * columns - width)
        chroma = _extend(ycc[..., 1:].permute(0, 3, 1, 2).flatten(0, 1), height % 2, 8 * columns - width)
        quads = chroma[:, ::2, ::2] + chroma[:, ::2, 1::2] + chroma[:, 1::2, ::2] + chroma[:, 1::2, 1::2]
        small = (quads + dither) >> 2
        small = _extend(small, 8 * small_rows - small.shape[1], 0)
        blocks = torch.cat([_to_blocks(luma, batch), _to_blocks(small, batch)], 1) - 128
        coefficients = (_multiply(blocks, transforms.forward) + (1 << 10)) >> 11
        coefficients = (_multiply(coefficients.mT, transforms.forward) + (1 << 14)).mT >> 15
        levels = (coefficients.abs() + half).div_(steps, rounding_mode="floor") * coefficients.sign()
        coded = _inverse(_inverse((levels * scales).mT, transforms).mT, transforms)
        decoded = ((coded >> 5) + 128).clamp_(0, 255)
        luma = _from_blocks(decoded[:, : rows * columns], batch, rows)[:, :height, :width]
        small = _from_blocks(decoded[:, rows * columns :], 2 * batch, small_rows)[:, : len(up), : len(across)]
        # Three quarters of the nearest sample and one of the next, along both axes.
        tall = torch.add(small[:, up], small[:, :, None], alpha=3).flatten(1, 2)
        large = (torch.add(tall[:, :, across], tall[..., None], alpha=3) + rounding).flatten(2, 3) >> 4
        colour = large[:, :height, :width].reshape(batch, 2, height, width).permute(0, 2, 3, 1) - 128
        added = (_multiply(colour, transforms.from_chroma) + (1 << 15)) >> 16
        return (added + luma[..., None]).clamp_(0, 255).byte()

    return round_trip


def _fused(
    size: tuple[int, int], kernels: Any, transforms: _Transforms, steps: Tensor, scales: Tensor
) -> Callable[[Tensor], Tensor]:
    """Make the round trip in two kernels, given ``steps`` and ``scales`` [2, 8, 8] of luma and chroma."""
    height, width = size
    tiles = {"ROWS": -(-height // 16), "COLUMNS": -(-width // 16)}
    pad = torch.nn.functional.pad
    tables = (
        transforms.to_ycc, transforms.ycc_offsets, transforms.forward, pad(transforms.before, (0, 0, 0, 3)),
        pad(transforms.factors, (0, 3)), pad(transforms.after, (0, 3)), steps, scales,
    )  # fmt: skip

    def round_trip(images: Tensor) -> Tensor:
        images, batch = images.contiguous(), len(images)
        luma = images.new_empty(batch, 16 * tiles["ROWS"], 16 * tiles["COLUMNS"])
        chroma = images.new_empty(batch, 2, 8 * tiles["ROWS"], 8 * tiles["COLUMNS"])
        out = torch.empty_like(images)
        grid = (batch * tiles["ROWS"] * tiles["COLUMNS"],)
        kernels.code_kernel[grid](images, *tables, luma, chroma, height, width, **tiles, num_warps=8)
        kernels.merge_kernel[(batch * height, -(-width // 256))](
            luma, chroma, transforms.from_chroma, out, height, width, **tiles, BLOCK=256, num_warps=4
        )
        return out

    return round_trip


def _inverse(x: Tensor, transforms: _Transforms) -> Tensor:
    """Compute the fast inverse DCT along the last axis; its five products are truncated, as in libjpeg."""
    products = (_multiply(x, transforms.before) * transforms.factors) >> 8
    return _multiply(torch.cat([x, products], -1), transforms.after)


def _to_blocks(planes: Tensor, batch: int) -> Tensor:
    """Split planes [N, H, W] into blocks [batch, blocks, 8, 8]."""
    count, height, width = planes.shape
    return planes.reshape(count, height // 8, 8, width // 8, 8).transpose(2, 3).reshape(batch, -1, 8, 8)


def _from_blocks(blocks: Tensor, count: int, rows: int) -> Tensor:
    """Undo :func:`_to_blocks`, for ``count`` planes of ``rows`` rows of blocks."""
    grid = blocks.reshape(count, rows, -1, 8, 8)
    return grid.transpose(2, 3).reshape(count, rows * 8, grid.shape[2] * 8)


def _neighbours(count: int, device: torch.device) -> Tensor:
    """Return the neighbours before and after each sample, int64 [count, 2]; at the border, the sample itself."""
    at = torch.arange(count, device=device)[:, None] + torch.tensor([-1, 1], device=device)
    return at.clamp_(0, count - 1)


def _int32(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


def _extend(planes: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column of planes [N, H, W]."""
    if rows:
        planes = torch.cat([planes, planes[:, -1:].expand(-1, rows, -1)], 1)
    return torch.cat([planes, planes[:, :, -1:].expand(-1, -1, columns)], 2) if columns else planes


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """Compute ``x @ matrix.T`` in int32, which no library provides on a GPU."""
    return (x[..., None, :] * matrix).sum(-1, dtype=torch.int32)


def _forward() -> np.ndarray:
    """Loeffler's, Ligtenberg's and Moschytz's DCT with factors of 13 bits."""
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
    """Arai's, Agui's and Nakajima's inverse DCT: what its five products take, their factors, and what follows."""
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
