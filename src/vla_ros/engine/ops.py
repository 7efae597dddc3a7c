"""The operations of a decoder pass, in torch.

:class:`~vla_ros.engine.triton_ops.TritonOps` overrides them for a GPU. The decoder is written once and runs on
either class. Shapes: B observations of R rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine import fp8, int4
from vla_ros.engine.tile_configs import SKINNY
from vla_ros.engine.weights import DecoderWeights, Matrix, dequantize


@dataclass(frozen=True)
class KVCache:
    """Keys and values of B observations."""

    keys: tuple[Tensor, ...]  # per layer [B, kv_heads, C, head_dim]
    values: tuple[Tensor, ...]  # the same
    # Int32 zeros [B * heads]: programs that split the attention of a head count here how many have finished, and
    # reset the counter. Each cache has its own counters, because two caches may be in use at the same time.
    split_counters: Tensor

    @classmethod
    def allocate(cls, weights: DecoderWeights, batch: int, capacity: int, layers: int | None = None) -> KVCache:
        """Return a cache of zeros: masked values are multiplied by 0, but uninitialised memory could hold NaN.

        ``layers`` is the number of separate layers. With 1, all layers share one: do not read the cache later.
        """
        shape, device = weights.shape, weights.device
        sizes = (batch, shape.kv_heads, capacity, shape.head_dim)
        # One tensor per layer, not views of one tensor: autograd then allows separate writes.
        made = layers or shape.layers
        tensors = [torch.zeros(sizes, dtype=weights.dtype, device=device) for _ in range(2 * made)]
        counters = torch.zeros(batch * shape.heads, dtype=torch.int32, device=device)
        each = shape.layers // made
        return cls(tuple(tensors[:made]) * each, tuple(tensors[made:]) * each, counters)


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a pass's rows in their sequences, and values that every layer derives from the positions."""

    at: Tensor  # int32 [B, R]
    prompt: bool  # True if these are rows 0 to R - 1 of every observation
    cosine: Tensor  # of the rows, [B or 1, R, 1, head_dim / 2]; Triton's kernels take the whole table
    sine: Tensor  # the same
    # Int64 [B, kv_heads, R, head_dim], where torch writes keys and values; None for a prompt.
    slots: Tensor | None = None
    end: int = 0  # number of cache positions that torch reads
    # Bool [B, 1, R or 1, end], True where a row sees a position, or values to add to the scores; None for no mask.
    mask: Tensor | None = None
    causal: bool = True  # True if a prompt's rows do not see later rows
    # Int32 [B], number of positions before the padding of a bidirectional prompt; None without padding.
    length: Tensor | None = None
    # Type of the attention's result for few rows; None for the type of its queries.
    rows_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Residual:
    """The residual stream of some rows, before a norm."""

    hidden: Tensor  # [B, R, hidden]
    norm: Tensor  # [hidden], the weight of that norm
    # A product not yet added to ``hidden``; ``Ops.norm`` and ``Ops.qkv`` add it in place.
    branch: ScaledProduct | None = field(default=None, kw_only=True)


class ScaledProduct(NamedTuple):
    """A product [M, N], or its partial sums, to be multiplied by the scales of rows [M, 1] and columns [N]."""

    values: Tensor
    rows: Tensor | None
    columns: Tensor | None


class QuantizedRows(NamedTuple):
    """Rows quantised by the kernel that computed them: FP8 [M, K], and scales float32 [M, 1].

    For 4-bit weights the inputs are in the order of :func:`vla_ros.engine.int4.reorder`, and ``sums``, float32
    [M, groups], holds the sum of each group's values, times 2^-9.
    """

    values: Tensor
    scale: Tensor
    sums: Tensor | None = None


Rows = Tensor | QuantizedRows
"""Inputs of a product, [B, R, K]."""


