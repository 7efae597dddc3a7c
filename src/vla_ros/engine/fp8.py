"""8-bit floating point (e4m3): one scale per output of a weight, one per row of activations."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the format; the largest of a row becomes this."""

CAPABILITY = (8, 9)
"""Compute capability from which tensor cores multiply this format (Ada)."""


@cache
def runs_on(device: torch.device) -> bool:
    """Return True if tensor cores of ``device`` support this format; a CPU computes the same in float32."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., K]; return them and their scales, float32 [..., 1]."""
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (wide / scale).to(FP8), scale


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``rows`` [M, K] @ ``weight`` [N, K].T on the tensor cores, without scales: bfloat16 [M, N].

    The operation that reads the result applies the scales of rows and columns. cuBLAS could do that, too, but takes
    up to 1.6 times as long with scales (H200, 288 rows).
    """
    if not rows.is_cuda:
        return (rows.float() @ weight.float().t()).bfloat16()
    one = _one(rows.device)
    return torch._scaled_mm(
        rows, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def scaled_product(rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(rows * row_scale) @ (weight * scale).T`` [M, N] in ``dtype``; cuBLAS applies the scales.

    ``rows`` are FP8 [M, K], ``row_scale`` float32 [M, 1], ``weight`` FP8 [N, K], ``scale`` float32 [N]. On a GPU
    ``dtype`` is bfloat16.
    """
    if not rows.is_cuda:
        return ((rows.float() * row_scale) @ (weight.float() * scale[:, None]).t()).to(dtype)
    return torch._scaled_mm(
        rows, weight.t(), scale_a=row_scale, scale_b=scale[None], out_dtype=dtype, use_fast_accum=True
    )


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
