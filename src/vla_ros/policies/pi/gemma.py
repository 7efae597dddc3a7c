"""Gemma as pi0 and pi0.5 use it: layers over one KV cache, with ordinary or adaptive norms.

Unlike OpenVLA's Llama, the norm multiplies by ``1 + weight``, the MLP's gate is tanh GELU, nothing is causal, the
head size is independent of the width, and the time modulates every norm of pi0.5's expert. Query, key and value are
one matrix here, gate and up another; the loader stacks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.policies.pi.architecture import GemmaShape

RMS_EPS = 1e-6
ROPE_THETA = 10000.0

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, [B, 1, N, head_dim] each (B may be 1)."""


class Modulation(NamedTuple):
    """Scale, shift and gate of one norm and the sublayer behind it; constant over a flow step.

    Attributes:
        scale: [width], or [B, H, width] where tokens have times of their own; the norm multiplies by ``1 + scale``.
        shift: Added after that; None in an ordinary norm.
        gate: Multiplies the sublayer's output; None in an ordinary norm.
    """

    scale: Tensor
    shift: Tensor | None = None
    gate: Tensor | None = None

    def norm(self, hidden: Tensor) -> Tensor:
        """Normalise [B, N, width] in float32 and round once, at the end."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS) * (1.0 + self.scale)
        return (wide if self.shift is None else wide + self.shift).to(hidden.dtype)

    def add(self, hidden: Tensor, branch: Tensor) -> Tensor:
        """Add the sublayer's output to the residual stream."""
        return hidden + (branch if self.gate is None else branch * self.gate.to(branch.dtype))


class RmsNorm(nn.Module):
    """RMS norm with a weight vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def modulation(self, condition: Tensor | None) -> Modulation:
        """Return the weight, which does not depend on the condition."""
        return Modulation(self.weight)


class AdaptiveNorm(nn.Module):
    """RMS norm whose scale, shift and gate are a linear function of the time condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def modulation(self, condition: Tensor | None) -> Modulation:
        """Compute scale, shift and gate from the condition [width]."""
        return Modulation(*self.dense(condition).chunk(3, dim=-1))


class KeyValueCache(NamedTuple):
    """Keys and values of prefix and suffix; every flow step overwrites the suffix.

    Attributes:
        keys: [depth, B, kv_heads, capacity, head_dim], rotated.
        values: The same.
    """

    keys: Tensor
    values: Tensor


