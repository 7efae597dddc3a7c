"""Gemma as pi0 and pi0.5 run it, written once over :class:`GemmaOps`.

Unlike in the Llama, attention is not causal: every row states how many positions it sees. The norm multiplies by
``1 + weight``, the MLP's gate is tanh GELU, the head size is independent of the width, and the norms of pi0.5's
action expert get scale, shift and gate from the flow time. Positions are tensors and shapes are fixed, so every
pass can be captured as a CUDA graph. Shapes: B observations of N rows each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine import fp8
from vla_ros.engine.ops import KVCache, QuantizedRows, rotate
from vla_ros.engine.shapes import GemmaShape
from vla_ros.engine.weights import Matrix

RMS_EPS = 1e-6
ROPE_THETA = 10000.0
CACHE_BLOCK = 64
"""A cache has a multiple of this many positions, so that kernels read whole blocks."""


@dataclass(frozen=True, eq=False)
class GemmaLayer:
    """One layer; a last layer of which only keys and values are needed has only ``qkv``."""

    qkv: Matrix  # queries (if the layer has them), keys and values, [.., width]
    o: Matrix | None = None  # [width, heads * head_dim]
    gate_up: Matrix | None = None  # gate, then up [2 * mlp_width, width]
    down: Matrix | None = None  # [width, mlp_width]
    # The product of ``qkv`` with the norm's shift at each time, float32 [times, outputs], for kernels that finish
    # the norm after the product; None if norms have no shift.
    qkv_shift: Tensor | None = None
    gate_up_shift: Tensor | None = None  # the same for ``gate_up``


@dataclass(frozen=True, eq=False)
class Gemma:
    """Weights of one stack of Gemma layers."""

    shape: GemmaShape  # sizes
    layers: tuple[GemmaLayer, ...]  # one per layer
    # Float32 [times, norms, parts, width]: ``1 + weight``, or scale (plus 1), shift and gate for each time. Norm 2
    # i precedes the attention of layer i, norm 2 i + 1 its MLP, and the last norm the output.
    norms: Tensor
    cosine: Tensor  # rotary table [positions, head_dim / 2] in the model's type
    sine: Tensor  # the same

    @property
    def adaptive(self) -> bool:
        """True if norms have shift and gate."""
        return self.norms.shape[2] == 3


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a pass."""

    at: Tensor  # int32 [B, N], positions of the rows, also in the cache
    end: Tensor  # int32 [B, N], number of positions that each row sees
    time: Tensor  # int32 [B, N], index of each row's time in ``Gemma.norms``: ``step``, or the last for time 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream before a norm."""

    hidden: Tensor  # [B, N, width]
    normed: Tensor | QuantizedRows  # ``hidden`` after that norm, in the form that the next product takes
    norm: int  # index of that norm


