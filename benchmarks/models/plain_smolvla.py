"""SmolVLA in plain PyTorch, as published code computes it: the baseline of ``smolvla``.

The prompt is padded and masked as in training, and every step embeds its time and projects the prefix's keys and
values for the crossing layers. It runs operation by operation, or with every layer under ``torch.compile``.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.models.plain_pi import Wrap, _block, _heads, _rotary, _rotate
from vla_ros_models.pi.network import euler_times, time_embedding
from vla_ros_models.smolvla.network import SmolVlaNetwork

EPS = 1e-5
"""Epsilon of SmolLM2's norms."""


class PlainSmolVla:
    """Computes a chunk in plain PyTorch; ``wrap``, such as ``torch.compile``, is applied to each layer."""

    def __init__(self, network: SmolVlaNetwork, steps: int, wrap: Wrap = lambda function: function) -> None:
        self._network, self._times = network, euler_times(steps, summed=False)
        sizes = network.architecture
        self._embedded = [time_embedding(time, sizes.expert.hidden_size, sizes.periods) for time in self._times]
        self._block, self._layer = wrap(_block), wrap(_layer)

    @torch.no_grad()
    def __call__(self, images: Tensor, tokens: Tensor, length: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        """Compute one chunk [H, A].

        From images [cameras, S, S, 3] in [0, 1], int64 tokens [L] (``length`` without padding), float32 state [S]
        and noise [H, A].
        """
        network, sizes = self._network, self._network.architecture
        patches = self._see(images).flatten(0, 1)
        words = network.embed_tokens(tokens) * math.sqrt(sizes.prefix.hidden_size)
        token = network.state_proj(state)[None].to(words.dtype)
        hidden = torch.cat([patches, words, token])[None]  # [1, N, width]
        count, places = hidden.shape[1], torch.arange(hidden.shape[1], device=hidden.device)
        known = (places < len(patches) + length) | (places == count - 1)
        rotary = _rotary(known.cumsum(0) - 1, sizes.prefix.head_dim, hidden.dtype)
        seen = known & ((places < count - 1)[None] | (places == count - 1)[:, None])
        layers: list[Any] = list(network.prefix.layers)
        cache = []
        for layer in layers[:-1]:
            hidden, kept = self._layer(layer, hidden, rotary, None, seen[None, None])
            cache.append(kept)
        normed = _norm(hidden, layers[-1].input_norm)
        key, value = layers[-1].qkv(normed).chunk(2, dim=-1)
        cache.append((_rotate(_heads(key, sizes.prefix.head_dim), rotary), _heads(value, sizes.prefix.head_dim)))
        rows = torch.arange(sizes.horizon, device=hidden.device)
        own = _rotary(known.sum() + rows, sizes.prefix.head_dim, hidden.dtype)
        across = _rotary(rows, sizes.prefix.head_dim, hidden.dtype)
        prefix = known.expand(len(rows), -1)
        mask = torch.cat([prefix, rows[:, None] >= rows], dim=1)[None, None]
        actions = noise
        for embedded in self._embedded:
            both = torch.cat([network.action_in_proj(actions), embedded.to(actions).expand(len(rows), -1)], dim=-1)
            stream = network.action_time_mlp_out(functional.silu(network.action_time_mlp_in(both)))
            stream = stream[None].to(hidden.dtype)
            for index, layer in enumerate(network.expert.layers):
                kept = cache[sizes.reads[index]]
                if index in sizes.crossing:
                    stream, _ = self._layer(layer, stream, across, kept, prefix[None, None])
                else:
                    stream, _ = self._layer(layer, stream, own, kept, mask)
            velocity = network.action_out_proj(_norm(stream, network.expert.norm)[0].float())
            actions = actions - velocity / len(self._times)
        return actions

    def _see(self, images: Tensor) -> Tensor:
        network, sizes = self._network, self._network.architecture
        tokens = network.vision.embed(images)
        for block in network.vision.blocks:
            tokens = self._block(block, tokens)
        unit, side = sizes.shuffle, sizes.vision.image_size // sizes.vision.patch_size // sizes.shuffle
        grid = network.vision.norm(tokens).view(len(images), side, unit, side, unit, -1).transpose(2, 3)
        made: Tensor = network.projector(grid.reshape(len(images), side * side, -1))
        return made * math.sqrt(sizes.prefix.hidden_size)


def _layer(
    layer: Any, hidden: Tensor, rotary: Any, cache: Any, mask: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one layer over [1, N, width] behind ``cache``, or across to it; also return its keys and values."""
    size, normed = rotary[0].shape[-1], _norm(hidden, layer.input_norm)
    if hasattr(layer, "k"):
        query, (key, value) = layer.q(normed), (part.transpose(1, 2).flatten(2) for part in cache)
        keys, values = _heads(layer.k(key), size), _heads(layer.v(value), size)
    else:
        projected = layer.qkv(normed)
        width = projected.shape[-1] - layer.o.weight.shape[1]
        query, key, value = projected.split([layer.o.weight.shape[1], width // 2, width // 2], dim=-1)
        keys, values = _rotate(_heads(key, size), rotary), _heads(value, size)
        if cache is not None:
            keys, values = torch.cat([cache[0], keys], dim=2), torch.cat([cache[1], values], dim=2)
    mixed = functional.scaled_dot_product_attention(
        _rotate(_heads(query, size), rotary), keys, values, attn_mask=mask, enable_gqa=True
    )
    hidden = hidden + layer.o(mixed.transpose(1, 2).flatten(2))
    gate, up = layer.gate_up(_norm(hidden, layer.post_norm)).chunk(2, dim=-1)
    return hidden + layer.down(functional.silu(gate) * up), (keys, values)


def _norm(hidden: Tensor, norm: Any) -> Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.weight.float()
    return wide.to(hidden.dtype)