class Ops:
    """The operations in plain torch, with the rounding steps of transformers' Llama.

    Args:
        attention: ``sdpa``, ``eager`` or ``flash_attention_2``.
    """

    def __init__(self, attention: str = "sdpa") -> None:
        self._attention = attention

    def locate(self, weights: DecoderWeights, cache: KVCache, at: Tensor, prompt: bool = False) -> Positions:
        """Prepare a pass over rows at positions ``at``, int32 [B, R]."""
        shape, rows = weights.shape, at.shape[1]
        if prompt:
            return Positions(
                at, prompt, weights.cosine[None, :rows, None], weights.sine[None, :rows, None], end=rows
            )
        cosine, sine = weights.cosine[at][:, :, None], weights.sine[at][:, :, None]
        slots = at.long()[:, None, :, None].expand(-1, shape.kv_heads, -1, shape.head_dim)
        return Positions(at, prompt, cosine, sine, slots, *self._visible(at, cache.keys[0].shape[2]))

    def locate_both_ways(
        self, weights: DecoderWeights, cache: KVCache, at: Tensor, length: Tensor | None
    ) -> Positions:
        """Prepare a prompt whose rows see each other in both directions, up to ``length``, int32 [B]."""
        mask = None
        if length is not None:
            # Added to the scores, in their type: attention would convert a boolean mask again in every layer.
            mask = torch.zeros(at.shape, dtype=weights.dtype, device=at.device)
            mask = mask.masked_fill(at >= length[:, None], float("-inf"))[:, None, None]
        return replace(self.locate(weights, cache, at, prompt=True), causal=False, mask=mask)

    def start(self, hidden: Tensor, norm: Tensor) -> Residual:
        """Begin the residual stream of a prompt: ``hidden`` [B, R, hidden] before a norm."""
        return Residual(hidden, norm)

    def gather(self, table: Tensor, index: Tensor, norm: Tensor, rows_dtype: torch.dtype | None = None) -> Residual:
        """Begin a residual stream with rows ``index``, int64 [B, R], of ``table`` [V, hidden], before ``norm``.

        Few-row kernels store the inputs of products in ``rows_dtype``; None means the type of ``table``.
        """
        return Residual(functional.embedding(index, table), norm)

    def norm(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """Return the stream after its norm."""
        return rms_norm(stream.hidden, stream.norm, weights.shape.rms_norm_eps)

    def qkv(
        self, weights: DecoderWeights, index: int, stream: Residual, positions: Positions, cache: KVCache
    ) -> Tensor:
        """Norm, project and rotate in layer ``index``; fill its cache, return queries [B, R, heads, head_dim]."""
        shape = weights.shape
        batch, rows, _ = stream.hidden.shape
        kv = shape.kv_heads * shape.head_dim
        parts = _linear(
            self.norm(weights, stream), weights.layers[index].qkv, (shape.heads * shape.head_dim, kv, kv)
        )
        query, key, value = (part.view(batch, rows, -1, shape.head_dim) for part in parts)
        for store, new in (
            (cache.keys[index], rotate(key, positions.cosine, positions.sine)),
            (cache.values[index], value),
        ):
            if positions.slots is None:
                store[:, :, :rows] = new.transpose(1, 2)
            else:
                store.scatter_(2, positions.slots, new.transpose(1, 2))
        return rotate(query, positions.cosine, positions.sine)

    def attend(self, query: Tensor, cache: KVCache, index: int, positions: Positions) -> Tensor:
        """Attend with ``query`` [B, R, heads, head_dim] to layer ``index``; return [B, R, heads * head_dim]."""
        batch, rows, heads, _ = query.shape
        end, mask = positions.end, positions.mask
        keys, values = cache.keys[index][:, :, :end], cache.values[index][:, :, :end]
        if self._attention == "flash_attention_2":
            from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

            mixed: Tensor = flash_attn_func(
                query, keys.transpose(1, 2), values.transpose(1, 2), causal=positions.causal
            )
            return mixed.reshape(batch, rows, -1)
        queries = query.transpose(1, 2)  # [B, heads, R, head_dim]
        causal = positions.prompt and positions.causal and rows > 1
        if self._attention == "eager":
            mixed = _eager(queries, keys, values, mask, causal)
        else:
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=heads != keys.shape[1]
            )
        return mixed.transpose(1, 2).reshape(batch, rows, -1)

    def add_linear(self, stream: Residual, rows: Rows, matrix: Matrix, norm: Tensor) -> Residual:
        """Return ``stream + rows @ matrix.T`` before a norm with weight ``norm``; may overwrite ``stream``."""
        assert isinstance(rows, Tensor)
        return Residual(stream.hidden + _linear(rows, matrix)[0].to(norm.dtype), norm)

    def gate_up(self, weights: DecoderWeights, index: int, stream: Residual) -> Rows:
        """Norm, project to gate and up, and activate in layer ``index``: [B, R, intermediate]."""
        size = weights.shape.intermediate_size
        gate, up = _linear(self.norm(weights, stream), weights.layers[index].gate_up, (size, size))
        return functional.silu(gate) * up

    def lm_head(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """Apply the last norm and the head: float32 logits [B, R, vocab]."""
        return _linear(self.norm(weights, stream), weights.lm_head)[0].float()

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return greedy tokens, int64 [B, R], and their margins over the second-best logits, float32 [B, R].

        Of equal logits, the first wins. A margin is NaN if any logit of its row is NaN.
        """
        best = logits.topk(2, dim=-1).values
        wrong = logits.isnan().any(dim=-1)
        margins = (best[..., 0] - best[..., 1]).masked_fill(wrong, float("nan"))
        return logits.argmax(dim=-1), margins  # not topk's index: argmax takes the first of equal logits

    def _visible(self, at: Tensor, capacity: int) -> tuple[int, Tensor | None]:
        # On a GPU the host does not read the length, because that would synchronise; flash attention requires it.
        known = not at.is_cuda or self._attention == "flash_attention_2"
        end = int(at.max()) + 1 if known else capacity
        return end, None if known and at.numel() == 1 else visible(at, end)


def visible(at: Tensor, end: int) -> Tensor:
    """Return which of the first ``end`` positions the rows at ``at`` [B, R] see: bool [B, 1, R, end]."""
    return torch.arange(end, device=at.device) <= at[:, None, :, None]


def prompt_positions(hidden: Tensor) -> Tensor:
    """Return all positions of ``hidden`` [B, S, hidden], int32 [B, S]."""
    batch, length, _ = hidden.shape
    return torch.arange(length, dtype=torch.int32, device=hidden.device).expand(batch, length).contiguous()


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of [..., N], computed in float32 and rounded before the weight is applied."""
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(hidden.dtype)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, R, heads, head_dim]; a pair has one element of each half of a head."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _linear(rows: Tensor, matrix: Matrix, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return ``rows @ matrix.T``, split into the outputs of the fused layers."""
    if matrix.linears:
        return [linear(rows) for linear in matrix.linears]
    product = functional.linear(rounded(rows, matrix), dequantize(matrix, rows.dtype))
    return list(torch.split(product, list(sizes), dim=-1)) if sizes else [product]


