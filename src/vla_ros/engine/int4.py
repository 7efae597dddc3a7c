"""Weights of 4 bits in the order in which the matrix units of a GPU take them.

A *unit* is 8 outputs, a *group* 128 inputs: the weights that share a scale and a zero point are one output of one
group. A unit's group is 128 words of 32 bits, one stretch of 512 bytes: lane ``4 g + t`` of a warp (output g of the
unit) owns words ``4 (4 g + t)`` to ``+ 3`` of it, and loads them as 16 bytes. Nibble j of its word ``2 h + e`` is
input ``16 j + 8 h + 2 t + e`` of the group. These are the places at which ``mma`` and ``wgmma`` expect the elements
of an operand in registers (PTX ISA, "Matrix Fragments for mma.m16n8k16"), so that what a lane unpacks need not be
moved to another lane, nor through shared memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_ros.errors import ConfigError

GROUP = 128
"""Inputs that share a scale and a zero point; a narrower or uneven width is filled up with zeros."""

UNIT = 8
"""Outputs whose words of one group lie together."""

_NIBBLES = 8


def groups(inputs: int) -> int:
    """Groups that a width takes."""
    return -(-inputs // GROUP)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round some outputs of a weight [N, K] to 4 bits: the range of each group, with zero in it, cut into 15 steps.

    Returns:
        Words int32 [N / 8, groups, 128] and grid int32 [N / 8, groups, 8]. A grid entry holds two bfloat16: the
        scale below and -128 - zero point above, which is what a kernel adds to 128 + nibble.

    Raises:
        ConfigError: N is no multiple of 16, the outputs of one matrix instruction.
    """
    outputs, inputs = weight.shape
    if outputs % (2 * UNIT):
        raise ConfigError(
            f"policy.quantization: 4 bits need outputs in multiples of {2 * UNIT}, found a weight "
            f"[{outputs}, {inputs}]"
        )
    wide = torch.nn.functional.pad(weight.float(), (0, groups(inputs) * GROUP - inputs))
    grouped = wide.view(outputs, -1, GROUP)
    low, high = grouped.amin(dim=2).clamp_max(0.0), grouped.amax(dim=2).clamp_min(0.0)  # [N, groups]
    scale = ((high - low) / 15.0).clamp_min(1e-12).to(torch.bfloat16)
    zero = (-low / scale.float()).round().clamp_(0, 15)
    numbers = (grouped / scale.float()[:, :, None] + zero[:, :, None]).round_().clamp_(0, 15).to(torch.uint8)
    return pack(numbers.view(outputs, -1)), _grid(scale, zero)


def dequantize(words: Tensor, grid: Tensor, inputs: int) -> Tensor:
    """Float32 [N, K]: (nibble - zero point) * scale."""
    scale, offset = (part[:, :, None] for part in unpack_grid(grid))
    numbers = unpack(words).view(scale.shape[0], -1, GROUP)
    return ((numbers + (128.0 + offset)) * scale).view(scale.shape[0], -1)[:, :inputs]


def pack(numbers: Tensor) -> Tensor:
    """Words of uint8 ``numbers`` [N, groups * 128] below 16."""
    outputs = numbers.shape[0]
    # [unit, g, group, j, h, t, e] to [unit, group, g, t, h, e, j]
    ordered = numbers.view(outputs // UNIT, UNIT, -1, _NIBBLES, 2, 4, 2).permute(0, 2, 1, 5, 4, 6, 3)
    words = ordered[..., 0].to(torch.int32)
    for j in range(1, _NIBBLES):
        words |= ordered[..., j].to(torch.int32) << (4 * j)
    return words.reshape(outputs // UNIT, -1, GROUP)


def unpack(words: Tensor) -> Tensor:
    """The numbers of :func:`pack`, uint8 [N, groups * 128]."""
    units, count, _ = words.shape
    shifts = torch.arange(0, 4 * _NIBBLES, 4, dtype=torch.int32, device=words.device)
    ordered = ((words[..., None] >> shifts) & 15).to(torch.uint8)
    parts = ordered.view(units, count, UNIT, 4, 2, 2, _NIBBLES).permute(0, 2, 1, 6, 4, 3, 5)
    return parts.reshape(units * UNIT, count * GROUP)


def unpack_grid(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and -128 - zero point, float32 [N, groups]."""
    halves = grid.view(torch.bfloat16).view(*grid.shape, 2).float()  # little-endian: the scale comes first
    both = halves.permute(3, 0, 2, 1).reshape(2, -1, grid.shape[1])
    return both[0], both[1]


def _grid(scale: Tensor, zero: Tensor) -> Tensor:
    halves = torch.stack([scale, (-128.0 - zero).to(torch.bfloat16)], dim=-1)  # whole numbers up to 143: exact
    count = scale.shape[1]
    return halves.view(-1, UNIT, count, 2).transpose(1, 2).contiguous().view(torch.int32).view(-1, count, UNIT)
