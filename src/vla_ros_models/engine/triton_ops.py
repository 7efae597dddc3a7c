"""The operations of a decoder pass and of the vision towers on a GPU: Triton kernels, library products."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from vla_ros_models.engine.device_errors import EngineMismatchError
from vla_ros_models.engine.few_rows import (
    DecodingRows,
    FlowRows,
    PrescaledStream,
    norm_constants,
    padded_rows,
)
from vla_ros_models.engine.guidance import guidance_scale
from vla_ros_models.engine.kernels import attention, flow, flow_ends, pointwise
from vla_ros_models.engine.many_rows import ManyRows
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.stream import CACHE_BLOCK, Guide, KVCache, Positions, Rows, Stream
from vla_ros_models.engine.tile import Tile
from vla_ros_models.engine.tile_configs import (
    SHORT,
    SKINNY,
    MeasuredTile,
    Work,
    choose_tile,
    gpu_of,
    precision,
    unmeasured,
)
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.engine.weights import DecoderWeights, Matrix


class TritonTowerOps(TowerOps):
    """:class:`~vla_ros_models.engine.tower_ops.TowerOps` in Triton, over contiguous tensors."""

    def patch_width(self, patch: int) -> int:
        """Return a multiple of 8: for rows of 588, cuBLAS's kernel takes five times as long (98 us on an H200)."""
        return -(-3 * patch * patch // 8) * 8

    def patchify(self, images: Tensor, table: Tensor, patch: int) -> Tensor:
        batch, height, width, _ = images.shape
        down, across, length = height // patch, width // patch, self.patch_width(patch)
        out = table.new_empty(table.shape[0], batch, down * across, length)
        pointwise.patchify_kernel[(batch * down * across,)](
            images, table, out, SIDE=across, PATCH=patch, TOWERS=table.shape[0], WIDTH=length,
            BLOCK=triton.next_power_of_2(length), num_warps=4,
        )  # fmt: skip
        return out

    def embed(
        self, patches: Tensor, positions: Tensor, prefix: Tensor, norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        batch, count, width = patches.shape
        rows = prefix.shape[0] + count
        tokens = patches.new_empty(batch, rows, width)
        out = torch.empty_like(tokens)
        pointwise.embed_kernel[(batch * rows,)](
            patches, positions, prefix, norm.weight, norm.bias, tokens, out, norm.eps, ROWS=rows,
            PREFIX=prefix.shape[0], **_sizes(width),
        )  # fmt: skip
        return tokens, out

    def add_norm(
        self,
        tokens: Tensor,
        branch: Tensor,
        scale: Tensor | None,
        norm: nn.LayerNorm,
        film: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~vla_ros_models.engine.tower_ops.TowerOps`; works in place."""
        return tokens, add_layer_norm(tokens, branch, norm.weight, norm.bias, norm.eps, scale, film)

    def linear_gelu(self, tokens: Tensor, linear: nn.Linear) -> Tensor:
        """See :class:`~vla_ros_models.engine.tower_ops.TowerOps`; the library's product includes the activation."""
        rows, weight = tokens.flatten(0, 1), linear.weight.t()
        out: Tensor = torch._addmm_activation(linear.bias, rows, weight, use_gelu=True)
        return out.view(*tokens.shape[:2], -1)

    def add(self, tokens: Tensor, branch: Tensor, scale: Tensor | None, out: Tensor) -> None:
        batch, rows, width = tokens.shape
        count = out.shape[1]
        pointwise.tower_add_kernel[(batch * count,)](
            tokens, branch, scale, out, out.stride(1), ROWS=rows, PREFIX=rows - count, SCALED=scale is not None,
            **_sizes(width),
        )  # fmt: skip


def add_layer_norm(
    tokens: Tensor, branch: Tensor | None, gain: Tensor, shift: Tensor, eps: float, scale: Tensor | None = None,
    film: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add ``[scale *] branch`` to ``tokens`` [B, N, width] in place; return the layer norm of the sum."""
    out = torch.empty_like(tokens)
    pointwise.tower_add_norm_kernel[(tokens.shape[0] * tokens.shape[1],)](
        tokens, branch, scale, gain, shift, *((None, None) if film is None else film), out, eps,
        SCALED=scale is not None, FILM=film is not None, **_sizes(tokens.shape[-1]),
    )  # fmt: skip
    return out


def _sizes(width: int) -> dict[str, object]:
    """Return launch options for rows of ``width``: 16 bytes of bfloat16 per lane, each step rounded separately."""
    block = triton.next_power_of_2(width)
    return {"N": width, "BLOCK": block, "num_warps": max(1, min(8, block // 256)), "enable_fp_fusion": False}


KERNELS = {("rms", "silu"), ("rms_float32", "gelu"), ("rms_float32", "silu")}
"""Norms and activations for which there are kernels."""


class TritonOps(Ops):
    """:class:`~vla_ros_models.engine.ops.Ops` in Triton.

    ``measured`` overrides the tiles of :mod:`~vla_ros_models.engine.tile_configs`. With more than ``skinny`` rows,
    the library computes all products.
    """

    def __init__(
        self, measured: MeasuredTile = unmeasured, skinny: int = SKINNY, ranks: Ranks | None = None
    ) -> None:
        super().__init__(ranks)
        self._measured, self.skinny = measured, skinny
        self._decoding, self._many = DecodingRows(measured, ranks), ManyRows(measured, ranks)
        self._flow = FlowRows(measured)

    def require(self, weights: DecoderWeights) -> None:
        shape = weights.shape
        plain = all(
            layer.qk_norms is None
            and (layer.cross is None or shape.norm == "rms_float32")
            and all(one.bias is None for one in layer.matrices)
            for layer in weights.layers
        )
        if not (plain and shape.gated and shape.rotary and (shape.norm, shape.activation) in KERNELS):
            raise EngineMismatchError(f"the engine has no kernels for a decoder of {shape}")

    def positions(self, weights: DecoderWeights, cache: KVCache, at: Tensor, prompt: bool = False) -> Positions:
        return Positions(at, weights.cosine, weights.sine, prompt, end=at.shape[1], rows_dtype=weights.rows_dtype)

    def two_way_positions(
        self, weights: DecoderWeights, cache: KVCache, at: Tensor, length: Tensor | None
    ) -> Positions:
        return replace(self.positions(weights, cache, at, prompt=True), causal=False, length=length)

    def prefix_positions(
        self,
        weights: DecoderWeights,
        cache: KVCache,
        at: Tensor,
        ends: Tensor,
        time: Tensor | None = None,
        step: int = 0,
    ) -> Positions:
        return Positions(at, weights.cosine, weights.sine, ends=ends, time=time, step=step)

    def start(self, weights: DecoderWeights, hidden: Tensor, positions: Positions, norm: int = 0) -> Stream:
        if weights.shape.norm == "rms":
            return Stream(hidden, norm)
        if self._few_flow_rows(weights, positions):
            return self._flow.start(weights, hidden, (), positions)
        return self._many.add_norm(weights, hidden, None, norm, positions)

    def start_actions(
        self, weights: DecoderWeights, actions: Tensor, weight: Tensor, bias: Tensor,
        second: tuple[Tensor, Tensor] | None, positions: Positions, more: tuple[Tensor, Tensor] | None = None,
    ) -> Stream:  # fmt: skip
        if not self._few_flow_rows(weights, positions):
            return super().start_actions(weights, actions, weight, bias, second, positions, more)
        if second is None:
            return self._flow.start(weights, None, (actions, weight, bias), positions)
        return self._flow.start_mlp(weights, actions, (weight, bias, *second), positions, more)

    def finish_mlp(
        self, weights: DecoderWeights, stream: Stream, positions: Positions,
        layers: Sequence[tuple[Tensor, Tensor]], eps: float, actions: Tensor, factor: Tensor,
    ) -> None:  # fmt: skip
        if not isinstance(stream, PrescaledStream):
            return super().finish_mlp(weights, stream, positions, layers, eps, actions, factor)
        return self._flow.finish(weights, stream, layers, eps, actions, factor)

    def gather(self, weights: DecoderWeights, table: Tensor, index: Tensor, norm: int = 0) -> Stream:
        if index.numel() > self.skinny:
            return Stream(functional.embedding(index, table), norm)
        return self._decoding.gather(weights, table, index, norm)

    def norm(self, weights: DecoderWeights, stream: Stream, positions: Positions | None = None) -> Tensor:
        return self._many.norm(weights, stream)

    def qkv(
        self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions, cache: KVCache
    ) -> Tensor:
        shape, layer, (batch, rows, _) = weights.shape, weights.layers[index], stream.hidden.shape
        # Rows before heads: attention returns its result in the order of its queries, as the next product needs it.
        heads = layer.qkv.outputs // shape.head_dim - (2 * shape.kv_heads if layer.cross is None else 0)
        query = stream.hidden.new_empty(batch, rows, heads, shape.head_dim)
        if isinstance(stream, PrescaledStream):
            self._few(stream).qkv(weights, index, stream, positions, cache, query)
        else:
            self._many.qkv(weights, index, stream, positions, cache, query)
        return query

    def gate_up(self, weights: DecoderWeights, index: int, stream: Stream, positions: Positions) -> Rows:
        if isinstance(stream, PrescaledStream):
            return self._few(stream).gate_up(weights, index, stream, positions)
        return self._many.gate_up(weights, index, stream)

    def add(
        self, weights: DecoderWeights, stream: Stream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> Stream:
        """See :meth:`~vla_ros_models.engine.ops.Ops.add`; changes the tensors of ``stream``."""
        if isinstance(stream, PrescaledStream):
            return self._few(stream).add(weights, stream, rows, matrix, positions)
        return self._many.add(weights, stream, rows, matrix, positions)

    def lm_head(self, weights: DecoderWeights, stream: Stream) -> Tensor:
        assert weights.lm_head is not None
        if isinstance(stream, PrescaledStream):
            return self._whole(self._decoding.lm_head(weights, stream, weights.lm_head))
        return self.logits(weights, self.norm(weights, stream))

    def attend(self, query: Tensor, cache: KVCache, index: int, positions: Positions) -> Tensor:
        keys, values = cache.keys[index], cache.values[index]
        batch, rows, heads, head = query.shape
        if positions.ends is not None:
            return self._attend_prefix(query, keys, values, positions, positions.ends)
        if positions.length is not None:
            return self._attend_both_ways(query, keys, values, positions.length)
        if positions.prompt:
            return super().attend(query, cache, index, positions)
        out = query.new_empty(batch, rows, heads * head, dtype=positions.rows_dtype or query.dtype)
        config = self._tile("attend", query)
        partial = query.new_empty(config.splits * batch * rows * heads * (head + 2), dtype=torch.float32)
        attention.attend_kernel[(batch * heads * config.splits,)](
            query, keys, values, positions.at, out, partial, cache.split_counters, rows, keys.shape[2], head**-0.5,
            SPLITS=config.splits, HEADS=heads, KV_HEADS=keys.shape[1], HEAD=head,
            BLOCK_R=max(16, triton.next_power_of_2(rows)), BLOCK_C=config.block_n, PRECISION=precision(query),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, vocabulary = logits.shape
        tokens = torch.empty(batch, rows, dtype=torch.int64, device=logits.device)
        margins = torch.empty(batch, rows, dtype=torch.float32, device=logits.device)
        block = min(8192, triton.next_power_of_2(vocabulary))
        attention.choose_kernel[(batch * rows,)](logits, tokens, margins, vocabulary, BLOCK=block, num_warps=16)
        return tokens, margins

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
        width, (batch, horizon, numbers), table = (
            weights.shape.hidden_size,
            actions.shape,
            weights.norms[stream.norm],
        )
        normed, squares = stream.normed, weights.norms[0][0]
        if few := isinstance(stream, PrescaledStream):
            normed, squares = stream.scaled, stream.squares
        flow_ends.advance_kernel[(batch * horizon,)](
            normed, squares, weights.shape.rms_norm_eps, table[0], positions.time, *out, actions, guide.previous,
            guide.weights, guide.limit, guide.given, positions.at.shape[1], time, delta,
            min(guidance_scale(time), 1e30), H=horizon, A=numbers, SCALED=few, TILES=len(squares),
            BLOCK_M=max(16, triton.next_power_of_2(positions.at.numel())), N=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8, **norm_constants(table)
        )  # fmt: skip

    def write_cross(
        self, weights: DecoderWeights, cache: KVCache, index: int, keys: Tensor, values: Tensor
    ) -> None:
        (batch, heads, room, head), matrices = keys.shape, weights.layers[index].cross or ()
        _, kv_heads, capacity, width = cache.keys[index].shape
        odd = any(size & (size - 1) or size < 16 for size in (head, width)) or capacity % CACHE_BLOCK
        if odd or any(one.bias is not None for one in matrices):
            return super().write_cross(weights, cache, index, keys, values)
        flow_ends.cross_kernel[(capacity // CACHE_BLOCK, batch * kv_heads, 2)](
            keys, values, *(one.data for one in matrices), cache.keys[index], cache.values[index], room, capacity,
            heads, HEADS=heads, HEAD=head, KV_HEADS=kv_heads, WIDTH=width, BLOCK_C=CACHE_BLOCK,
            PRECISION=precision(keys), num_warps=4, num_stages=3,
        )  # fmt: skip

    def _attend_both_ways(self, query: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        batch, rows, heads, head = query.shape
        out = query.new_empty(batch, rows, heads * head)
        config = self._tile("attend_both_ways", query)
        attention.attend_both_ways_kernel[(triton.cdiv(rows, config.block_m), batch * heads)](
            query.contiguous(), keys, values, length, out, rows, keys.shape[2], head**-0.5, HEADS=heads,
            KV_HEADS=keys.shape[1], HEAD=head, BLOCK_R=config.block_m, BLOCK_C=config.block_n,
            PRECISION=precision(query), num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    def _attend_prefix(
        self, query: Tensor, keys: Tensor, values: Tensor, positions: Positions, ends: Tensor
    ) -> Tensor:
        batch, count, heads, head = query.shape
        few, scale = count * batch <= self.skinny, head**-0.5 * 1.4426950408889634
        out = query.new_empty(batch, count, heads * head)
        work = Work("attend_prefix", head, row_bytes=query.element_size())
        if few:
            short = SHORT if keys.shape[2] <= SHORT else 0
            work = replace(work, kernel="attend_flow", outputs=short, rows=padded_rows(positions.at))
        tile = choose_tile(gpu_of(query.device), work, self._measured)
        blocks = triton.cdiv(count * heads // keys.shape[1], tile.block_m)
        sizes = {
            "HEADS": heads, "KV_HEADS": keys.shape[1], "HEAD": head, "PRECISION": precision(query),
            "BLOCK_R": tile.block_m, "BLOCK_C": tile.block_n, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        if not few or tile.splits == 1 or head & (head - 1):
            attention.attend_prefix_kernel[(blocks, batch * keys.shape[1])](
                query, keys, values, ends, out, count, keys.shape[2], scale, WIDTH=triton.next_power_of_2(head),
                **sizes,
            )  # fmt: skip
            return out
        chunks, pairs = triton.cdiv(keys.shape[2], tile.block_n), batch * count * heads
        sums = query.new_empty(2, chunks, pairs, dtype=torch.float32)
        parts = query.new_empty(chunks, pairs, head)
        flow.attend_chunk_kernel[(blocks, chunks, batch * keys.shape[1])](
            query, keys, values, ends, sums, parts, count, keys.shape[2], scale, pairs, **sizes
        )
        flow.flow_merge_kernel[(pairs,)](
            sums, parts, out, pairs, CHUNKS=chunks, HEAD=head, PADDED=triton.next_power_of_2(chunks), num_warps=1
        )
        return out

    def _tile(self, kernel: str, query: Tensor) -> Tile:
        work = Work(kernel, query.shape[-1], row_bytes=query.element_size())
        return choose_tile(gpu_of(query.device), work, self._measured)

    def _few(self, stream: PrescaledStream) -> DecodingRows | FlowRows:
        return self._decoding if stream.counters is None else self._flow

    def _few_flow_rows(self, weights: DecoderWeights, positions: Positions) -> bool:
        shape = weights.shape
        whole = all(size % 16 == 0 for size in (shape.hidden_size, shape.intermediate_size, shape.head_dim))
        return whole and positions.at.numel() <= self.skinny