class GemmaOps:
    """The operations in plain torch; :class:`~vla_ros.engine.triton_gemma.TritonGemmaOps` overrides them."""

    def start(self, gemma: Gemma, rows: Rows, hidden: Tensor) -> Stream:
        """Begin a stream with ``hidden`` [B, N, width] before the first norm."""
        return self._normed(gemma, rows, hidden, 0)

    def qkv(self, gemma: Gemma, index: int, rows: Rows, stream: Stream, cache: KVCache) -> Tensor:
        """Project and rotate; write keys and values at ``rows.at`` and return queries [B, N, heads, head_dim].

        For a layer with only keys and values, queries have zero heads.
        """
        product = multiply(stream.normed, gemma.layers[index].qkv)
        heads = product.view(*rows.at.shape, -1, gemma.shape.head_dim)  # [B, N, heads + 2 kv_heads, head_dim]
        size = gemma.shape.kv_heads
        query, key, value = torch.split(heads, [heads.shape[2] - 2 * size, size, size], dim=2)
        at = rows.at.long()
        cosine, sine = gemma.cosine[at][:, :, None], gemma.sine[at][:, :, None]
        slots = at[:, None, :, None].expand(-1, size, -1, gemma.shape.head_dim)
        cache.keys[index].scatter_(2, slots, rotate(key, cosine, sine).transpose(1, 2))
        cache.values[index].scatter_(2, slots, value.transpose(1, 2))
        return rotate(query, cosine, sine)

    def attend(self, rows: Rows, query: Tensor, cache: KVCache, index: int) -> Tensor:
        """Attend to the positions before ``rows.end``; return [B, N, heads * head_dim]."""
        keys, values = cache.keys[index], cache.values[index]
        seen = torch.arange(keys.shape[2], device=query.device) < rows.end[:, None, :, None]
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)

    def gate_up(self, gemma: Gemma, index: int, rows: Rows, stream: Stream) -> Tensor | QuantizedRows:
        """Compute both projections and the gated activation, [B, N, mlp_width]."""
        matrix = gemma.layers[index].gate_up
        assert matrix is not None
        gate, up = multiply(stream.normed, matrix).chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def add(
        self, gemma: Gemma, rows: Rows, stream: Stream, inputs: Tensor | QuantizedRows, matrix: Matrix
    ) -> Stream:
        """Add ``inputs @ matrix.T``, times the gate of the stream's norm; may overwrite ``stream``."""
        branch = multiply(inputs, matrix)
        if gemma.adaptive:
            branch = branch * gemma.norms[:, stream.norm, 2][rows.time].to(branch.dtype)
        return self._normed(gemma, rows, stream.hidden + branch, stream.norm + 1)

    def start_actions(
        self, gemma: Gemma, rows: Rows, actions: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Stream:
        """Begin a stream with ``actions @ weight.T + bias``, all float32: [B, H, A], [E, A] and [E]."""
        return self.start(gemma, rows, functional.linear(actions, weight, bias).to(dtype))

    def advance(
        self,
        gemma: Gemma,
        rows: Rows,
        stream: Stream,
        out: tuple[Tensor, Tensor],
        actions: Tensor,
        guide: Guide,
        time: float,
        delta: float,
    ) -> None:
        """Advance ``actions``, float32 [B, H, A], from ``time`` by ``delta`` in place along their guided velocity.

        The actions are the last H of ``rows``; ``stream`` comes from the last layer. ``out`` is the float32 weight
        [A, E] and bias [A] that project the normed stream to the velocity.
        """
        velocity = predict_velocity(stream, out, actions.shape[1])
        error = guide.weights[..., None] * (guide.previous - (actions - time * velocity))
        advance(actions, velocity, error, guide, time, delta)

    def _normed(self, gemma: Gemma, rows: Rows, hidden: Tensor, norm: int) -> Stream:
        """Normalise in float32 and round once, at the end."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)
        parts = gemma.norms[:, norm][rows.time]  # [B, N, parts, width]
        wide = wide * parts[..., 0, :]
        return Stream(hidden, (wide + parts[..., 1, :] if gemma.adaptive else wide).to(hidden.dtype), norm)


@dataclass(frozen=True, eq=False)
class Guide:
    """Real-time chunking: how a chunk continues the previous one. All zeros mean no guidance."""

    previous: Tensor  # float32 [B, H, A], normalised
    weights: Tensor  # float32 [B, H], how strongly each action is pulled towards the previous one
    limit: Tensor  # float32 [B], maximum factor of that correction
    given: Tensor  # int32 [B, H], not 0 where the action is copied from ``previous`` and its time is 0


def predict_velocity(stream: Stream, out: tuple[Tensor, Tensor], horizon: int) -> Tensor:
    """Return the velocity, float32 [B, H, A], from the last H rows of ``stream`` after the last norm."""
    assert isinstance(stream.normed, Tensor)
    return functional.linear(stream.normed[:, -horizon:].float(), *out)


def advance(actions: Tensor, velocity: Tensor, pull: Tensor, guide: Guide, time: float, delta: float) -> None:
    """Advance ``actions`` [B, H, A] in place by ``delta`` along ``velocity``, corrected by ``pull``."""
    scale = guide.limit.clamp(max=guidance_scale(time))[:, None, None]
    actions += delta * (velocity - scale * pull)
    actions.copy_(torch.where(guide.given[..., None] != 0, guide.previous, actions))


def guidance_scale(time: float) -> float:
    """Return the factor of the correction at ``time`` (1: noise, 0: actions); infinite at both ends."""
    done = 1.0 - time
    if done <= 0.0 or time <= 0.0:
        return float("inf")
    return time / done * (time**2 + done**2) / time**2


def multiply(rows: Tensor | QuantizedRows, matrix: Matrix) -> Tensor:
    """Return ``rows @ matrix.T``, [B, N, outputs].

    If the matrix is quantised, rows are quantised too; rows that are already quantised give [B * N, outputs].
    """
    if matrix.kind != "fp8":
        assert isinstance(rows, Tensor)
        return functional.linear(rows, matrix.data)
    assert matrix.scale is not None
    if isinstance(rows, QuantizedRows):
        return fp8.scaled_product(rows.values, rows.scale, matrix.data, matrix.scale, torch.bfloat16)
    data, scale = fp8.quantize(rows.flatten(0, 1))
    return fp8.scaled_product(data, scale, matrix.data, matrix.scale, rows.dtype).view(*rows.shape[:2], -1)


def run_layers(
    ops: GemmaOps,
    gemma: Gemma,
    rows: Rows,
    stream: Stream,
    cache: KVCache,
    ready: Callable[[int], None] = lambda layer: None,
) -> Stream:
    """Run a stream through all layers, up to the last norm.

    ``ready`` is called with a layer's index once its keys and values are available.
    """
    for index in range(len(gemma.layers)):
        stream = run_layer(ops, gemma, index, rows, stream, cache, ready)
    return stream


def run_layer(
    ops: GemmaOps,
    gemma: Gemma,
    index: int,
    rows: Rows,
    stream: Stream,
    cache: KVCache,
    ready: Callable[[int], None] = lambda layer: None,
) -> Stream:
    """Run one layer; a layer without output projection only writes its keys and values."""
    layer, query = gemma.layers[index], ops.qkv(gemma, index, rows, stream, cache)
    ready(index)
    if layer.o is None or layer.down is None:
        return stream
    stream = ops.add(gemma, rows, stream, ops.attend(rows, query, cache, index), layer.o)
    return ops.add(gemma, rows, stream, ops.gate_up(gemma, index, rows, stream), layer.down)


def allocate_cache(gemma: Gemma, batch: int, positions: int) -> KVCache:
    """Return a cache of zeros: masked values are multiplied by 0, but uninitialised memory could hold NaN."""
    shape = gemma.shape
    sizes = (batch, shape.kv_heads, -(-positions // CACHE_BLOCK) * CACHE_BLOCK, shape.head_dim)
    tensors = [gemma.cosine.new_zeros(sizes) for _ in range(2 * shape.depth)]
    counters = gemma.cosine.new_empty(0, dtype=torch.int32)  # unused by Gemma's kernels
    return KVCache(tuple(tensors[: shape.depth]), tuple(tensors[shape.depth :]), counters)


def rotary_tables(positions: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of all positions, [positions, head_dim / 2] each, in the type of ``like``."""
    steps = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    angles = torch.arange(positions, device=like.device).float()[:, None] * ROPE_THETA ** (-steps / head_dim)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
