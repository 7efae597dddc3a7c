"""Numbers of 8 bits in floating point (e4m3): one scale per output of a weight, one per row of activations."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the format; the largest of a row becomes this."""

CAPABILITY = (8, 9)
"""Compute capability from which tensor cores multiply this format (Ada)."""


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [..., K]; returns them and their scales, float32 [..., 1]."""
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (wide / scale).to(FP8), scale


def product(rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``(rows * row_scale) @ (weight * scale).T`` on the tensor cores: [M, N] in ``dtype``.

    Elsewhere than on a GPU in float32.

    Args:
        rows: [M, K].
        row_scale: Float32 [M, 1].
        weight: [N, K].
        scale: Float32 [N].
        dtype: Of the result; bfloat16 on a GPU.
    """
    if not rows.is_cuda:
        return ((rows.float() * row_scale) @ (weight.float() * scale[:, None]).t()).to(dtype)
    return torch._scaled_mm(
        rows, weight.t(), scale_a=row_scale, scale_b=scale[None], out_dtype=dtype, use_fast_accum=True
    )
