"""The operations of a decoder pass, in torch.

:class:`~vla_ros_models.engine.triton_ops.TritonOps` overrides them for a GPU. The passes are written once and run
on either class. What an operation computes is stated by the decoder's
:class:`~vla_ros_models.engine.shapes.DecoderShape` and weights. Shapes: B observations of R rows each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine import fp8, lowbit
from vla_ros_models.engine.guidance import euler_step, predict_velocity
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.stream import Guide, KVCache, Positions, QuantizedRows, Rows, Stream
from vla_ros_models.engine.tile_configs import SKINNY
from vla_ros_models.engine.weights import DecoderWeights, Matrix, dequantize

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
}


class Ops:
    """The operations in plain torch, with the rounding steps of transformers' Llama and of openpi's Gemma."""

    few: "Ops | None" = None
    """The operations for few rows with norms of kind ``rms_float32``, if they are others."""

    ranks: Ranks | None = None
    """The ranks of which each has a shard of the decoder; None for a whole decoder."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks

    def share(self, tensor: Tensor) -> None:
        """Copy a contiguous tensor from rank 0 to all ranks."""
        if self.ranks is not None:
            self.ranks.copy(tensor)

    def require(self, weights: DecoderWeights) -> None:
        """Raise EngineMismatchError if there are no kernels for the decoder that ``weights`` describe."""

    def positions(self, weights: DecoderWeights, cache: KVCache, at: Tensor, prompt: bool = False) -> Positions:
        """Return where the rows of a causal pass are, ``at`` [B, R], int32, and what they see.

        A ``prompt`` has all rows from 0 on.
        """
        if prompt:
            rows = at.shape[1]
            return Positions(
                at, weights.cosine[None, :rows, None], weights.sine[None, :rows, None], prompt, end=rows
            )
        end, mask = self._visible(at, cache.keys[0].shape[2])
        return replace(self._placed(weights, at), end=end, mask=mask)

    def two_way_positions(
        self, weights: DecoderWeights, cache: KVCache, at: Tensor, length: Tensor | None
    ) -> Positions:
        """Prepare a prompt whose rows see each other in both directions, up to ``length``, int32 [B]."""
        mask = None
        if length is not None:
            # Added to the scores, in their type: attention would convert a boolean mask again in every layer.
            mask = torch.zeros(at.shape, dtype=weights.dtype, device=at.device)
            mask = mask.masked_fill(at >= length[:, None], float("-inf"))[:, None, None]
        return replace(self.positions(weights, cache, at, prompt=True), causal=False, mask=mask)

    def prefix_positions(
        self,
        weights: DecoderWeights,
        cache: KVCache,
        at: Tensor,
        ends: Tensor,
        time: Tensor | None = None,
        step: int = 0,
    ) -> Positions:
        """Prepare a pass whose rows at ``at`` see ``ends`` positions of the cache each, both int32 [B, R].

        ``time``, int32 [B, R], and ``step`` are as in :class:`~vla_ros_models.engine.stream.Positions`.
        """
        capacity = cache.keys[0].shape[2]
        mask = torch.arange(capacity, device=at.device) < ends[:, None, :, None]
        placed = self._placed(weights, at)
        return replace(placed, end=capacity, mask=mask, ends=ends, time=time, step=step)

    def start(self, weights: DecoderWeights, hidden: Tensor, positions: Positions, norm: int = 0) -> Stream:
        """Begin a residual stream with ``hidden`` [B, R, hidden] before norm number ``norm``."""
        return Stream(hidden, norm)

    def gather(self, weights: DecoderWeights, table: Tensor, index: Tensor, norm: int = 0) -> Stream:
        """Begin a stream with rows ``index``, int64 [B, R], of ``table`` [V, hidden]."""
        return Stream(functional.embedding(index, table), norm)

    def start_actions(
        self, weights: DecoderWeights, actions: Tensor, weight: Tensor, bias: Tensor,
        second: tuple[Tensor, Tensor] | None, positions: Positions, more: tuple[Tensor, Tensor] | None = None,
    ) -> Stream:  # fmt: skip
        """Begin a stream with ``actions @ weight.T + bias``, all float32: [B, H, A], [E, A] and [E].

        A SiLU and a ``second`` layer, float32 [E, E] and [E], may follow; then ``more``, float32, may have a row
        [B, 1, E] before those of the actions, and what is added to those, [H, E].
        """
        rows = functional.linear(actions, weight, bias)
        if second is not None:
            rows = functional.linear(functional.silu(rows), *second)
        if more is not None:
            rows = torch.cat([more[0], rows + more[1]], dim=1)
        return self.start(weights, rows.to(weights.dtype), positions)

    def finish_mlp(
        self, weights: DecoderWeights, stream: Stream, positions: Positions,
        layers: Sequence[tuple[Tensor, Tensor]], eps: float, actions: Tensor, factor: Tensor,
    ) -> None:  # fmt: skip
        """Add two float32 layers of the last H rows, times ``factor`` [B, H], to ``actions``, float32 [B, H, A].

        The rows are normalised with ``eps`` and the last norm's scale; its shift is in the first layer's bias.
        Between the ``layers``, weight and bias, is a ReLU.
        """
        wide = stream.hidden[:, -actions.shape[1] :].float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = wide * weights.norms[stream.norm][positions.step, 0]
        first, second = layers
        actions += factor[..., None] * functional.linear(functional.linear(wide, *first).relu(), *second)

    def norm(self, weights: DecoderWeights, stream: Stream, positions: Positions | None = None) -> Tensor:
        """Return the stream after its norm; ``positions`` tell the times of norms that depend on them."""
        hidden, weight, eps = stream.hidden, weights.norms[stream.norm], weights.shape.rms_norm_eps
        if weights.shape.norm == "rms":
            return rms_norm(hidden, weight, eps)
        wide = hidden.float()
        if weights.shape.norm == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        parts = _at_times(weight, positions)
        wide = wide * parts[..., 0, :]
        return (wide if parts.shape[-2] == 1 else wide + parts[..., 1, :]).to(hidden.dtype)

    def qkv(
        self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions, cache: KVCache
    ) -> Tensor:
        """Norm, project and rotate in layer ``index``; fill its cache, return queries [B, R, heads, head_dim].

        For a layer with only keys and values, queries have zero heads.
        """
        shape, layer = weights.shape, weights.layers[index]
        batch, rows, _ = stream.hidden.shape
        heads = 0 if layer.o_proj is None else shape.heads
        counts = (heads, shape.kv_heads, shape.kv_heads) if layer.cross is None else (heads,)
        products = _linear(
            self.norm(weights, stream, positions), layer.qkv, [count * shape.head_dim for count in counts]
        )
        parts = [
            product.view(batch, rows, count, shape.head_dim)
            for product, count in zip(products, counts, strict=True)
        ]
        query, written = parts[0], parts[1:]  # torch.compile in torch 2.11 makes a tuple of `*written`
        if layer.qk_norms is not None:
            query = rms_norm(query, layer.qk_norms[0], shape.rms_norm_eps)
            written[:1] = [rms_norm(key, layer.qk_norms[1], shape.rms_norm_eps) for key in written[:1]]
        if shape.rotary:
            query = rotate(query, positions.cosine, positions.sine)
            written[:1] = [rotate(key, positions.cosine, positions.sine) for key in written[:1]]
        cache.write(index, [part.transpose(1, 2) for part in written], positions.slots)
        return query

    def attend(self, query: Tensor, cache: KVCache, index: int, positions: Positions) -> Tensor:
        """Attend with ``query`` [B, R, heads, head_dim] to layer ``index``; return [B, R, heads * head_dim]."""
        batch, rows, heads, _ = query.shape
        end = positions.end
        keys, values = cache.keys[index][:, :, :end], cache.values[index][:, :, :end]
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=positions.mask,
            is_causal=positions.prompt and positions.causal and rows > 1,
            enable_gqa=heads != keys.shape[1],
        )
        return mixed.transpose(1, 2).reshape(batch, rows, -1)

    def add(
        self, weights: DecoderWeights, stream: Stream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> Stream:
        """Return ``stream + [gate *] rows @ matrix.T`` before the next norm; may overwrite ``stream``."""
        branch, hidden = _linear(rows, matrix)[0], stream.hidden
        if self.ranks is not None:
            branch = self.ranks.sum(branch.float())
        branch = branch.to(hidden.dtype)
        norm = weights.norms[stream.norm]
        if norm.ndim > 1 and norm.shape[1] == 3:
            branch = branch * _at_times(norm[:, 2], positions).to(branch.dtype)
        return Stream(hidden + branch, stream.norm + 1)

    def gate_up(self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions) -> Rows:
        """Norm, project to gate and up, and activate in layer ``index``: [B, R, intermediate]."""
        matrix, size = weights.layers[index].gate_up, weights.shape.intermediate_size
        assert matrix is not None
        activate, normed = ACTIVATIONS[weights.shape.activation], self.norm(weights, stream, positions)
        if not weights.shape.gated:
            return activate(_linear(normed, matrix)[0])
        gate, up = _linear(normed, matrix, (size, size))
        return activate(gate) * up

    def lm_head(self, weights: DecoderWeights, stream: Stream) -> Tensor:
        """Apply the last norm and the head: float32 logits [B, R, vocab]."""
        return self.logits(weights, self.norm(weights, stream))

    def logits(self, weights: DecoderWeights, states: Tensor) -> Tensor:
        """Apply the head to normed ``states`` [B, R, hidden]: float32 logits [B, R, vocab]."""
        assert weights.lm_head is not None
        return self._whole(_linear(states, weights.lm_head)[0].float())

    def _whole(self, logits: Tensor) -> Tensor:
        return logits if self.ranks is None else self.ranks.gather(logits)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return greedy tokens, int64 [B, R], and their margins over the second-best logits, float32 [B, R].

        Of equal logits, the first wins. A margin is NaN if any logit of its row is NaN.
        """
        best = logits.topk(2, dim=-1).values
        wrong = logits.isnan().any(dim=-1)
        margins = (best[..., 0] - best[..., 1]).masked_fill(wrong, float("nan"))
        return logits.argmax(dim=-1), margins  # not topk's index: argmax takes the first of equal logits

    def euler_step(
        self,
        weights: DecoderWeights,
        stream: Stream,
        positions: Positions,
        out: tuple[Tensor, Tensor],
        actions: Tensor,
        guide: Guide,
        time: float,
        delta: float,
    ) -> None:
        """Do an Euler step of the flow: advance ``actions``, float32 [B, H, A], in place.

        ``time`` is the flow's (1: noise, 0: actions), ``delta`` below 0; ``guide`` pulls towards the chunk before.

        The actions are the last H of the rows; ``stream`` comes from the last layer. ``out`` is the float32 weight
        [A, hidden] and bias [A] that project the normed stream to the velocity.
        """
        velocity = predict_velocity(self.norm(weights, stream, positions), out, actions.shape[1])
        error = guide.weights[..., None] * (guide.previous - (actions - time * velocity))
        euler_step(actions, velocity, error, guide, time, delta)

    def write_cross(
        self, weights: DecoderWeights, cache: KVCache, index: int, keys: Tensor, values: Tensor
    ) -> None:
        """Project another model's ``keys`` and ``values``, [B, N, S, D] each, into the cache of a crossing layer.

        Positions for which that cache has no room are left out.
        """
        matrices, shape = weights.layers[index].cross, weights.shape
        assert matrices is not None, f"layer {index} attends to its own rows"
        for store, source, matrix in zip((cache.keys, cache.values), (keys, values), matrices, strict=True):
            rows = source[:, :, : store[index].shape[2]].transpose(1, 2).flatten(2)
            projected = project(rows, matrix).view(*rows.shape[:2], shape.kv_heads, shape.head_dim)
            store[index][:, :, : rows.shape[1]] = projected.transpose(1, 2)

    def _placed(self, weights: DecoderWeights, at: Tensor) -> Positions:
        shape = weights.shape
        slots = at.long()[:, None, :, None].expand(-1, shape.kv_heads, -1, shape.head_dim)
        return Positions(at, weights.cosine[at][:, :, None], weights.sine[at][:, :, None], slots=slots)

    def _visible(self, at: Tensor, capacity: int) -> tuple[int, Tensor | None]:
        if at.is_cuda:  # the host does not read the length, because that would synchronise
            return capacity, visible(at, capacity)
        end = int(at.max()) + 1
        return end, None if at.numel() == 1 else visible(at, end)


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


def _at_times(table: Tensor, positions: Positions | None) -> Tensor:
    """Return the entries of a table [times, ...] for each row, or that of the pass's step for all rows."""
    if positions is None or len(table) == 1:
        return table[0]
    return table[positions.step if positions.time is None else positions.time]


def _linear(rows: Rows, matrix: Matrix, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return ``rows @ matrix.T + bias``, split into the outputs of the fused layers."""
    if matrix.linears:
        products = [linear(rows) for linear in matrix.linears]
        if len(products) > 1 or not sizes:
            return products
        [product] = products
    elif matrix.kind == "fp8_rows":
        product = multiply_fp8(rows, matrix)
    else:
        assert isinstance(rows, Tensor)
        product = functional.linear(rounded(rows, matrix), dequantize(matrix, rows.dtype), matrix.bias)
    return list(torch.split(product, list(sizes), dim=-1)) if sizes else [product]


def project(rows: Rows, matrix: Matrix) -> Tensor:
    """Return ``rows @ matrix.T + bias``, [..., outputs]."""
    return _linear(rows, matrix)[0]


def multiply_fp8(rows: Rows, matrix: Matrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return ``rows @ matrix.T`` of ``fp8_rows``: [B, R, N], or [M, N] in ``dtype`` of rows already quantised."""
    assert matrix.scale is not None
    if isinstance(rows, QuantizedRows):
        return fp8.scaled_product(rows.values, rows.scale, matrix.data, matrix.scale, dtype)
    values, scale = fp8.quantize(rows.flatten(0, 1))
    return fp8.scaled_product(values, scale, matrix.data, matrix.scale, rows.dtype).view(*rows.shape[:2], -1)


def rounded(rows: Rows, matrix: Matrix) -> Tensor:
    """Return the rows as a product with ``matrix`` uses them: rounded to FP8, or unchanged."""
    if isinstance(rows, QuantizedRows):
        values = rows.values.float()
        return (values if rows.sums is None else lowbit.restore(values)[:, : matrix.inputs]) * rows.scale
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
    if matrix.kind == "fp8_rows":
        return True
    if rows.numel() <= SKINNY * rows.shape[-1]:
        return False
    return matrix.kind == "fp8" or (
        matrix.kind == "int4" and rows.dtype != torch.float32 and fp8.runs_on(rows.device)
    )
