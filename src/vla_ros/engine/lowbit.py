"""Weights of few bits in the order in which the matrix units of a GPU take them.

A *unit* is 8 outputs, a *stretch* as many inputs as one lane's words hold of it: 128 of 4 bits, 64 of 8. A unit's
stretch is 128 words of 32 bits, 512 bytes that lie together: lane ``4 g + t`` of a warp (output g of the unit) owns
words ``4 (4 g + t)`` to ``+ 3`` of it, and loads them as 16 bytes. Half e of its word ``2 h + i`` holds the inputs
``16 j + 8 h + 2 t + e`` of the stretch, for the i-th half of all j, the first in the lowest bits. These are the
places at which ``mma`` and ``wgmma`` expect the elements of an operand in registers (PTX ISA, "Matrix Fragments for
mma.m16n8k16"), so that what a lane unpacks need not be moved to another lane, nor through shared memory; and a
register of two bfloat16 comes out of the two halves of one word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_ros.errors import ConfigError

UNIT = 8
"""Outputs whose words of one stretch lie together."""

WORDS = 128
"""Words of a unit's stretch."""

BITS = {"int4": 4, "int8": 8}
"""Kinds of weight that are packed, to the bits of a number."""

WIDTH = 128
"""A width is filled up with zeros to a multiple of this many inputs."""


def stretch(bits: int) -> int:
    """Inputs of a stretch."""
    return 16 * 32 // bits


def stretches(inputs: int, bits: int) -> int:
    """Stretches that a width takes."""
    return -(-inputs // WIDTH) * (WIDTH // stretch(bits))


def widen(weight: Tensor) -> Tensor:
    """A weight [N, K] with its inputs filled up to a multiple of :data:`WIDTH`."""
    inputs = weight.shape[1]
    return torch.nn.functional.pad(weight, (0, -inputs % WIDTH))


def check_outputs(weight: Tensor, bits: int) -> None:
    """Refuse a weight [N, K] that matrix instructions cannot cut.

    Raises:
        ConfigError: N is no multiple of 16, the outputs of one matrix instruction.
    """
    if weight.shape[0] % (2 * UNIT):
        raise ConfigError(
            f"policy.quantization: {bits} bits need outputs in multiples of {2 * UNIT}, found a weight "
            f"{list(weight.shape)}"
        )


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Words int32 [N / 8, stretches, 128] of ``numbers`` [N, K], K whole stretches.

    Args:
        numbers: Uint8, or int8 in two's complement; of each, the lowest ``bits`` count.
        bits: 4 or 8.
    """
    outputs, each = numbers.shape[0], 16 // bits
    # [unit, g, stretch, i, n, h, t, e], j being (i, n), to [unit, stretch, g, t, h, i, e, n]
    ordered = numbers.view(outputs // UNIT, UNIT, -1, 2, each, 2, 4, 2).permute(0, 2, 1, 6, 5, 3, 7, 4)
    words = torch.zeros(ordered.shape[:-2], dtype=torch.int32, device=numbers.device)
    for e in range(2):
        for n in range(each):
            number = ordered[..., e, n].to(torch.int32) & ((1 << bits) - 1)
            words |= number << (16 * e + bits * n)
    return words.reshape(outputs // UNIT, -1, WORDS)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The numbers of :func:`pack`, uint8 [N, stretches * inputs of one]."""
    units, count, _ = words.shape
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    ordered = ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    parts = ordered.view(units, count, UNIT, 4, 2, 2, 2, 16 // bits).permute(0, 2, 1, 5, 7, 4, 3, 6)
    return parts.reshape(units * UNIT, count * stretch(bits))
