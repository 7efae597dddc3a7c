"""The operations of a decoder pass, and their plain version in torch, which runs anywhere.

:class:`~vla_ros.engine.triton_ops.TritonOps` is the version for a GPU. The decoder is written once over either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine.weights import DecoderWeights, Layer, Matrix, dequantize


@dataclass(frozen=True)
class Residual:
    """The residual stream of some rows, in front of a norm.

    Attributes:
        hidden: [B, R, hidden].
        gain: [hidden], the weight of that norm.
        scaled: ``hidden * gain``, where a product applies the rest of the norm to its sums; else None.
        squares: Float64, one per row: the sum of the squares of ``hidden``, beside ``scaled``.
        spent: Room for those of the next norm, zeros.
    """

    hidden: Tensor
    gain: Tensor
    scaled: Tensor | None = None
    squares: Tensor | None = None
    spent: Tensor | None = None


class Ops(Protocol):
    """What a pass is made of. B observations, R rows each; ``keys`` and ``values`` [B, kv_heads, C, head_dim]."""

    def pick(self, table: Tensor, index: Tensor, gain: Tensor) -> Residual:
        """Begin a residual stream of few rows with some of ``table`` [V, hidden].

        Args:
            table: Embeddings, or rows of another stream.
            index: Int64 [B, R].
            gain: Weight of the norm that follows.
        """

    def qkv(
        self,
        weights: DecoderWeights,
        layer: Layer,
        stream: Residual,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Norm, projection and rotary embedding; fills the cache at ``positions``.

        Args:
            weights: For sizes and tables.
            layer: Projection.
            stream: In front of the layer's first norm.
            positions: Int32 [B, R].
            keys: The layer's keys.
            values: The layer's values.

        Returns:
            Queries [B, R, heads, head_dim].
        """

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None,
        arrived: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``query`` [B, R, heads, head_dim] to the cache up to ``positions`` [B, R].

        None means rows 0 to R - 1 of a prompt, each seeing those before it. ``arrived``, int32 zeros [B * heads],
        is for programs that share a head to count in; they leave zeros.

        Returns:
            [B, R, heads * head_dim].
        """

    def add_linear(self, stream: Residual, rows: Tensor, matrix: Matrix, gain: Tensor) -> Residual:
        """``stream + rows @ matrix.T`` in front of a norm with weight ``gain``; ``stream`` may be used up."""

    def gate_up(self, weights: DecoderWeights, layer: Layer, stream: Residual) -> Tensor:
        """Norm, both projections and the gated activation: [B, R, intermediate]."""

    def head(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """Last norm and head: float32 logits [B, R, vocab]."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens, int64 [B, R], and the distance to the second best logit, float32 [B, R].

        The first of equal logits wins. The margin is NaN where a logit is.
        """


class TorchOps:
    """The operations in torch alone, with the rounding steps of the reference decoder."""

    def pick(self, table: Tensor, index: Tensor, gain: Tensor) -> Residual:
        """See :class:`Ops`."""
        return Residual(functional.embedding(index, table), gain)

    def qkv(
        self,
        weights: DecoderWeights,
        layer: Layer,
        stream: Residual,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """See :class:`Ops`."""
        shape = weights.shape
        batch, rows, _ = stream.hidden.shape
        mixed = _linear(_normed(weights, stream), layer.qkv)
        heads = mixed.view(batch, rows, -1, shape.head_dim)  # [B, R, heads + 2 kv_heads, head_dim]
        turning = rotate(heads[:, :, : shape.heads + shape.kv_heads], weights.cosine, weights.sine, positions)
        at = positions.long()[:, None, :, None].expand(-1, shape.kv_heads, -1, shape.head_dim)
        keys.scatter_(2, at, turning[:, :, shape.heads :].transpose(1, 2))
        values.scatter_(2, at, heads[:, :, shape.heads + shape.kv_heads :].transpose(1, 2))
        return turning[:, :, : shape.heads]

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None,
        arrived: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Ops`."""
        return attend(query, keys, values, positions)

    def add_linear(self, stream: Residual, rows: Tensor, matrix: Matrix, gain: Tensor) -> Residual:
        """See :class:`Ops`."""
        return Residual(stream.hidden + _linear(rows, matrix), gain)

    def gate_up(self, weights: DecoderWeights, layer: Layer, stream: Residual) -> Tensor:
        """See :class:`Ops`."""
        gate, up = _linear(_normed(weights, stream), layer.gate_up).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def head(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """See :class:`Ops`."""
        return _linear(_normed(weights, stream), weights.head).float()

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Ops`."""
        best = logits.topk(2, dim=-1).values
        wrong = logits.isnan().any(dim=-1)
        margins = (best[..., 0] - best[..., 1]).masked_fill(wrong, float("nan"))
        return logits.argmax(dim=-1), margins  # not topk's index: argmax takes the first of equals


def _normed(weights: DecoderWeights, stream: Residual) -> Tensor:
    return rms_norm(stream.hidden, stream.gain, weights.shape.rms_norm_eps)


def rms_norm(hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm of [..., N], computed in float32 and rounded before the weight is applied."""
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return gain * scaled.to(hidden.dtype)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [B, R, heads, head_dim] at ``positions`` [B, R]; halves of a head are the pairs."""
    cos, sin = cosine[positions][:, :, None], sine[positions][:, :, None]  # [B, R, 1, head_dim / 2]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor | None) -> Tensor:
    """:meth:`Ops.attend` by torch's attention; on a CPU only the filled part of the cache is read."""
    batch, rows, heads, _ = query.shape
    queries = query.transpose(1, 2)  # [B, heads, R, head_dim]
    if positions is None:
        end, mask = rows, None
    else:
        # On a GPU the length stays unknown to the host: asking for it would make the host wait.
        end = keys.shape[2] if keys.is_cuda else int(positions.max()) + 1
        mask = torch.arange(end, device=keys.device) <= positions[:, None, :, None]  # [B, 1, R, end]
    mixed = functional.scaled_dot_product_attention(
        queries,
        keys[:, :, :end],
        values[:, :, :end],
        attn_mask=mask,
        is_causal=positions is None and rows > 1,
        enable_gqa=heads != keys.shape[1],
    )
    return mixed.transpose(1, 2).reshape(batch, rows, -1)


def _linear(rows: Tensor, matrix: Matrix) -> Tensor:
    return functional.linear(rows, dequantize(matrix, rows.dtype))
