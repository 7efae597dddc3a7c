"""Applies a JPEG round trip on a GPU, bit-identical to libjpeg-turbo.

The round trip equals ``tf.io.encode_jpeg`` and ``decode_jpeg`` with their defaults: quality 95, 4:2:0, accurate
forward DCT, fast inverse DCT, smooth upsampling. :mod:`vla_ros.engine.kernels.jpeg` computes it in integers, with
the tables of this module. Huffman coding is omitted, because it is lossless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
"""Factors along each axis by which the fast inverse DCT expects its coefficients to be multiplied."""


def make_round_trip(size: tuple[int, int], device: torch.device, kernels: Any) -> Callable[[Tensor], Tensor]:
    """Return the round trip on ``device`` for uint8 images [B, *size, 3] that are at least 5 pixels wide."""
    height, width = size
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