def rounded(rows: Rows, matrix: Matrix) -> Tensor:
    """Return the rows as a product with ``matrix`` uses them: rounded to FP8, or unchanged."""
    if isinstance(rows, QuantizedRows):
        values = rows.values.float()
        return (values if rows.sums is None else int4.restore(values)[:, : matrix.inputs]) * rows.scale
    if not rounds(rows, matrix):
        return rows
    values, scale = fp8.quantize(rows)
    return (values.float() * scale).to(rows.dtype)


def rounds(rows: Rows, matrix: Matrix) -> bool:
    """Return True if a product with ``matrix`` rounds ``rows`` to FP8: many rows, with FP8 or 4-bit weights.

    With 4-bit weights, only if the tensor cores support FP8 and rows are not float32, which is used for checks.
    """
    if isinstance(rows, QuantizedRows):
        return True
    if rows.numel() <= SKINNY * rows.shape[-1]:
        return False
    return matrix.kind == "fp8" or (
        matrix.kind == "int4" and rows.dtype != torch.float32 and fp8.runs_on(rows.device)
    )


def _eager(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Compute attention step by step, with the softmax in float32."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) if groups > 1 else part for part in (keys, values))
    if causal:
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ keys.transpose(2, 3)) * query.shape[-1] ** -0.5
    if mask is not None:
        hidden = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else None
        scores = scores + mask if hidden is None else hidden
    shares: Tensor = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return shares @ values
