"""4-bit weights: groups of 128 inputs share a scale and a zero point, packed for the tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_ros.engine import lowbit
from vla_ros.engine.lowbit import FRAGMENT_N

GROUP = lowbit.k_group(4)
"""Inputs that share a scale and a zero point; the width is padded to whole groups with zeros."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] to 4 bits: 15 steps over each group's range, which is extended to include zero.

    Returns words int32 [N / 8, groups, 128], packed by :mod:`vla_ros.engine.lowbit`, and the grid int32 [N / 8,
    groups, 8]. A grid entry holds two bfloat16: the scale in its lower half, and in its upper half -128 - zero
    point, which a kernel adds to 128 + nibble. Raises ConfigError if N is not a multiple of 16, the outputs of one
    matrix instruction.
    """
    lowbit.check_outputs(weight, 4)
    grouped = lowbit.widen(weight.float()).view(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(dim=2).clamp_max(0.0), grouped.amax(dim=2).clamp_min(0.0)  # [N, groups]
    scale = ((high - low) / 15.0).clamp_min(1e-12).to(torch.bfloat16)
    zero = (-low / scale.float()).round().clamp_(0, 15)
    numbers = (grouped / scale.float()[:, :, None] + zero[:, :, None]).round_().clamp_(0, 15).to(torch.uint8)
    return lowbit.pack_weights(numbers.view(weight.shape[0], -1), 4), _grid(scale, zero)


def dequantize(words: Tensor, grid: Tensor, inputs: int) -> Tensor:
    """Return float32 [N, K]: (nibble - zero point) * scale."""
    scale, offset = (part[:, :, None] for part in unpack_grid(grid))
    numbers = lowbit.unpack_weights(words, 4).view(scale.shape[0], -1, GROUP)
    return ((numbers + (128.0 + offset)) * scale).view(scale.shape[0], -1)[:, :inputs]


def unpack_grid(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and -128 - zero point, float32 [N, groups] each."""
    halves = grid.view(torch.bfloat16).view(*grid.shape, 2).float()  # little-endian: the scale comes first
    both = halves.permute(3, 0, 2, 1).reshape(2, -1, grid.shape[1])
    return both[0], both[1]


def reorder(rows: Tensor) -> Tensor:
    """Reorder the inputs of rows [M, K] to match packed weights in FP8 products; K is padded to whole groups.

    Input 64 i + 32 n + 16 p + 8 h + 2 t + e of a group moves to place 64 h + 32 i + 16 p + 4 t + 2 e + n. The lower
    nibbles of a 32-bit word's bytes, and likewise the upper nibbles, then belong to four successive places.
    """
    return lowbit.widen(rows).view(len(rows), -1, 2, 2, 2, 2, 4, 2).permute(0, 1, 5, 2, 4, 6, 7, 3).flatten(1)


def restore(rows: Tensor) -> Tensor:
    """Undo :func:`reorder`, for rows [M, a multiple of 128]."""
    return rows.view(len(rows), -1, 2, 2, 2, 4, 2, 2).permute(0, 1, 3, 7, 4, 2, 5, 6).flatten(1)


def _grid(scale: Tensor, zero: Tensor) -> Tensor:
    halves = torch.stack([scale, (-128.0 - zero).to(torch.bfloat16)], dim=-1)  # whole numbers up to 143: exact
    count = scale.shape[1]
    return (
        halves.view(-1, FRAGMENT_N, count, 2)
        .transpose(1, 2)
        .contiguous()
        .view(torch.int32)
        .view(-1, count, FRAGMENT_N)
    )
