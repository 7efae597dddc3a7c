"""The data that a pass of a decoder reads and writes. Shapes: B observations of R rows each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vla_ros_models.engine.weights import DecoderWeights

CACHE_BLOCK = 64
"""Kernels that let each row state what it sees read whole blocks of this many positions."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of B observations."""

    keys: Sequence[Tensor]  # per layer [B, kv_heads, C, head_dim]
    values: Sequence[Tensor]  # the same
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

    def write(self, index: int, written: Sequence[Tensor], slots: Tensor | None) -> None:
        """Write keys and values, [B, kv_heads, R, head_dim] each, of layer ``index``; ``slots`` as in Positions."""
        for store, new in zip((self.keys[index], self.values[index]), written, strict=False):
            if slots is None:
                store[:, :, : new.shape[2]] = new
            else:
                store.scatter_(2, slots, new)

    @classmethod
    def in_blocks(cls, weights: DecoderWeights, batch: int, capacity: int, layers: int | None = None) -> KVCache:
        """Like :meth:`allocate`, in whole blocks, for :meth:`~vla_ros_models.engine.ops.Ops.prefix_positions`."""
        return cls.allocate(weights, batch, -(-capacity // CACHE_BLOCK) * CACHE_BLOCK, layers)


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a pass's rows, what the rows see, and values that every layer derives from them."""

    at: Tensor  # int32 [B, R], also the places in the cache
    cosine: Tensor  # of the rows, [B or 1, R, 1, head_dim / 2]; Triton's kernels take the whole table
    sine: Tensor  # the same
    prompt: bool = False  # True if these are rows 0 to R - 1 of every observation
    # Int64 [B, kv_heads, R, head_dim], where torch writes keys and values; None for a prompt.
    slots: Tensor | None = None
    end: int = 0  # number of cache positions that torch reads
    # Bool [B, 1, R or 1, end], True where a row sees a position, or values to add to the scores; None for no mask.
    mask: Tensor | None = None
    causal: bool = True  # True if a prompt's rows do not see later rows
    # Int32 [B], number of positions before the padding of a bidirectional prompt; None without padding.
    length: Tensor | None = None
    # Int32 [B, R], number of positions that each row sees; None if it sees those up to its own, or ``length``.
    ends: Tensor | None = None
    # Int32 [B, R], index of each row's time in tables of norms: ``step``, or the last index for time 0. None if
    # norms do not depend on a time.
    time: Tensor | None = None
    step: int = 0
    # Type of the attention's result for few rows; None for the type of its queries.
    rows_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Cross:
    """Keys and values from another model, for the layers of a pass that attend to them."""

    cache: KVCache  # written by :meth:`~vla_ros_models.engine.ops.Ops.write_cross`
    positions: Positions  # positions of the pass's rows as these layers count them, and what the rows see


@dataclass(frozen=True)
class Stream:
    """The residual stream of some rows, before a norm."""

    hidden: Tensor  # [B, R, hidden]
    norm: int = 0  # index of that norm in ``DecoderWeights.norms``
    # A product not yet added to ``hidden``; ``Ops.norm`` and ``Ops.qkv`` add it in place.
    branch: ScaledProduct | None = None
    # The stream after that norm, in the form that the next product takes; None if that is yet to be computed.
    normed: Rows | None = None


class ScaledProduct(NamedTuple):
    """A product [M, N], or its partial sums, to be multiplied by the scales of rows [M, 1] and columns [N]."""

    values: Tensor
    rows: Tensor | None
    columns: Tensor | None


class QuantizedRows(NamedTuple):
    """Rows quantised by the kernel that computed them: FP8 [M, K], and scales float32 [M, 1].

    For 4-bit weights the inputs are in the order of :func:`vla_ros_models.engine.lowbit.reorder`, and ``sums``,
    float32 [M, groups], holds the sum of each group's values, times 2^-9.
    """

    values: Tensor
    scale: Tensor
    sums: Tensor | None = None


Rows = Tensor | QuantizedRows
"""Inputs of a product, [B, R, K]."""


@dataclass(frozen=True, eq=False)
class Guide:
    """Real-time chunking: how a chunk continues the previous one. All zeros mean no guidance."""

    previous: Tensor  # float32 [B, H, A], normalised
    weights: Tensor  # float32 [B, H], how strongly each action is pulled towards the previous one
    limit: Tensor  # float32 [B], maximum factor of that correction
    given: Tensor  # int32 [B, H], not 0 where the action is copied from ``previous`` and its time is 0

    @classmethod
    def free(cls, actions: Tensor) -> Guide:
        """Return no guidance for ``actions`` [B, H, A]."""
        none = actions.new_zeros(actions.shape[:2])
        return cls(torch.zeros_like(actions), none, none[:, 0], none.int())
