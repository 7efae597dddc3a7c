"""8-bit weights: one scale per output, symmetric, packed for the tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_ros.engine import lowbit
from vla_ros.engine.lowbit import FRAGMENT_N


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K] to 8 bits: the largest magnitude of each output becomes 127.

    Returns words int32 [N / 8, K-groups, 128], packed by :mod:`vla_ros.engine.lowbit` with bytes in two's
    complement, and scales float32 [N / 8, 8]. Raises ConfigError if N is not a multiple of 16, the outputs of one
    matrix instruction.
    """
    lowbit.check_outputs(weight, 8)
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp_min(1e-12) / 127.0  # [N]
    numbers = (wide / scale[:, None]).round_().to(torch.int8)
    return lowbit.pack_weights(lowbit.widen(numbers), 8), scale.view(-1, FRAGMENT_N)


def dequantize(words: Tensor, scale: Tensor, inputs: int) -> Tensor:
    """Return float32 [N, K]: number * scale."""
    numbers = lowbit.unpack_weights(words, 8).view(torch.int8)
    return numbers[:, :inputs].float() * scale.reshape(-1, 1)
