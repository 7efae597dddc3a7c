"""8-bit floating point (e4m3): one scale per output of a weight and per row of activations."""

from functools import cache

import torch
from torch import Tensor

from vla_ros_models.engine.lowbit import Reduce, unchanged
from vla_ros_models.engine.tile_configs import gpu_of

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value of the format; each row's largest magnitude is scaled to it."""

CAPABILITY = (8, 9)
"""Minimum compute capability whose tensor cores support this format (Ada)."""


def runs_on(device: torch.device) -> bool:
    """Return True if ``device`` is a GPU whose tensor cores support this format, or a CPU (in float32)."""
    return device.type == "cpu" or gpu_of(device).capability >= CAPABILITY


def quantize(rows: Tensor, largest: Reduce = unchanged) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., K]; return the FP8 values and their scales, float32 [..., 1].

    ``largest`` is as in :func:`vla_ros_models.engine.lowbit.quantize_int8`.
    """
    wide = rows.float()
    scale = largest(wide.abs().amax(-1, keepdim=True)).clamp_min(1e-12) / LARGEST
    return (wide / scale).to(FP8), scale


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weight.T`` without scales, bfloat16 [M, N]; ``rows`` [M, K] and ``weight`` [N, K] are FP8.

    The operation that reads the result applies the scales of rows and columns. cuBLAS could apply them, but would
    take up to 1.6 times as long (H200, 288 rows).
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
