"""A Llama decoder over preallocated buffers: ``prefill``, ``verify``, ``decode``. Nothing waits for the host.

Positions are tensors and shapes are fixed, so that each function can be captured as a CUDA graph. A sequence is
BOS, patches, the rest of the prompt, drafted tokens, padding. Causal attention keeps padding and drafts from
whatever stands before them; what they leave in the cache is overwritten before it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine.ops import Ops, Residual
from vla_ros.engine.weights import DecoderWeights


@dataclass(frozen=True)
class Cache:
    """Keys and values of B observations.

    Attributes:
        keys: Per layer [B, kv_heads, C, head_dim].
        values: The same.
        arrived: Int32 zeros [B * heads], see :meth:`~vla_ros.engine.ops.Ops.attend`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    arrived: Tensor

    @classmethod
    def allocate(cls, weights: DecoderWeights, batch: int, capacity: int) -> Cache:
        """Zeros: masked positions are multiplied by 0, which must not meet a NaN of earlier memory."""
        shape = weights.shape
        sizes = (shape.layers, batch, shape.kv_heads, capacity, shape.head_dim)
        both = torch.zeros((2, *sizes), dtype=weights.dtype, device=weights.device)
        arrived = torch.zeros(batch * shape.heads, dtype=torch.int32, device=weights.device)
        return cls(both[0].unbind(0), both[1].unbind(0), arrived)


def cache_bytes(weights: DecoderWeights, batch: int, capacity: int) -> int:
    """Bytes of :meth:`Cache.allocate`."""
    shape = weights.shape
    return 2 * shape.layers * batch * shape.kv_heads * capacity * shape.head_dim * weights.embedding.element_size()


def prefill(
    weights: DecoderWeights, ops: Ops, cache: Cache, patches: Tensor, text: Tensor, last: Tensor, rows: int
) -> Tensor:
    """Run a prompt and what is drafted behind it.

    Args:
        weights: The decoder.
        ops: How it computes.
        cache: Filled from position 0.
        patches: [B, P, hidden].
        text: Int64 [B, T]: BOS, prompt, draft, padding.
        last: Int32 [B], position of the prompt's last token in the sequence.
        rows: How many logits are wanted, from ``last`` on: 1, and one for each drafted token.

    Returns:
        Float32 logits [B, rows, vocab]; row i follows the i-th drafted token.
    """
    words = functional.embedding(text, weights.embedding)
    hidden = torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)  # [B, S, hidden]
    batch, length, _ = hidden.shape
    positions = torch.arange(length, dtype=torch.int32, device=hidden.device).expand(batch, length).contiguous()
    stream = Residual(hidden, weights.layers[0].attention_norm)
    for index, layer in enumerate(weights.layers[:-1]):
        query = ops.qkv(weights, layer, stream, positions, cache.keys[index], cache.values[index])
        mixed = ops.attend(query, cache.keys[index], cache.values[index], None)
        stream = ops.add_linear(stream, mixed, layer.output, layer.mlp_norm)
        stream = ops.add_linear(stream, ops.gate_up(weights, layer, stream), layer.down, _next_norm(weights, index))
    # The last layer owes the others its keys and values only; the few rows whose logits count run like decoding.
    index = len(weights.layers) - 1
    ops.qkv(weights, weights.layers[index], stream, positions, cache.keys[index], cache.values[index])
    wanted = last[:, None] + torch.arange(rows, dtype=torch.int32, device=last.device)  # [B, rows]
    at = wanted + length * torch.arange(batch, device=last.device)[:, None]
    few = ops.pick(stream.hidden.flatten(0, 1), at, weights.layers[index].attention_norm)
    return _finish(weights, ops, cache, few, wanted, first=index)


def verify(weights: DecoderWeights, ops: Ops, cache: Cache, tokens: Tensor, start: Tensor) -> Tensor:
    """Run R tokens at ``start``, ``start`` + 1, ... behind what the cache holds.

    A row's logits depend on the rows before it and on nothing else, to the bit on a GPU: a row among R rows and
    the same row alone give the same.

    Args:
        weights: The decoder.
        ops: How it computes.
        cache: Filled up to ``start``; takes these rows too.
        tokens: Int64 [B, R].
        start: Int32 [B].

    Returns:
        Float32 logits [B, R, vocab].
    """
    positions = start[:, None] + torch.arange(tokens.shape[1], dtype=torch.int32, device=start.device)
    return _pass(weights, ops, cache, tokens, positions)


def decode(
    weights: DecoderWeights, ops: Ops, cache: Cache, token: Tensor, start: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Decode ``count`` further tokens greedily, one after the other.

    Args:
        weights: The decoder.
        ops: How it computes.
        cache: Filled up to ``start``.
        token: Int64 [B], the newest token, which stands at ``start``.
        start: Int32 [B].
        count: Tokens to add, one pass each; 0 adds none.

    Returns:
        Tokens int64 [B, count] and margins float32 [B, count].
    """
    tokens, margins = (
        [token.new_empty(token.shape[0], 0)],
        [start.new_empty(start.shape[0], 0, dtype=torch.float32)],
    )
    positions = start + torch.arange(count, dtype=torch.int32, device=start.device)[:, None]  # [count, B]
    chosen = token[:, None]
    for step in range(count):
        chosen, margin = ops.choose(_pass(weights, ops, cache, chosen, positions[step][:, None]))
        tokens.append(chosen)
        margins.append(margin)
    return torch.cat(tokens, dim=1), torch.cat(margins, dim=1)


def _pass(weights: DecoderWeights, ops: Ops, cache: Cache, tokens: Tensor, positions: Tensor) -> Tensor:
    stream = ops.pick(weights.embedding, tokens, weights.layers[0].attention_norm)
    return _finish(weights, ops, cache, stream, positions, first=0)


def _finish(
    weights: DecoderWeights, ops: Ops, cache: Cache, stream: Residual, positions: Tensor, first: int
) -> Tensor:
    """Layers from ``first`` on and the head, for few rows; ``stream`` is used up."""
    for index in range(first, len(weights.layers)):
        layer, keys, values = weights.layers[index], cache.keys[index], cache.values[index]
        query = ops.qkv(weights, layer, stream, positions, keys, values)
        mixed = ops.attend(query, keys, values, positions, cache.arrived)
        stream = ops.add_linear(stream, mixed, layer.output, layer.mlp_norm)
        stream = ops.add_linear(stream, ops.gate_up(weights, layer, stream), layer.down, _next_norm(weights, index))
    return ops.head(weights, stream)


def _next_norm(weights: DecoderWeights, index: int) -> Tensor:
    """Weight of the norm behind layer ``index``."""
    return weights.layers[index + 1].attention_norm if index + 1 < len(weights.layers) else weights.norm
