"""Weights of 4 and 8 bits, packed in the register order of tensor cores.

int8 has one scale per output, symmetric. int4 has a scale and a zero point per group of 128 inputs.

A *fragment* has 8 outputs and one *K-group* of inputs: 128 inputs of 4 bits, or 64 of 8 bits. It takes 128 words of
32 bits, 512 contiguous bytes. Lane ``4 g + t`` of a warp holds weights of output g; it owns words ``4 (4 g + t)``
to ``4 (4 g + t) + 3`` of the fragment and loads them as 16 bytes. Half e of the lane's word ``2 h + i`` holds
inputs ``16 j + 8 h + 2 t + e`` of the K-group, for the i-th half of all values of j, the first j in the lowest
bits. This is where ``mma`` and ``wgmma`` expect the elements of an operand in registers (PTX ISA, "Matrix Fragments
for mma.m16n8k16"). So unpacked values need not move between lanes or through shared memory, and the two halves of a
word become the two bfloat16 values of a register.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vla_ros.errors import ConfigError

Reduce = Callable[[Tensor], Tensor]
"""Combines the tensors that several ranks pass to it."""


def unchanged(tensor: Tensor) -> Tensor:
    """Combine the tensors of a single rank."""
    return tensor


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


def quantize_int8(weight: Tensor, largest: Reduce = unchanged) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] to 8 bits: the largest magnitude of each output becomes 127.

    ``largest`` finds the largest magnitudes of a whole weight from those of ``weight``, a shard of its inputs.

    Returns words int32 [N / 8, K-groups, 128], packed by :func:`pack_weights` with bytes in two's
    complement, and scales float32 [N / 8, 8]. Raises ConfigError if N is not a multiple of 16, the outputs of one
    matrix instruction.
    """
    check_outputs(weight, 8)
    wide = weight.float()
    scale = largest(wide.abs().amax(dim=1)).clamp_min(1e-12) / 127.0  # [N]
    numbers = (wide / scale[:, None]).round_().to(torch.int8)
    return pack_weights(widen(numbers), 8), scale.view(-1, FRAGMENT_N)


def dequantize_int8(words: Tensor, scale: Tensor, inputs: int) -> Tensor:
    """Return float32 [N, K]: number * scale."""
    numbers = unpack_weights(words, 8).view(torch.int8)
    return numbers[:, :inputs].float() * scale.reshape(-1, 1)


GROUP = k_group(4)
"""Inputs that share a scale and a zero point; the width is padded to whole groups with zeros."""


def quantize_int4(weight: Tensor, largest: Reduce = unchanged) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] to 4 bits: 15 steps over each group's range, which is extended to include zero.

    A group is within a shard, so ``largest`` is not used.
    Returns words int32 [N / 8, groups, 128], packed by :func:`pack_weights`, and the grid int32 [N / 8,
    groups, 8]. A grid entry holds two bfloat16: the scale in its lower half, and in its upper half -128 - zero
    point, which a kernel adds to 128 + nibble. Raises ConfigError if N is not a multiple of 16, the outputs of one
    matrix instruction.
    """
    check_outputs(weight, 4)
    grouped = widen(weight.float()).view(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(dim=2).clamp_max(0.0), grouped.amax(dim=2).clamp_min(0.0)  # [N, groups]
    scale = ((high - low) / 15.0).clamp_min(1e-12).to(torch.bfloat16)
    zero = (-low / scale.float()).round().clamp_(0, 15)
    numbers = (grouped / scale.float()[:, :, None] + zero[:, :, None]).round_().clamp_(0, 15).to(torch.uint8)
    return pack_weights(numbers.view(weight.shape[0], -1), 4), _grid(scale, zero)


def dequantize_int4(words: Tensor, grid: Tensor, inputs: int) -> Tensor:
    """Return float32 [N, K]: (nibble - zero point) * scale."""
    scale, offset = (part[:, :, None] for part in unpack_grid(grid))
    numbers = unpack_weights(words, 4).view(scale.shape[0], -1, GROUP)
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
    return widen(rows).view(len(rows), -1, 2, 2, 2, 2, 4, 2).permute(0, 1, 5, 2, 4, 6, 7, 3).flatten(1)


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