class GemmaLayer(nn.Module):
    """Pre-norm layer.

    Args:
        shape: Sizes.
        adaptive: True for pi0.5's expert.
        keys_only: True for the last prefix layer, of which nothing but keys and values is ever used.
    """

    def __init__(self, shape: GemmaShape, adaptive: bool = False, keys_only: bool = False) -> None:
        super().__init__()
        self.shape = shape
        norm = AdaptiveNorm if adaptive else RmsNorm
        key_value = 2 * shape.kv_heads * shape.head_dim
        query = shape.heads * shape.head_dim
        self.input_norm = norm(shape.width)
        self.qkv = nn.Linear(shape.width, key_value + (0 if keys_only else query), bias=False)
        if not keys_only:
            self.o = nn.Linear(query, shape.width, bias=False)
            self.post_norm = norm(shape.width)
            self.gate_up = nn.Linear(shape.width, 2 * shape.mlp_width, bias=False)
            self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def modulations(self, condition: Tensor | None) -> tuple[Modulation, Modulation]:
        """Modulations of the norms before attention and before the MLP."""
        return self.input_norm.modulation(condition), self.post_norm.modulation(condition)

    def write_cache(
        self, hidden: Tensor, norm: Modulation, rotary: Rotary, cache: tuple[Tensor, Tensor], start: int
    ) -> None:
        """Write keys and values of [B, N, width] at ``start``, and compute nothing else."""
        size = self.shape.kv_heads * self.shape.head_dim
        projected = functional.linear(norm.norm(hidden), self.qkv.weight[-2 * size :])
        key, value = (_heads(part, self.shape) for part in projected.chunk(2, dim=-1))
        _write(cache, rotate(key, rotary), value, start)

    def forward(
        self,
        hidden: Tensor,
        modulations: tuple[Modulation, Modulation],
        rotary: Rotary,
        cache: tuple[Tensor, Tensor],
        start: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Run N tokens, [B, N, width], whose keys and values are written into ``cache`` at ``start``.

        Each token attends to all positions before ``start + N`` that ``mask`` [B, 1, 1, capacity] allows.
        """
        first, second = modulations
        size = self.shape.kv_heads * self.shape.head_dim
        projected = self.qkv(first.norm(hidden))
        query, key, value = projected.split([self.shape.heads * self.shape.head_dim, size, size], dim=-1)
        query = rotate(_heads(query, self.shape), rotary)
        end = _write(cache, rotate(_heads(key, self.shape), rotary), _heads(value, self.shape), start)
        seen = None if mask is None else mask[..., :end]
        mixed = attend(query, cache[0][:, :, :end], cache[1][:, :, :end], seen)
        hidden = first.add(hidden, self.o(mixed))
        gate, up = self.gate_up(second.norm(hidden)).chunk(2, dim=-1)
        return second.add(hidden, self.down(functional.gelu(gate, approximate="tanh") * up))


class GemmaStack(nn.Module):
    """The layers of one Gemma; only the expert has a final norm."""

    def __init__(self, shape: GemmaShape, adaptive: bool = False, keys_only: bool = False) -> None:
        super().__init__()
        last = shape.depth - 1
        self.layers = nn.ModuleList(
            GemmaLayer(shape, adaptive, keys_only and layer == last) for layer in range(shape.depth)
        )
        if not keys_only:
            self.norm = AdaptiveNorm(shape.width) if adaptive else RmsNorm(shape.width)

    def each(self) -> list[GemmaLayer]:
        """The layers as :class:`GemmaLayer`, which an ``nn.ModuleList`` does not know."""
        return [layer for layer in self.layers if isinstance(layer, GemmaLayer)]

    def fill_cache(
        self, hidden: Tensor, rotary: Rotary, cache: KeyValueCache, start: int, mask: Tensor | None
    ) -> None:
        """Write the keys and values of [B, N, width] in every layer. For stacks without adaptive norms."""
        last = len(self.layers) - 1
        for index, layer in enumerate(self.each()):
            part = (cache.keys[index], cache.values[index])
            if index == last:
                layer.write_cache(hidden, layer.input_norm.modulation(None), rotary, part, start)
            else:
                hidden = layer(hidden, layer.modulations(None), rotary, part, start, mask)

    def forward(
        self,
        hidden: Tensor,
        modulations: Sequence[tuple[Modulation, Modulation]],
        rotary: Rotary,
        cache: KeyValueCache,
        start: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Run [B, N, width] through all layers, without the final norm."""
        for index, layer in enumerate(self.each()):
            part = (cache.keys[index], cache.values[index])
            hidden = layer(hidden, modulations[index], rotary, part, start, mask)
        return hidden


def rotary_at(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotary:
    """Compute cosine and sine for positions [B, N] in float32."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None].float() * ROPE_THETA ** (-steps / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Apply the rotary embedding to [B, heads, N, head_dim]; the two halves of a head form the pairs."""
    cosine, sine = rotary
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from all N to all M; query heads that share a key head are rows of one product.

    Args:
        query: [B, heads, N, head_dim].
        key: [B, kv_heads, M, head_dim].
        value: The same.
        mask: Bool [B, 1, 1, M], True where a key may be seen; None for all.

    Returns:
        [B, N, heads * head_dim].
    """
    batch, heads, count, size = query.shape
    groups = query.reshape(batch, key.shape[1], -1, size)  # [B, kv_heads, heads / kv_heads * N, head_dim]
    mixed = functional.scaled_dot_product_attention(groups, key, value, attn_mask=mask)
    return mixed.view(batch, heads, count, size).transpose(1, 2).reshape(batch, count, heads * size)


def _heads(projected: Tensor, shape: GemmaShape) -> Tensor:
    """[B, N, heads * head_dim] to [B, heads, N, head_dim]."""
    batch, count, _ = projected.shape
    return projected.view(batch, count, -1, shape.head_dim).transpose(1, 2)


def _write(cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor, start: int) -> int:
    end = start + key.shape[2]
    cache[0][:, :, start:end] = key
    cache[1][:, :, start:end] = value
    return end
