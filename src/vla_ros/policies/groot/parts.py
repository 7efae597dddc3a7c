"""Small parts of GR00T: patches of images, and what the head computes from the flow time alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Linear = tuple[Tensor, Tensor]
"""Weight [outputs, inputs] and bias [outputs]."""

_PERIOD = 10000.0


@dataclass(frozen=True, eq=False)
class Merger:
    """Merges neighbouring patches into one token of the language model."""

    norm: Linear  # of a layer norm over a patch, or over all merged patches
    first: Linear
    second: Linear

    def __call__(self, patches: Tensor) -> Tensor:
        """Map patches [N, P, width] to tokens [N, P / merged, out_width]."""
        inputs = self.first[0].shape[1]
        rows = patches.reshape(len(patches), -1, self.norm[0].shape[0])
        rows = functional.layer_norm(rows, rows.shape[-1:], *self.norm, eps=1e-6).view(len(patches), -1, inputs)
        return functional.linear(functional.gelu(functional.linear(rows, *self.first)), *self.second)


@dataclass(frozen=True, eq=False)
class Grid:
    """What the vision tower adds to the patches of images of one size, in the order of its tokens."""

    embedded: Tensor  # [P, width], learned positions
    cosine: Tensor  # [1, P, 1, head_dim / 2]
    sine: Tensor  # the same


def sines(times: Tensor, width: int, divisor: int) -> Tensor:
    """Embed times [T] as sines, then cosines, [T, width]."""
    angles = times[:, None] * torch.exp(torch.arange(width // 2).float() * (-math.log(_PERIOD) / divisor))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def condition_on(times: Sequence[int], first: Linear, second: Linear) -> Tensor:
    """Return SiLU of the embedded times, float32 [T, width], on which all norms of the head depend."""
    sine, cosine = sines(torch.tensor(times, dtype=torch.float32), 256, 127).chunk(2, dim=-1)
    embedded = torch.cat([cosine, sine], dim=-1).to(first[0].device)
    for weight, bias in (first, second):
        embedded = functional.silu(functional.linear(embedded, weight.float(), bias.float()))
    return embedded


def modulation(condition: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
    """Return both halves of a linear function of the condition, float32 [T, width] each."""
    first, second = functional.linear(condition, layer[0].float(), layer[1].float()).chunk(2, dim=-1)
    return first, second
