"""Gemma's operations on a GPU: Triton kernels for few rows, library products for many rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from vla_ros.engine import fp8
from vla_ros.engine.gemma import (
    RMS_EPS,
    Gemma,
    GemmaOps,
    Guide,
    Rows,
    Stream,
    guidance_scale,
    multiply,
)
from vla_ros.engine.kernels import flow, pointwise
from vla_ros.engine.kernels import gemma as kernels
from vla_ros.engine.ops import KVCache, QuantizedRows
from vla_ros.engine.tile_configs import (
    FEWEST_FLOW_CONFIGS,
    FLOW_CONFIGS,
    MANY_ATTENTION,
    SKINNY,
    FlowConfigs,
    SkinnyConfig,
    shared_memory,
)
from vla_ros.engine.weights import Matrix


@dataclass(frozen=True, eq=False)
class ScaledStream(Stream):
    """The stream of few rows; ``normed`` is ``hidden`` times the norm's scale, not yet normalised."""

    squares: Tensor  # float32 [tiles, rows]: sum of squares of ``hidden`` per tile; 0 in unused tiles
    spare: Tensor  # receives the squares for the next norm
    counters: Tensor  # int32 zeros: count the finished programs of a tile; reset by the last


class TritonGemmaOps(GemmaOps):
    """:class:`~vla_ros.engine.gemma.GemmaOps` in Triton.

    Products with at most ``skinny`` rows use dedicated kernels; with 0, the library computes all products.
    """

    def __init__(
        self,
        few_rows: FlowConfigs = FLOW_CONFIGS,
        fewest_rows: FlowConfigs = FEWEST_FLOW_CONFIGS,
        skinny: int = SKINNY,
    ) -> None:
        self.few_rows, self.fewest_rows = few_rows, fewest_rows
        self.skinny = skinny

    def start(self, gemma: Gemma, rows: Rows, hidden: Tensor) -> Stream:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        if not self._few(gemma, rows):
            return self._add_norm(gemma, rows, hidden, None, 0)
        return self._start(gemma, rows, hidden, None)

    def start_actions(
        self, gemma: Gemma, rows: Rows, actions: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Stream:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        if not self._few(gemma, rows):
            return super().start_actions(gemma, rows, actions, weight, bias, dtype)
        return self._start(gemma, rows, None, (actions, weight, bias))

    def qkv(self, gemma: Gemma, index: int, rows: Rows, stream: Stream, cache: KVCache) -> Tensor:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        shape, matrix = gemma.shape, gemma.layers[index].qkv
        batch, count = rows.at.shape
        heads = matrix.outputs // shape.head_dim - 2 * shape.kv_heads
        keys, values = cache.keys[index], cache.values[index]
        query = gemma.cosine.new_empty(batch, count, heads, shape.head_dim)
        sizes = {"HEADS": heads, "KV_HEADS": shape.kv_heads, "HEAD": shape.head_dim}
        if isinstance(stream, ScaledStream):
            tile = self._tile(matrix, rows)
            flow.qkv_kernel[(matrix.outputs // 2 // tile.block_n,)](
                *_scaled(gemma, rows, stream, matrix, gemma.layers[index].qkv_shift), rows.at, gemma.cosine,
                gemma.sine, query, keys, values, batch * count, count, keys.shape[2], matrix.inputs,
                TILES=len(stream.squares), **sizes, **_constants(gemma, matrix, tile, rows),
            )  # fmt: skip
            return query
        product = multiply(stream.normed, matrix)
        pointwise.rotate_kernel[(batch * count,)](
            product, rows.at, gemma.cosine, gemma.sine, query, keys, values, count, keys.shape[2], **sizes,
            BLOCK_H=triton.next_power_of_2(heads + 2 * shape.kv_heads), num_warps=8,
        )  # fmt: skip
        return query

    def attend(self, rows: Rows, query: Tensor, cache: KVCache, index: int) -> Tensor:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        keys, values = cache.keys[index], cache.values[index]
        batch, count, heads, head = query.shape
        few = count * batch <= self.skinny
        out, scale = query.new_empty(batch, count, heads * head), head**-0.5 * 1.4426950408889634
        sizes = {"HEADS": heads, "KV_HEADS": keys.shape[1], "HEAD": head, "PRECISION": _precision(query)}
        tuned = self._tiles(rows).attention if few else MANY_ATTENTION
        tile = tuned.fit(head * query.element_size(), shared_memory(query.device))
        blocks = triton.cdiv(count * heads // keys.shape[1], tile.block_r)
        sizes |= {"BLOCK_R": tile.block_r, "BLOCK_C": tile.block_c}
        sizes |= {"num_warps": tile.warps, "num_stages": tile.stages}
        if not few:
            kernels.attend_kernel[(blocks, batch * keys.shape[1])](
                query, keys, values, rows.end, out, count, keys.shape[2], scale, **sizes
            )
            return out
        chunks, pairs = triton.cdiv(keys.shape[2], tile.block_c), batch * count * heads
        sums = query.new_empty(2, chunks, pairs, dtype=torch.float32)
        parts = query.new_empty(chunks, pairs, head)
        flow.attend_chunk_kernel[(blocks, chunks, batch * keys.shape[1])](
            query, keys, values, rows.at, rows.end, sums, parts, count, keys.shape[2], scale, pairs, **sizes
        )
        flow.merge_kernel[(pairs,)](
            sums, parts, out, pairs, CHUNKS=chunks, HEAD=head, PADDED=triton.next_power_of_2(chunks), num_warps=1
        )
        return out

    def gate_up(self, gemma: Gemma, index: int, rows: Rows, stream: Stream) -> Tensor | QuantizedRows:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        matrix, width = gemma.layers[index].gate_up, gemma.shape.mlp_width
        assert matrix is not None
        (batch, count), down = rows.at.shape, gemma.layers[index].down
        out = gemma.cosine.new_empty(batch, count, width)
        if isinstance(stream, ScaledStream):
            tile = self._tile(matrix, rows)
            flow.gate_up_kernel[(width // tile.block_n,)](
                *_scaled(gemma, rows, stream, matrix, gemma.layers[index].gate_up_shift), out, batch * count,
                matrix.inputs, N=width, TILES=len(stream.squares), **_constants(gemma, matrix, tile, rows),
            )  # fmt: skip
            return out
        both = multiply(stream.normed, matrix)
        if down is not None and down.kind == "fp8":
            quantized = _quantized(out)
            kernels.gelu_multiply_kernel[(batch * count, 1)](
                both, *quantized[:2], width, QUANTIZE=True, BLOCK=triton.next_power_of_2(width), num_warps=16
            )
            return quantized
        block = min(2048, triton.next_power_of_2(width))
        kernels.gelu_multiply_kernel[(batch * count, triton.cdiv(width, block))](
            both, out, out, width, QUANTIZE=False, BLOCK=block
        )
        return out

    def add(
        self, gemma: Gemma, rows: Rows, stream: Stream, inputs: Tensor | QuantizedRows, matrix: Matrix
    ) -> Stream:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`; changes the tensors of ``stream``."""
        norm = stream.norm + 1
        if not isinstance(stream, ScaledStream):
            return self._add_norm(gemma, rows, stream.hidden, multiply(inputs, matrix), norm)
        assert isinstance(inputs, Tensor)
        tile, count = self._tile(matrix, rows), rows.at.numel()
        partial = inputs.new_empty(tile.splits * count * matrix.outputs, dtype=torch.float32)
        flow.add_kernel[(matrix.outputs // tile.block_n, tile.splits)](
            inputs, matrix.data, stream.hidden, *_at_times(gemma, rows, gemma.norms[:, norm]), stream.normed,
            stream.spare, partial, stream.counters, count, matrix.inputs // tile.splits, N=matrix.outputs,
            SPLITS=tile.splits, **_constants(gemma, matrix, tile, rows),
        )  # fmt: skip
        return replace(stream, norm=norm, squares=stream.spare, spare=stream.squares)

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
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        width, (batch, horizon, numbers) = gemma.shape.width, actions.shape
        scaled = isinstance(stream, ScaledStream)
        squares = stream.squares if isinstance(stream, ScaledStream) else gemma.norms[0, 0]
        flow.advance_kernel[(batch * horizon,)](
            stream.normed, squares, RMS_EPS, gemma.norms[0, stream.norm], rows.time, *out, actions, guide.previous,
            guide.weights, guide.limit, guide.given, rows.at.shape[1], time, delta, min(guidance_scale(time), 1e30),
            H=horizon, A=numbers, SCALED=scaled, TILES=len(squares), BLOCK_M=_padded(rows), N=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8, **_norms(gemma)
        )  # fmt: skip

    def _start(
        self,
        gemma: Gemma,
        rows: Rows,
        tokens: Tensor | None,
        embed: tuple[Tensor, Tensor, Tensor] | None,
    ) -> ScaledStream:
        width, layer = gemma.shape.width, gemma.layers[0]
        assert layer.o is not None
        assert layer.down is not None
        actions, weight, bias = (gemma.norms,) * 3 if embed is None else embed
        count = triton.next_power_of_2(width // min(self._tile(one, rows).block_n for one in (layer.o, layer.down)))
        hidden, scaled = gemma.cosine.new_empty(2, *rows.at.shape, width)
        squares, spare = gemma.norms.new_empty(2, count, _padded(rows))
        counters = rows.at.new_empty(count)
        flow.start_kernel[(rows.at.numel(),)](
            hidden if tokens is None else tokens.contiguous(), actions, weight, bias, gemma.norms, rows.time,
            hidden, scaled, squares, spare, counters, A=actions.shape[-1], EMBED=embed is not None, TILES=count,
            BLOCK_M=_padded(rows), N=width, BLOCK=triton.next_power_of_2(width), num_warps=8, **_norms(gemma)
        )  # fmt: skip
        return ScaledStream(hidden, scaled, 0, squares, spare, counters)

    def _add_norm(self, gemma: Gemma, rows: Rows, hidden: Tensor, branch: Tensor | None, norm: int) -> Stream:
        width, layer = hidden.shape[-1], gemma.layers[min(norm // 2, len(gemma.layers) - 1)]
        following = layer.gate_up if norm % 2 else layer.qkv
        quantize = following is not None and following.kind == "fp8" and norm < 2 * len(gemma.layers)
        out = _quantized(hidden) if quantize else torch.empty_like(hidden)
        kernels.add_norm_kernel[(rows.at.numel(),)](
            hidden, hidden if branch is None else branch, gemma.norms[0, norm], rows.time,
            *(out[:2] if isinstance(out, QuantizedRows) else (out, out)), RMS_EPS, BRANCH=branch is not None,
            QUANTIZE=quantize, N=width, BLOCK=triton.next_power_of_2(width), num_warps=8, **_norms(gemma),
        )  # fmt: skip
        return Stream(hidden, out, norm)

    def _few(self, gemma: Gemma, rows: Rows) -> bool:
        shape = gemma.shape
        whole = all(size % 16 == 0 for size in (shape.width, shape.mlp_width, shape.head_dim))
        return whole and rows.at.numel() <= self.skinny

    def _tiles(self, rows: Rows) -> FlowConfigs:
        return self.fewest_rows if rows.at.numel() <= 16 else self.few_rows

    def _tile(self, matrix: Matrix, rows: Rows) -> SkinnyConfig:
        item, shared = matrix.data.element_size(), shared_memory(matrix.data.device)
        return self._tiles(rows).of(matrix.role, matrix.outputs, matrix.inputs, _padded(rows), item, shared)


def _scaled(
    gemma: Gemma, rows: Rows, stream: ScaledStream, matrix: Matrix, shift: Tensor | None
) -> tuple[object, ...]:
    """Return the arguments that few-row kernels take instead of normed rows, then weight and norm's shift."""
    shifts = gemma.norms[:, 0] if shift is None else shift
    return stream.normed, stream.squares, RMS_EPS, matrix.data, *_at_times(gemma, rows, shifts)


def _at_times(gemma: Gemma, rows: Rows, table: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return a table's entries for the step's time and for 0, the rows' time indices, and the index of 0."""
    return table[rows.step], table[-1], rows.time, len(table) - 1


def _padded(rows: Rows) -> int:
    """Return the number of rows, padded to a power of two of at least 16."""
    return max(16, int(triton.next_power_of_2(rows.at.numel())))


def _constants(gemma: Gemma, matrix: Matrix, tile: SkinnyConfig, rows: Rows) -> dict[str, object]:
    return {
        "K": matrix.inputs,
        "ADAPTIVE": gemma.adaptive,
        "BLOCK_M": _padded(rows),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PRECISION": _precision(matrix.data),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _quantized(like: Tensor) -> QuantizedRows:
    """Allocate FP8 rows of the shape of ``like`` [B, N, width]."""
    data = like.new_empty(like.shape[0] * like.shape[1], like.shape[2], dtype=fp8.FP8)
    return QuantizedRows(data, like.new_empty(len(data), 1, dtype=torch.float32))


def _norms(gemma: Gemma) -> dict[str, object]:
    """Return the stride between times in the table of norms, and whether norms are adaptive."""
    return {"TIME": gemma.norms.stride(0), "ADAPTIVE": gemma.adaptive}


def _precision(rows: Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"  # tf32 is Triton's default, unused for bfloat16
