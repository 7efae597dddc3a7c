"""The operations of a decoder pass on a GPU: Triton kernels for few rows, library products for many.

Norms of few rows need no separate kernel. The kernel that writes the residual stream also writes the stream
times the next norm's weight and sums the stream's squares; the next product divides its results by the root mean
square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional

from vla_ros.engine import fp8, tile_configs
from vla_ros.engine.kernels import attention, linear, lowbit, pointwise
from vla_ros.engine.lowbit import ALIGN_K, FRAGMENT_N
from vla_ros.engine.ops import KVCache, Ops, Positions, QuantizedRows, Residual, Rows, ScaledProduct, rounds
from vla_ros.engine.tile_configs import (
    PACKED_ROWS,
    SKINNY,
    AttentionConfig,
    GemmConfig,
    SkinnyConfig,
    choose_gemm,
    divisor,
    shared_memory,
)
from vla_ros.engine.weights import DecoderWeights, Matrix


@dataclass(frozen=True)
class PrescaledResidual(Residual):
    """The residual stream of few rows, for kernels that complete its norm in their epilogue."""

    scaled: Tensor  # ``hidden * norm``
    squares: Tensor  # float64, one per row: the sum of the squares of ``hidden``
    next_squares: Tensor  # zeros; receives the next norm's squares


class TritonOps(Ops):
    """:class:`~vla_ros.engine.ops.Ops` in Triton.

    ``configs`` overrides entries of :data:`~vla_ros.engine.tile_configs.SKINNY_CONFIGS`. ``attention`` configures
    few-row attention. ``gemm`` configures many-row products with packed weights; if it is None,
    :func:`~vla_ros.engine.tile_configs.choose_gemm` chooses a configuration for each product.
    """

    def __init__(
        self,
        configs: dict[tuple[str, str], SkinnyConfig] | None = None,
        attention: AttentionConfig | None = None,
        gemm: GemmConfig | None = None,
    ) -> None:
        super().__init__()
        self.configs = {**tile_configs.SKINNY_CONFIGS, **(configs or {})}
        self.attention = attention or tile_configs.ATTENTION_CONFIG
        self.gemm = gemm

    def locate(self, weights: DecoderWeights, cache: KVCache, at: Tensor, prompt: bool = False) -> Positions:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        return Positions(at, prompt, weights.cosine, weights.sine, end=at.shape[1], rows_dtype=weights.rows_dtype)

    def gather(self, table: Tensor, index: Tensor, norm: Tensor, rows_dtype: torch.dtype | None = None) -> Residual:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        width = table.shape[1]
        if index.numel() > SKINNY:
            return Residual(functional.embedding(index, table), norm)
        hidden = table.new_empty(*index.shape, width)
        scaled = torch.empty_like(hidden, dtype=rows_dtype or table.dtype)
        sums = table.new_empty(2, SKINNY, dtype=torch.float64)
        pointwise.gather_kernel[(index.numel(),)](
            table, index.contiguous(), hidden, norm, scaled, sums[0], sums[1], N=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return PrescaledResidual(hidden, norm, scaled, sums[0], sums[1])

    def qkv(
        self, weights: DecoderWeights, index: int, stream: Residual, positions: Positions, cache: KVCache
    ) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        hidden, matrix, shape = stream.hidden, weights.layers[index].qkv, weights.shape
        batch, rows, _ = hidden.shape
        count, total_heads = batch * rows, shape.heads + 2 * shape.kv_heads
        sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD": shape.head_dim}
        rotary = (positions.at, positions.cosine, positions.sine)
        keys, values = cache.keys[index], cache.values[index]
        # Rows before heads: attention returns its result in the order of its queries, as the next product needs it.
        query = hidden.new_empty(batch, rows, shape.heads, shape.head_dim)
        if isinstance(stream, PrescaledResidual):
            config = self._config(matrix, hidden, 2)
            linear.qkv_kernel[_grid(matrix, hidden, matrix.outputs // 2 // config.block_n)](
                *_prescaled(weights, stream), *_data(matrix), *rotary, query, keys, values, count, rows,
                keys.shape[2], **sizes, **_constants(matrix, config, hidden),
            )  # fmt: skip
            return query
        product = self._normed_product(weights, stream, matrix)
        block_h = min(32, triton.next_power_of_2(total_heads))
        pointwise.rotate_kernel[(count, triton.cdiv(total_heads, block_h))](
            product.values, *rotary, query, keys, values, rows, keys.shape[2], **sizes, BLOCK_H=block_h,
            row_scale=product.rows, column_scale=product.columns, SCALED=matrix.kind == "fp8", num_warps=4,
        )  # fmt: skip
        return query

    def attend(self, query: Tensor, cache: KVCache, index: int, positions: Positions) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        keys, values = cache.keys[index], cache.values[index]
        batch, rows, heads, head = query.shape
        if positions.length is not None:
            return self._attend_both_ways(query, keys, values, positions.length)
        if positions.prompt:
            return super().attend(query, cache, index, positions)
        out = query.new_empty(batch, rows, heads * head, dtype=positions.rows_dtype or query.dtype)
        config = self.attention
        partial = query.new_empty(config.splits * batch * rows * heads * (head + 2), dtype=torch.float32)
        attention.attend_kernel[(batch * heads * config.splits,)](
            query, keys, values, positions.at, out, partial, cache.split_counters, rows, keys.shape[2], head**-0.5,
            SPLITS=config.splits, HEADS=heads, KV_HEADS=keys.shape[1], HEAD=head,
            BLOCK_R=max(16, triton.next_power_of_2(rows)), BLOCK_C=config.block_c, PRECISION=_precision(query),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    def locate_both_ways(
        self, weights: DecoderWeights, cache: KVCache, at: Tensor, length: Tensor | None
    ) -> Positions:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        return replace(self.locate(weights, cache, at, prompt=True), causal=False, length=length)

    def _attend_both_ways(self, query: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        batch, rows, heads, head = query.shape
        out = query.new_empty(batch, rows, heads * head)
        config = tile_configs.BOTH_WAYS_WGMMA if _has_wgmma(query.device) else tile_configs.BOTH_WAYS
        if query.dtype == torch.float32:
            config = AttentionConfig(16)
        attention.attend_both_ways_kernel[(triton.cdiv(rows, config.block_r), batch * heads)](
            query.contiguous(), keys, values, length, out, rows, keys.shape[2], head**-0.5, HEADS=heads,
            KV_HEADS=keys.shape[1], HEAD=head, BLOCK_R=config.block_r, BLOCK_C=config.block_c,
            PRECISION=_precision(query), num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    def add_linear(self, stream: Residual, rows: Rows, matrix: Matrix, norm: Tensor) -> Residual:
        """See :class:`~vla_ros.engine.ops.Ops`; changes the tensors of ``stream``."""
        if not isinstance(stream, PrescaledResidual):
            if matrix.kind == "fp8":  # scaled and added by the next norm's kernel
                return Residual(stream.hidden, norm, branch=_fp8_product(rows, matrix))
            sums = self._product(rows, matrix, stream.hidden, add=True)
            if sums is stream.hidden:
                return Residual(sums, norm)
            return Residual(
                stream.hidden,
                norm,
                branch=ScaledProduct(sums, None, matrix.scale if matrix.kind == "int8" else None),
            )
        assert isinstance(rows, Tensor)
        config, rows = self._config(matrix, rows, 1), rows.contiguous()
        linear.add_kernel[_grid(matrix, rows, matrix.outputs // config.block_n)](
            rows, *_data(matrix), stream.hidden, norm, stream.scaled, stream.next_squares, stream.squares,
            rows.shape[0] * rows.shape[1], matrix.outputs, **_constants(matrix, config, rows),
        )  # fmt: skip
        # Swap the sums: the kernel has reset the used ones to zero, for the norm after the next.
        return replace(stream, norm=norm, squares=stream.next_squares, next_squares=stream.squares)

    def gate_up(self, weights: DecoderWeights, index: int, stream: Residual) -> Rows:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        hidden, matrix, width = stream.hidden, weights.layers[index].gate_up, weights.shape.intermediate_size
        batch, rows, _ = hidden.shape
        if isinstance(stream, PrescaledResidual):
            out = hidden.new_empty(batch, rows, width, dtype=weights.rows_dtype)
            config = self._config(matrix, hidden, 2)
            linear.gate_up_kernel[_grid(matrix, hidden, width // config.block_n)](
                *_prescaled(weights, stream), *_data(matrix), out, batch * rows, width,
                **_constants(matrix, config, hidden),
            )  # fmt: skip
            return out
        out = hidden.new_empty(batch, rows, width)
        both = self._normed_product(weights, stream, matrix)
        quantized = rounds(out, weights.layers[index].down_proj)
        block = min(2048, max(128, triton.next_power_of_2(width)))
        made = _empty_fp8(out, weights.layers[index].down_proj) if quantized else QuantizedRows(out, out)
        pointwise.silu_multiply_kernel[(batch * rows, 1 if quantized else triton.cdiv(width, block))](
            *both, *made, width, SCALED=matrix.kind == "fp8", FP8=quantized, GROUPED=made.sums is not None,
            BLOCK=block, num_warps=8 if quantized else 4,
        )  # fmt: skip
        return made if quantized else out

    def lm_head(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        hidden, matrix = stream.hidden, weights.lm_head
        batch, rows, _ = hidden.shape
        if not isinstance(stream, PrescaledResidual):
            return functional.linear(self.norm(weights, stream), matrix.data).float()
        logits = hidden.new_empty(batch, rows, matrix.outputs, dtype=torch.float32)
        config = self._config(matrix, hidden, 1)
        linear.lm_head_kernel[_grid(matrix, hidden, matrix.outputs // config.block_n)](
            *_prescaled(weights, stream), *_data(matrix), logits, batch * rows, matrix.outputs,
            **_constants(matrix, config, hidden),
        )  # fmt: skip
        return logits

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        batch, rows, vocabulary = logits.shape
        tokens = torch.empty(batch, rows, dtype=torch.int64, device=logits.device)
        margins = torch.empty(batch, rows, dtype=torch.float32, device=logits.device)
        block = min(8192, triton.next_power_of_2(vocabulary))
        attention.choose_kernel[(batch * rows,)](logits, tokens, margins, vocabulary, BLOCK=block, num_warps=16)
        return tokens, margins

    def _config(self, matrix: Matrix, rows: Tensor, pairs: int) -> SkinnyConfig:
        """Return the configuration for a weight and ``rows`` [B, R, K]; ``pairs`` is 2 if outputs come in pairs."""
        item = matrix.nbytes / (matrix.outputs * matrix.inputs)
        block_m, shared = _block_m(matrix, rows), shared_memory(rows.device)

        def stage_bytes(config: SkinnyConfig, count: int = block_m) -> int:
            return int(config.block_k * (pairs * config.block_n * item + count * rows.element_size()))

        config = self.configs[matrix.role, matrix.kind]
        if matrix.packed:
            if rows.dtype == torch.float32:  # for checks only: without tensor cores, operands fill shared memory
                config = SkinnyConfig(block_n=16 // pairs, block_k=256, warps=4, stages=2)
            return config.fit_packed(matrix.outputs // pairs, stage_bytes, block_m, shared, 16 // pairs)
        return config.fit(matrix.outputs // pairs, matrix.inputs, stage_bytes, shared)

    def norm(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        out = torch.empty_like(stream.hidden)
        self._norm(weights, stream, QuantizedRows(out, out))
        return out

    def _normed_product(self, weights: DecoderWeights, stream: Residual, matrix: Matrix) -> ScaledProduct:
        """Normalise many rows and multiply them by ``matrix``; the scales are valid only for FP8 weights."""
        hidden = stream.hidden
        rows: Rows = _empty_fp8(hidden, matrix) if rounds(hidden, matrix) else torch.empty_like(hidden)
        self._norm(weights, stream, rows if isinstance(rows, QuantizedRows) else QuantizedRows(rows, rows))
        if matrix.kind == "fp8":
            return _fp8_product(rows, matrix)
        out = hidden.new_empty(*hidden.shape[:2], matrix.outputs)
        self._product(rows, matrix, out)
        return ScaledProduct(out, out, out)

    def _norm(self, weights: DecoderWeights, stream: Residual, out: QuantizedRows) -> None:
        hidden, width, branch = stream.hidden, stream.hidden.shape[-1], stream.branch
        pointwise.rms_norm_kernel[(hidden.numel() // width,)](
            hidden, *(branch or (None, None, None)), stream.norm, *out, weights.shape.rms_norm_eps,
            PARTS=0 if branch is None else branch.values.numel() // hidden.numel(),
            FP8=out.values.dtype == fp8.FP8, GROUPED=out.sums is not None, N=width,
            BLOCK=max(128, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip

    def _product(self, rows: Rows, matrix: Matrix, out: Tensor, *, add: bool = False) -> Tensor:
        """Compute ``out [B, R, N] = [out +] rows @ matrix.T`` for many rows and a dense or packed weight.

        Returns ``out``, or, if programs split the inputs of a packed weight, the programs' partial sums, float32
        [programs, B * R, N], without int8's scales.
        """
        if matrix.packed:
            return self._packed_product(rows, matrix, out, add)
        assert isinstance(rows, Tensor)
        flat, target, weight = rows.reshape(-1, matrix.inputs), out.view(-1, matrix.outputs), matrix.data.t()
        if add:
            torch.addmm(target, flat, weight, out=target)  # the product itself adds the residual
        else:
            torch.mm(flat, weight, out=target)
        return out

    def _packed_product(self, rows: Rows, matrix: Matrix, out: Tensor, add: bool) -> Tensor:
        count, kind = out.numel() // matrix.outputs, "int4 fp8" if rounds(rows, matrix) else matrix.kind
        config = self.gemm or choose_gemm(kind, count, matrix.outputs, matrix.inputs, _multiprocessors(out.device))
        if out.dtype == torch.float32:  # for checks only: needs twice the shared memory and no tensor cores
            config = GemmConfig(block_n=32, block_m=32, tail_m=0)
        block_n, block_m, split_k = (
            divisor(matrix.outputs, config.block_n), config.block_m + config.tail_m, config.split_k
        )  # fmt: skip
        to = out if split_k == 1 else out.new_empty(split_k, count, matrix.outputs, dtype=torch.float32)
        grid, common = (triton.cdiv(count, block_m), matrix.outputs // block_n, split_k), {
            "K": matrix.inputs, "ADD": add, "ASM": _use_asm(out), "FRAGMENTS": block_n // FRAGMENT_N,
            "BLOCK_M": config.block_m, "TAIL_M": config.tail_m, "SPLIT_K": split_k, "EVEN": count % block_m == 0,
            "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip
        groups = matrix.data.shape[1]
        limit = {} if config.max_registers is None else {"maxnreg": config.max_registers}
        if kind == "int4 fp8":
            quantized = rows if isinstance(rows, QuantizedRows) else _quantize(rows, matrix)
            lowbit.gemm_fp8_kernel[grid](
                *quantized, *_data(matrix), to, count, matrix.outputs,
                ROOM=max(16, triton.next_power_of_2(triton.cdiv(groups, split_k))), **common, **limit,
            )  # fmt: skip
        else:
            assert isinstance(rows, Tensor)
            lowbit.gemm_kernel[grid](
                rows.contiguous(), *_data(matrix), to, count, matrix.outputs, KIND=kind,
                K_GROUPS=divisor(groups, config.k_groups), PRECISION=_precision(out),
                WGMMA=out.dtype != torch.float32 and _has_wgmma(out.device), **common, **limit,
            )  # fmt: skip
        return to


def _empty_fp8(like: Tensor, matrix: Matrix) -> QuantizedRows:
    """Allocate FP8 rows of the shape of ``like``, in the form that a product with ``matrix`` takes."""
    rows, width, sums = like.numel() // like.shape[-1], like.shape[-1], None
    if matrix.packed:
        groups = matrix.data.shape[1]
        width, sums = groups * ALIGN_K, like.new_empty(rows, groups, dtype=torch.float32)
    scale = like.new_empty(rows, 1, dtype=torch.float32)
    return QuantizedRows(like.new_empty(rows, width, dtype=fp8.FP8), scale, sums)


def _quantize(rows: Tensor, matrix: Matrix) -> QuantizedRows:
    out, width = _empty_fp8(rows, matrix), rows.shape[-1]
    pointwise.quantize_kernel[(out.scale.shape[0],)](
        rows, *out, GROUPED=out.sums is not None, N=width, BLOCK=max(128, triton.next_power_of_2(width)),
        num_warps=8,
    )  # fmt: skip
    return out


def _fp8_product(rows: Rows, matrix: Matrix) -> ScaledProduct:
    assert matrix.scale is not None
    quantized = rows if isinstance(rows, QuantizedRows) else _quantize(rows, matrix)
    return ScaledProduct(fp8.product(quantized.values, matrix.data), quantized.scale, matrix.scale)


def _data(matrix: Matrix) -> tuple[Tensor, Tensor]:
    return matrix.data, matrix.data if matrix.scale is None else matrix.scale


def _prescaled(weights: DecoderWeights, stream: PrescaledResidual) -> tuple[Tensor, Tensor, float]:
    """Return the inputs that few-row kernels take instead of normed rows."""
    return stream.scaled, stream.squares, weights.shape.rms_norm_eps


def _block_m(matrix: Matrix, rows: Tensor) -> int:
    """Return the rows of a program: 1, or a power of two from 8 (the instruction's narrow side) to PACKED_ROWS."""
    padded = int(triton.next_power_of_2(rows.shape[0] * rows.shape[1]))
    return 1 if padded == 1 else min(PACKED_ROWS, max(8, padded))


def _grid(matrix: Matrix, rows: Tensor, programs: int) -> tuple[int, int]:
    # Programs that share a weight tile but not their rows run together: the tile is read from memory once.
    return triton.cdiv(rows.shape[0] * rows.shape[1], _block_m(matrix, rows)), programs


@cache
def _has_wgmma(device: torch.device) -> bool:
    """Return True on Hopper, where Triton uses ``wgmma``, which reads registers asynchronously."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _constants(matrix: Matrix, config: SkinnyConfig, rows: Tensor) -> dict[str, object]:
    return {
        "K": matrix.inputs,
        "KIND": matrix.kind,
        "MORE": rows.shape[0] * rows.shape[1] > _block_m(matrix, rows),
        "ASM": rows.is_cuda and rows.dtype != torch.float32,
        "GROUPS": min(config.warps, config.block_k // 16),
        "BLOCK_M": _block_m(matrix, rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PRECISION": _precision(rows),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": False,
    }


def _use_asm(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _precision(rows: Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"  # tf32 is Triton's default, unused for bfloat16
