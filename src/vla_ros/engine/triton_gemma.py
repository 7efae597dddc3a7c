"""Gemma's operations on a GPU: Triton kernels for few rows, library products and kernels between for many."""

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
    Quantized,
    Rows,
    Stream,
    guidance_scale,
    multiply,
)
from vla_ros.engine.kernels import gemma as kernels
from vla_ros.engine.kernels import pointwise
from vla_ros.engine.ops import KVCache
from vla_ros.engine.tile_configs import SKINNY, divisor
from vla_ros.engine.weights import Matrix


@dataclass(frozen=True)
class FewRows:
    """Tile and pipeline of a product of few rows."""

    block_n: int  # outputs per program (pairs for ``qkv`` and ``gate_up``)
    block_k: int  # inputs per iteration
    warps: int = 4  # warps per program
    stages: int = 4  # pipeline stages
    splits: int = 1  # programs that share the inputs

    def fit(self, n: int, k: int) -> FewRows:
        """The nearest that divides a weight of ``n`` outputs (or pairs) and ``k`` inputs."""
        splits = divisor(k // divisor(k, 16), self.splits) if k % 16 == 0 else 1
        return replace(
            self, block_n=divisor(n, self.block_n), block_k=divisor(k // splits, self.block_k), splits=splits
        )


@dataclass(frozen=True)
class Attention:
    """Tile of an attention."""

    rows: int  # rows of a program, each a token and a head
    columns: int  # cache positions per iteration
    warps: int  # warps per program
    stages: int  # pipeline stages
    splits: int = 1  # programs that share the positions


FEW_ROWS = {
    "qkv": FewRows(16, 256, stages=3),
    "o_proj": FewRows(32, 128, splits=4),
    "gate_up": FewRows(32, 128, warps=8),
    "down_proj": FewRows(32, 128, splits=4),
}
"""By role, as tuned inside ten flow steps of pi0.5 with a horizon of 50 on an H200."""
FEW_ATTENTION = Attention(16, 128, 8, 2, splits=5)
MANY_ATTENTION = Attention(64, 32, 4, 3)


@dataclass(frozen=True, eq=False)
class ScaledStream(Stream):
    """The stream of few rows; ``normed`` is only multiplied by the norm's scale."""

    squares: Tensor  # float64, one per row: the sum of the squares of ``hidden``
    next_squares: Tensor  # room for those of the next norm, zeros
    counters: Tensor  # int32 zeros: programs that share a tile count themselves here, and leave zeros


class TritonGemmaOps(GemmaOps):
    """:class:`~vla_ros.engine.gemma.GemmaOps` in Triton.

    ``few_rows`` takes the place of entries of :data:`FEW_ROWS`. Up to ``skinny`` rows products have kernels of
    their own; 0 leaves all to the library.
    """

    def __init__(
        self,
        few_rows: dict[str, FewRows] | None = None,
        few_attention: Attention = FEW_ATTENTION,
        many_attention: Attention = MANY_ATTENTION,
        skinny: int = SKINNY,
    ) -> None:
        self.few_rows = {**FEW_ROWS, **(few_rows or {})}
        self.few_attention, self.many_attention = few_attention, many_attention
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
            config = self._config(matrix, 2)
            kernels.qkv_kernel[(matrix.outputs // 2 // config.block_n,)](
                *self._scaled(gemma, rows, stream, matrix, gemma.layers[index].qkv_shift), rows.at, gemma.cosine,
                gemma.sine, query, keys, values, batch * count, count, keys.shape[2], SHIFTED=gemma.adaptive,
                **sizes, **self._constants(matrix, config, rows),
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
        config = self.few_attention if few else self.many_attention
        blocks = triton.cdiv(count * heads // keys.shape[1], config.rows)
        out = query.new_empty(batch, count, heads * head)
        parts = batch * keys.shape[1] * blocks * config.splits * config.rows if config.splits > 1 else 1
        partial, mixes = query.new_empty(2 * parts, dtype=torch.float32), query.new_empty(parts, head)
        kernels.attend_kernel[(blocks, config.splits, batch * keys.shape[1])](
            query, keys, values, rows.end, out, partial, mixes, cache.split_counters, count, keys.shape[2],
            head**-0.5 * 1.4426950408889634, SPLITS=config.splits, HEADS=heads, KV_HEADS=keys.shape[1], HEAD=head,
            BLOCK_R=config.rows, BLOCK_C=config.columns, PRECISION=_precision(query),
            num_warps=config.warps, num_stages=config.stages
        )  # fmt: skip
        return out

    def gate_up(self, gemma: Gemma, index: int, rows: Rows, stream: Stream) -> Tensor | Quantized:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`."""
        matrix, width = gemma.layers[index].gate_up, gemma.shape.mlp_width
        assert matrix is not None
        (batch, count), down = rows.at.shape, gemma.layers[index].down
        out = gemma.cosine.new_empty(batch, count, width)
        if isinstance(stream, ScaledStream):
            config = self._config(matrix, 2)
            kernels.gate_up_kernel[(width // config.block_n,)](
                *self._scaled(gemma, rows, stream, matrix, gemma.layers[index].gate_up_shift), out, batch * count,
                N=width, SHIFTED=gemma.adaptive, **self._constants(matrix, config, rows),
            )  # fmt: skip
            return out
        both = multiply(stream.normed, matrix)
        if down is not None and down.kind == "fp8":
            quantized = _quantized(out)
            kernels.gelu_multiply_kernel[(batch * count, 1)](
                both, *quantized, width, QUANTIZE=True, BLOCK=triton.next_power_of_2(width), num_warps=16
            )
            return quantized
        block = min(2048, triton.next_power_of_2(width))
        kernels.gelu_multiply_kernel[(batch * count, triton.cdiv(width, block))](
            both, out, out, width, QUANTIZE=False, BLOCK=block
        )
        return out

    def add(self, gemma: Gemma, rows: Rows, stream: Stream, inputs: Tensor | Quantized, matrix: Matrix) -> Stream:
        """See :class:`~vla_ros.engine.gemma.GemmaOps`; changes the tensors of ``stream``."""
        norm = stream.norm + 1
        if not isinstance(stream, ScaledStream):
            return self._add_norm(gemma, rows, stream.hidden, multiply(inputs, matrix), norm)
        assert isinstance(inputs, Tensor)
        config, count = self._config(matrix, 1), rows.at.numel()
        partial = inputs.new_empty(config.splits * count * matrix.outputs, dtype=torch.float32)
        kernels.add_kernel[(matrix.outputs // config.block_n, config.splits)](
            inputs, matrix.data, stream.hidden, gemma.norms[0, norm], rows.time, stream.normed, stream.squares,
            stream.next_squares, partial, stream.counters, count, N=matrix.outputs, SPLITS=config.splits,
            **_norms(gemma), **self._constants(matrix, config, rows),
        )  # fmt: skip
        # Swap the sums: the used ones are zero now, ready for the norm after the next.
        return replace(stream, norm=norm, squares=stream.next_squares, next_squares=stream.squares)

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
        squares = stream.squares if isinstance(stream, ScaledStream) else stream.normed
        kernels.advance_kernel[(batch * horizon,)](
            stream.normed, squares, RMS_EPS, gemma.norms[0, stream.norm], rows.time, *out, actions, guide.previous,
            guide.weights, guide.limit, guide.given, rows.at.shape[1], time, delta, min(guidance_scale(time), 1e30),
            H=horizon, A=numbers, SCALED=scaled, N=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
            **_norms(gemma)
        )  # fmt: skip

    def _start(
        self,
        gemma: Gemma,
        rows: Rows,
        tokens: Tensor | None,
        embed: tuple[Tensor, Tensor, Tensor] | None,
    ) -> ScaledStream:
        width, block = gemma.shape.width, triton.next_power_of_2(gemma.shape.width)
        hidden, scaled = gemma.cosine.new_empty(2, *rows.at.shape, width)
        sums = gemma.norms.new_empty(2, SKINNY, dtype=torch.float64)
        counters = rows.at.new_empty(block)
        actions, weight, bias = (hidden, hidden, hidden) if embed is None else embed
        kernels.start_kernel[(rows.at.numel(),)](
            hidden if tokens is None else tokens.contiguous(), actions, weight, bias, gemma.norms, rows.time,
            hidden, scaled, sums[0], sums[1], counters, A=actions.shape[-1], EMBED=embed is not None, N=width,
            BLOCK=block, num_warps=8, **_norms(gemma)
        )  # fmt: skip
        return ScaledStream(hidden, scaled, 0, sums[0], sums[1], counters)

    def _add_norm(self, gemma: Gemma, rows: Rows, hidden: Tensor, branch: Tensor | None, norm: int) -> Stream:
        width, layer = hidden.shape[-1], gemma.layers[min(norm // 2, len(gemma.layers) - 1)]
        following = layer.gate_up if norm % 2 else layer.qkv
        quantize = following is not None and following.kind == "fp8" and norm < 2 * len(gemma.layers)
        out = _quantized(hidden) if quantize else torch.empty_like(hidden)
        kernels.add_norm_kernel[(rows.at.numel(),)](
            hidden, hidden if branch is None else branch, gemma.norms[0, norm], rows.time,
            *(out if isinstance(out, Quantized) else (out, out)), RMS_EPS, BRANCH=branch is not None,
            QUANTIZE=quantize, N=width, BLOCK=triton.next_power_of_2(width), num_warps=8, **_norms(gemma),
        )  # fmt: skip
        return Stream(hidden, out, norm)

    def _few(self, gemma: Gemma, rows: Rows) -> bool:
        shape = gemma.shape
        whole = all(size % 16 == 0 for size in (shape.width, shape.mlp_width, shape.head_dim))
        return whole and rows.at.numel() <= self.skinny

    def _config(self, matrix: Matrix, pairs: int) -> FewRows:
        return self.few_rows[matrix.role].fit(matrix.outputs // pairs, matrix.inputs)

    def _scaled(
        self, gemma: Gemma, rows: Rows, stream: ScaledStream, matrix: Matrix, shift: Tensor | None
    ) -> tuple[Tensor, Tensor, float, Tensor, Tensor, Tensor]:
        """What a kernel of few rows takes instead of normed rows, its weight and the norm's shift."""
        assert isinstance(stream.normed, Tensor)
        return (
            stream.normed,
            stream.squares,
            RMS_EPS,
            matrix.data,
            gemma.norms if shift is None else shift,
            rows.time,
        )

    def _constants(self, matrix: Matrix, config: FewRows, rows: Rows) -> dict[str, object]:
        return {
            "K": matrix.inputs,
            "BLOCK_M": max(16, triton.next_power_of_2(rows.at.numel())),
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "PRECISION": _precision(matrix.data),
            "num_warps": config.warps,
            "num_stages": config.stages,
        }


def _quantized(like: Tensor) -> Quantized:
    """Room for the rows of ``like`` [B, N, width] in FP8."""
    data = like.new_empty(like.shape[0] * like.shape[1], like.shape[2], dtype=fp8.FP8)
    return Quantized(data, like.new_empty(len(data), 1, dtype=torch.float32))


def _norms(gemma: Gemma) -> dict[str, object]:
    """The distance between two times in the table of norms, and whether there are several."""
    return {"TIME": gemma.norms.stride(0), "ADAPTIVE": gemma.adaptive}


def _precision(rows: Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"  # tf32 is Triton's default, unused for bfloat16
