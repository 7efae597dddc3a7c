"""Packs 4-bit and 8-bit weights in the register order of tensor cores.

A *fragment* has 8 outputs and one *K-group* of inputs: 128 inputs of 4 bits, or 64 of 8 bits. It takes 128 words of
32 bits, 512 contiguous bytes. Lane ``4 g + t`` of a warp holds weights of output g; it owns words ``4 (4 g + t)``
to ``4 (4 g + t) + 3`` of the fragment and loads them as 16 bytes. Half e of the lane's word ``2 h + i`` holds
inputs ``16 j + 8 h + 2 t + e`` of the K-group, for the i-th half of all values of j, the first j in the lowest
bits. This is where ``mma`` and ``wgmma`` expect the elements of an operand in registers (PTX ISA, "Matrix Fragments
for mma.m16n8k16"). So unpacked values need not move between lanes or through shared memory, and the two halves of a
word become the two bfloat16 values of a register.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_ros.errors import ConfigError

FRAGMENT_N = 8
"""Outputs per fragment."""

WORDS = 128
"""32-bit words per fragment."""

BITS = {"int4": 4, "int8": 8}
"""Bits per weight of each packed kind."""

ALIGN_K = 128
"""Inputs are padded with zeros to a multiple of this number."""


def k_group(bits: int) -> int:
    return 16 * 32 // bits


def widen(weight: Tensor) -> Tensor:
    """Return a weight [N, K] with its inputs padded to a multiple of :data:`ALIGN_K`."""
    inputs = weight.shape[1]
    return torch.nn.functional.pad(weight, (0, -inputs % ALIGN_K))


def check_outputs(weight: Tensor, bits: int) -> None:
    """Raise ConfigError unless N of a weight [N, K] is a multiple of 16, the outputs of one matrix instruction."""
    if weight.shape[0] % (2 * FRAGMENT_N):
        raise ConfigError(
            f"policy.quantization: {bits}-bit weights need a multiple of {2 * FRAGMENT_N} outputs; found a weight "
            f"of shape {list(weight.shape)}"
        )


def pack_weights(numbers: Tensor, bits: int) -> Tensor:
    """Pack ``numbers`` [N, K] into int32 words [N / 8, K-groups, 128].

    K is a multiple of the K-group. The numbers are uint8, or int8 in two's complement; their lowest ``bits`` (4 or
    8) are used.
    """
    outputs, each = numbers.shape[0], 16 // bits
    # [fragment, g, group, i, n, h, t, e], where j is (i, n), to [fragment, group, g, t, h, i, e, n]
    ordered = numbers.view(outputs // FRAGMENT_N, FRAGMENT_N, -1, 2, each, 2, 4, 2).permute(0, 2, 1, 6, 5, 3, 7, 4)
    words = torch.zeros(ordered.shape[:-2], dtype=torch.int32, device=numbers.device)
    for e in range(2):
        for n in range(each):
            number = ordered[..., e, n].to(torch.int32) & ((1 << bits) - 1)
            words |= number << (16 * e + bits * n)
    return words.reshape(outputs // FRAGMENT_N, -1, WORDS)


def unpack_weights(words: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack_weights`; return uint8 [N, inputs]."""
    fragments, count, _ = words.shape
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    ordered = ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    parts = ordered.view(fragments, count, FRAGMENT_N, 4, 2, 2, 2, 16 // bits).permute(0, 2, 1, 5, 7, 4, 3, 6)
    return parts.reshape(fragments * FRAGMENT_N, count * k_group(bits))
