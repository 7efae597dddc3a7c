"""A decoder's layers with gradients: nothing is written in place, so a layer can be computed again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vla_ros_models.engine.decoder import run_layer
from vla_ros_models.engine.ops import Ops, project
from vla_ros_models.engine.stream import Cross, KVCache, Positions, Stream
from vla_ros_models.engine.weights import DecoderWeights

Call = Callable[..., Any]
"""Calls a function with its arguments."""


def recompute(enabled: bool) -> Call:
    """Return what calls a part of a network: with ``enabled``, the backward pass computes it again."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # no layer draws
    return again if enabled else lambda part, *arguments: part(*arguments)


class GrowingCache(KVCache):
    """Lists of keys and values, to which a pass appends."""

    def write(self, index: int, written: Sequence[Tensor], slots: Tensor | None) -> None:
        for stored, new in zip((self.keys, self.values), written, strict=False):
            past = stored[index]
            cast("list[Tensor]", stored)[index] = new if past is None else torch.cat([past, new], dim=2)


class TrainingOps(Ops):
    """Torch's operations; each head has its own keys and values, which a :class:`GrowingCache` keeps."""

    def norm(self, weights: DecoderWeights, stream: Stream, positions: Positions | None = None) -> Tensor:
        """See :meth:`Ops.norm`; one kernel each way where there is one, so bfloat16 is rounded once, not twice."""
        hidden, weight = stream.hidden, weights.norms[stream.norm]
        if weights.shape.norm != "rms" or weight.dtype != hidden.dtype:
            return super().norm(weights, stream, positions)
        normed = functional.rms_norm(hidden, hidden.shape[-1:], weight, weights.shape.rms_norm_eps)
        return normed.to(hidden.dtype)  # autocast may have widened it

    def attend(self, query: Tensor, cache: KVCache, index: int, positions: Positions) -> Tensor:
        batch, rows, heads, _ = query.shape
        values = _every_head(cache.values[index], heads)  # rotated queries and keys are float32
        keys = _every_head(cache.keys[index], heads).to(values.dtype)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2).to(values.dtype),
            keys,
            values,
            attn_mask=positions.mask,
            is_causal=positions.mask is None and positions.causal,
        )
        return mixed.transpose(1, 2).reshape(batch, rows, -1)


def _every_head(part: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [B, N, S, D] for ``heads`` queries: only kernels without a mask share them."""
    batch, own, count, size = part.shape
    return part[:, :, None].expand(-1, -1, heads // own, -1, -1).reshape(batch, heads, count, size)


def train_layer(
    weights: DecoderWeights,
    index: int,
    hidden: Tensor,
    positions: Positions,
    past: tuple[Tensor, Tensor] | None = None,
    crossed: Positions | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call layer ``index``; return the residual stream [B, R, hidden], and the keys and values that it attends to.

    ``past`` are keys and values [B, kv_heads, S, head_dim] before those of the rows, or, for a layer that projects
    another model's, those; ``crossed`` are the positions as such a layer counts them.
    """
    ops, layer = TrainingOps(), weights.layers[index]
    cross = None
    if layer.cross is not None:
        assert past is not None
        assert crossed is not None
        shape = weights.shape
        keys, values = (
            project(part.transpose(1, 2).flatten(2), matrix)
            .view(len(hidden), -1, shape.kv_heads, shape.head_dim)
            .transpose(1, 2)
            for part, matrix in zip(past, layer.cross, strict=True)
        )
        past = keys, values
    cache = _cache(len(weights.layers), index, past, hidden)
    if layer.cross is not None and crossed is not None:
        cross = Cross(cache, crossed)
    stream = run_layer(weights, ops, cache, index, Stream(hidden, 2 * index), positions, cross=cross)
    return stream.hidden, cache.keys[index], cache.values[index]


def _cache(layers: int, index: int, past: tuple[Tensor, Tensor] | None, like: Tensor) -> KVCache:
    keys: list[Any] = [None] * layers
    values: list[Any] = [None] * layers
    if past is not None:
        keys[index], values[index] = past
    return GrowingCache(keys, values, like.new_empty(0))


def placed(at: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None, **fields: Any) -> Positions:
    """Return positions ``at`` [B, R] with rows of the rotary tables; ``mask`` is True where a row sees a key."""
    return Positions(at, cosine[at][:, :, None], sine[at][:, :, None], mask=mask, **fields)
