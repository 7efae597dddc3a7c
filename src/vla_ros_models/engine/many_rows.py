"""Many rows on a GPU: products by the library or with packed weights, and one kernel between two products."""

import torch
import triton
from torch import Tensor

from vla_ros_models.engine import fp8
from vla_ros_models.engine.kernels import lowbit, pointwise, shards
from vla_ros_models.engine.lowbit import ALIGN_K, FRAGMENT_N
from vla_ros_models.engine.ops import project, rounds
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.stream import KVCache, Positions, QuantizedRows, Rows, ScaledProduct, Stream
from vla_ros_models.engine.tile_configs import (
    MeasuredTile,
    Work,
    choose_tile,
    gpu_of,
    interpreted,
    precision,
    uses_wgmma,
)
from vla_ros_models.engine.weights import DecoderWeights, Matrix


class ManyRows:
    """The operations of many rows.

    Norms of kind ``rms`` are computed by the operation that reads the stream; a product that is added to it may
    wait for that operation, which then applies its scales. Those of kind ``rms_float32`` are computed by the
    operation that writes the stream.
    """

    def __init__(self, measured: MeasuredTile, ranks: Ranks | None = None) -> None:
        self._measured, self._ranks = measured, ranks

    def qkv(
        self,
        weights: DecoderWeights,
        index: int,
        stream: Stream,
        positions: Positions,
        cache: KVCache,
        query: Tensor,
    ) -> None:
        matrix = weights.layers[index].qkv
        product = self._normed_product(weights, stream, matrix)
        rotate(product, matrix, positions, cache, index, query)

    def gate_up(self, weights: DecoderWeights, index: int, stream: Stream) -> Rows:
        """Norm, project to gate and up, and activate; FP8 if the next product takes that."""
        layer = weights.layers[index]
        assert layer.gate_up is not None
        assert layer.down_proj is not None
        both = self._normed_product(weights, stream, layer.gate_up)
        if weights.shape.activation == "silu":
            return multiply_silu(both, layer.gate_up, stream.hidden, layer.down_proj)
        rows, out = room(stream.hidden, layer.down_proj)
        width, quantized = layer.down_proj.inputs, rows is out
        block = triton.next_power_of_2(width) if quantized else min(2048, triton.next_power_of_2(width))
        warps = {"num_warps": 16} if quantized else {}
        pointwise.gelu_multiply_kernel[(both.values.numel() // (2 * width), triton.cdiv(width, block))](
            both.values, *out[:2], width, QUANTIZE=quantized, BLOCK=block, **warps
        )
        return rows

    def add(
        self, weights: DecoderWeights, stream: Stream, rows: Rows, matrix: Matrix, positions: Positions
    ) -> Stream:
        """Add a product to the stream; changes ``stream.hidden``."""
        norm = stream.norm + 1
        if weights.shape.norm != "rms":
            return self.add_norm(weights, stream.hidden, project(rows, matrix), norm, positions)
        if self._ranks is not None:  # added by the next norm's kernel
            total = torch.empty_like(stream.hidden)
            self._multiply_shard(rows, matrix, total)
            self._ranks.sum(total)
            return Stream(stream.hidden, norm, ScaledProduct(total, None, None))
        if matrix.kind == "fp8":  # scaled and added by the next norm's kernel
            return Stream(stream.hidden, norm, _fp8_product(rows, matrix))
        sums = self._product(rows, matrix, stream.hidden, add=True)
        if sums is stream.hidden:
            return Stream(sums, norm)
        return Stream(
            stream.hidden, norm, ScaledProduct(sums, None, matrix.scale if matrix.kind == "int8" else None)
        )

    def add_norm(
        self, weights: DecoderWeights, hidden: Tensor, branch: Tensor | None, norm: int, positions: Positions
    ) -> Stream:
        """Add ``branch``, times its gate, to ``hidden``, and compute a norm of kind ``rms_float32``."""
        width, layer = hidden.shape[-1], weights.layers[min(norm // 2, len(weights.layers) - 1)]
        following, table = layer.gate_up if norm % 2 else layer.qkv, weights.norms[norm]
        quantize = following is not None and following.kind == "fp8_rows" and norm < 2 * len(weights.layers)
        out = _empty_fp8(hidden, following) if quantize and following is not None else torch.empty_like(hidden)
        pointwise.add_norm_kernel[(hidden.numel() // width,)](
            hidden, hidden if branch is None else branch, table[0], positions.time,
            *(out[:2] if isinstance(out, QuantizedRows) else (out, out)), weights.shape.rms_norm_eps,
            TIME=table.stride(0), ADAPTIVE=table.shape[1] == 3, BRANCH=branch is not None, QUANTIZE=quantize,
            N=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return Stream(hidden, norm, normed=out)

    def norm(self, weights: DecoderWeights, stream: Stream) -> Tensor:
        if isinstance(stream.normed, Tensor):
            return stream.normed
        out = torch.empty_like(stream.hidden)
        normalize(weights, stream, QuantizedRows(out, out))
        return out

    def _multiply_shard(self, rows: Rows, matrix: Matrix, out: Tensor) -> None:
        """Write a rank's part of a product to ``out`` [B, R, N]."""
        if matrix.kind != "fp8":
            self._product(rows, matrix, out)
            return
        width = matrix.outputs
        grid = (out.numel() // width, triton.cdiv(width, 2048))
        shards.scale_kernel[grid](*_fp8_product(rows, matrix), out, N=width, BLOCK=2048)

    def _normed_product(self, weights: DecoderWeights, stream: Stream, matrix: Matrix) -> ScaledProduct:
        """Normalise rows and multiply them by ``matrix``; the scales are valid only for ``fp8`` weights."""
        if stream.normed is not None:
            return ScaledProduct(project(stream.normed, matrix), None, None)
        hidden = stream.hidden
        rows, normed = room(hidden, matrix)
        normalize(weights, stream, normed)
        if matrix.kind == "fp8":
            return _fp8_product(rows, matrix)
        out = hidden.new_empty(*hidden.shape[:2], matrix.outputs)
        self._product(rows, matrix, out)
        return ScaledProduct(out, out, out)

    def _product(self, rows: Rows, matrix: Matrix, out: Tensor, *, add: bool = False) -> Tensor:
        """Compute ``out [B, R, N] = [out +] rows @ matrix.T`` for many rows and a dense or packed weight.

        Returns ``out``, or, if programs split the inputs of a packed weight to add it, the programs' partial sums,
        float32 [programs, B * R, N], without int8's scales.
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
        each = matrix.nbytes / (matrix.outputs * matrix.inputs)
        work = Work("gemm", matrix.inputs, matrix.outputs, "", kind, count, each, out.element_size())
        config = choose_tile(gpu_of(out.device), work, self._measured)
        block_n, block_m = config.block_n, config.block_m + config.tail_m
        split_k = config.splits if add else 1  # only a norm, which follows an addition, sums up partial sums
        to = out if split_k == 1 else out.new_empty(split_k, count, matrix.outputs, dtype=torch.float32)
        grid, common = (triton.cdiv(count, block_m), matrix.outputs // block_n, split_k), {
            "K": matrix.inputs, "ADD": add, "ASM": not interpreted(out) and out.dtype == torch.bfloat16,
            "FRAGMENTS": block_n // FRAGMENT_N,
            "BLOCK_M": config.block_m, "TAIL_M": config.tail_m, "SPLIT_K": split_k, "EVEN": count % block_m == 0,
            "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip
        groups = matrix.data.shape[1]
        limit = {} if config.max_registers is None else {"maxnreg": config.max_registers}
        if kind == "int4 fp8":
            quantized = rows if isinstance(rows, QuantizedRows) else _quantize(rows, matrix)
            lowbit.gemm_fp8_kernel[grid](
                *quantized, *matrix.operands, to, count, matrix.outputs,
                ROOM=max(16, triton.next_power_of_2(triton.cdiv(groups, split_k))), **common, **limit,
            )  # fmt: skip
        else:
            assert isinstance(rows, Tensor)
            lowbit.gemm_kernel[grid](
                rows.contiguous(), *matrix.operands, to, count, matrix.outputs, KIND=kind,
                K_GROUPS=config.k_groups, PRECISION=precision(out),
                WGMMA=out.dtype != torch.float32 and uses_wgmma(out.device), **common, **limit,
            )  # fmt: skip
        return to


def normalize(weights: DecoderWeights, stream: Stream, out: QuantizedRows) -> None:
    """Add the stream's branch, and write its norm of kind ``rms`` to ``out`` from :func:`room`."""
    hidden, width, branch = stream.hidden, stream.hidden.shape[-1], stream.branch
    pointwise.rms_norm_kernel[(hidden.numel() // width,)](
        hidden, *(branch or (None, None, None)), weights.norms[stream.norm], *out, weights.shape.rms_norm_eps,
        PARTS=0 if branch is None else branch.values.numel() // hidden.numel(),
        FP8=out.values.dtype == fp8.FP8, GROUPED=out.sums is not None, N=width,
        BLOCK=max(128, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip


def rotate(
    product: ScaledProduct, matrix: Matrix, positions: Positions, cache: KVCache, index: int, query: Tensor,
    norms: tuple[Tensor | None, Tensor | None] = (None, None), eps: float = 0.0, by_row: bool = False,
) -> None:  # fmt: skip
    """Apply rotary position embeddings to the product with ``matrix``, the ``qkv`` of layer ``index``.

    Writes the queries to ``query`` [B, R, heads, head_dim], keys and values (not rotated) to the layer's cache.

    ``norms`` are the weights of RMS norms of each head of queries and keys. With ``by_row``, ``positions`` hold
    cosine and sine of the rows, otherwise the whole tables.
    """
    (batch, rows, heads, head), keys = query.shape, cache.keys[index]
    total = matrix.outputs // head
    block_h = min(32, triton.next_power_of_2(total))
    pointwise.rotate_kernel[(batch * rows, triton.cdiv(total, block_h))](
        product.values, positions.at, positions.cosine.contiguous(), positions.sine.contiguous(), query, keys,
        cache.values[index], rows, keys.shape[2], HEADS=heads, KV_HEADS=(total - heads) // 2, HEAD=head,
        BLOCK_H=block_h, row_scale=product.rows, column_scale=product.columns, SCALED=matrix.kind == "fp8",
        query_norm=norms[0], key_norm=norms[1], eps=eps, BY_ROW=by_row, num_warps=max(4, head // 32),
    )  # fmt: skip


def multiply_silu(both: ScaledProduct, matrix: Matrix, like: Tensor, following: Matrix) -> Rows:
    """Activate the product with ``matrix``, gate and up; return it as a product with ``following`` takes it."""
    (rows, out), width = room(like, following), following.inputs
    quantized, block = rows is out, min(2048, max(128, triton.next_power_of_2(width)))
    programs = 1 if quantized else triton.cdiv(width, block)
    pointwise.silu_multiply_kernel[(both.values.numel() // (2 * width), programs)](
        *both, *out, width, SCALED=matrix.kind == "fp8", FP8=quantized, GROUPED=out.sums is not None, BLOCK=block,
        num_warps=8 if quantized else 4,
    )  # fmt: skip
    return rows


def room(like: Tensor, matrix: Matrix) -> tuple[Rows, QuantizedRows]:
    """Allocate as many rows as ``like`` has for a product with ``matrix``.

    Returns them, and the same as arguments of kernels: for rows that are not quantised, any tensor stands for the
    scales.
    """
    if rounds(like, matrix):
        quantized = _empty_fp8(like, matrix)
        return quantized, quantized
    out = like.new_empty(*like.shape[:-1], matrix.inputs)
    return out, QuantizedRows(out, out)


def _empty_fp8(like: Tensor, matrix: Matrix) -> QuantizedRows:
    """Allocate as many FP8 rows as ``like`` has, in the form that a product with ``matrix`` takes."""
    rows, width, sums = like.numel() // like.shape[-1], matrix.inputs, None
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
