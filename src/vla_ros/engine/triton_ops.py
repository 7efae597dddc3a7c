"""The operations of a decoder pass on a GPU: own kernels for few rows, the library's products for many."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional

from vla_ros.engine import launches as cuts
from vla_ros.engine.kernels import attention, linear, lowbit, pointwise
from vla_ros.engine.launches import PACKED_ROWS, SKINNY, AttentionLaunch, Launch, Tile, choose_tile, divisor
from vla_ros.engine.lowbit import UNIT
from vla_ros.engine.ops import Residual, attend
from vla_ros.engine.weights import DecoderWeights, Layer, Matrix


class TritonOps:
    """:class:`~vla_ros.engine.ops.Ops` in Triton.

    Args:
        launches: Takes the place of entries of :data:`~vla_ros.engine.launches.LAUNCHES`.
        fused_gemm: True multiplies many rows with quantised weights in one kernel that dequantises on its way;
            False dequantises each weight first.
        attention: How the attention of a few rows is cut.
        tile: How a fused product is cut; None chooses by :func:`~vla_ros.engine.launches.choose_tile`.
    """

    def __init__(
        self,
        launches: dict[tuple[str, str], Launch] | None = None,
        fused_gemm: bool = True,
        attention: AttentionLaunch | None = None,
        tile: Tile | None = None,
    ) -> None:
        self.launches = {**cuts.LAUNCHES, **(launches or {})}
        self.fused_gemm = fused_gemm
        self.attention = attention or cuts.ATTENTION
        self.tile = tile

    def pick(self, table: Tensor, index: Tensor, gain: Tensor) -> Residual:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        width = table.shape[1]
        if index.numel() > SKINNY:
            return Residual(functional.embedding(index, table), gain)
        hidden, scaled = table.new_empty(2, *index.shape, width)
        sums = table.new_empty(2, SKINNY, dtype=torch.float64)
        pointwise.pick_kernel[(index.numel(),)](
            table, index.contiguous(), hidden, gain, scaled, sums[0], sums[1], N=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return Residual(hidden, gain, scaled, sums[0], sums[1])

    def qkv(
        self,
        weights: DecoderWeights,
        layer: Layer,
        stream: Residual,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        hidden = stream.hidden
        shape, (batch, rows, _) = weights.shape, hidden.shape
        count, total_heads = batch * rows, shape.heads + 2 * shape.kv_heads
        sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD": shape.head_dim}
        cache = (positions, weights.cosine, weights.sine)
        if stream.scaled is not None:
            query = hidden.new_empty(batch, rows, shape.heads, shape.head_dim)
            matrix = layer.qkv
            launch = self._launch("qkv", matrix, hidden, 2)
            linear.qkv_kernel[_grid(matrix, hidden, matrix.outputs // 2 // launch.outputs)](
                *_unnormed(weights, stream), *_data(matrix), *cache, query, keys, values, count, rows,
                keys.shape[2], **sizes, **_constants(matrix, launch, hidden),
            )  # fmt: skip
            return query
        mixed = self._product(self._norm(weights, stream), layer.qkv)
        # Rows first: attention answers in the order of its queries, and that is what the next product takes.
        query = hidden.new_empty(batch, rows, shape.heads, shape.head_dim)
        pointwise.rotate_kernel[(count,)](
            mixed, *cache, query, keys, values, rows, keys.shape[2], **sizes,
            BLOCK_H=triton.next_power_of_2(total_heads), num_warps=8,
        )  # fmt: skip
        return query

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None,
        arrived: Tensor | None = None,
    ) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        if positions is None:
            return attend(query, keys, values, None)
        batch, rows, heads, head = query.shape
        out, launch = query.new_empty(batch, rows, heads * head), self.attention
        splits = 1 if arrived is None else launch.splits
        found = query.new_empty(splits * batch * rows * heads * (head + 2), dtype=torch.float32)
        attention.attend_kernel[(batch * heads * splits,)](
            query, keys, values, positions, out, found, arrived, rows, keys.shape[2], head**-0.5, SPLITS=splits,
            HEADS=heads, KV_HEADS=keys.shape[1], HEAD=head, BLOCK_R=max(16, triton.next_power_of_2(rows)),
            BLOCK_C=launch.columns, PRECISION=_precision(query), num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        return out

    def add_linear(self, stream: Residual, rows: Tensor, matrix: Matrix, gain: Tensor) -> Residual:
        """See :class:`~vla_ros.engine.ops.Ops`; changes the tensors of ``stream``."""
        if stream.scaled is None:
            return Residual(self._product(rows, matrix, stream.hidden), gain)
        role = "down" if matrix.inputs > matrix.outputs else "output"
        launch, rows = self._launch(role, matrix, rows, 1), rows.contiguous()
        linear.add_kernel[_grid(matrix, rows, matrix.outputs // launch.outputs)](
            rows, *_data(matrix), stream.hidden, gain, stream.scaled, stream.spent, stream.squares,
            rows.shape[0] * rows.shape[1], matrix.outputs, **_constants(matrix, launch, rows),
        )  # fmt: skip
        # The sums change places: what was spent is ready for the norm after the next.
        return Residual(stream.hidden, gain, stream.scaled, stream.spent, stream.squares)

    def gate_up(self, weights: DecoderWeights, layer: Layer, stream: Residual) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        hidden = stream.hidden
        batch, rows, _ = hidden.shape
        matrix, width = layer.gate_up, weights.shape.intermediate_size
        out = hidden.new_empty(batch, rows, width)
        if stream.scaled is not None:
            launch = self._launch("gate_up", matrix, hidden, 2)
            linear.gate_up_kernel[_grid(matrix, hidden, width // launch.outputs)](
                *_unnormed(weights, stream), *_data(matrix), out, batch * rows, width,
                **_constants(matrix, launch, hidden),
            )  # fmt: skip
            return out
        both = self._product(self._norm(weights, stream), matrix)
        block = min(2048, triton.next_power_of_2(width))
        pointwise.silu_multiply_kernel[(batch * rows, triton.cdiv(width, block))](both, out, width, BLOCK=block)
        return out

    def head(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        hidden, matrix = stream.hidden, weights.head
        batch, rows, _ = hidden.shape
        if stream.scaled is None:
            return self._product(self._norm(weights, stream), matrix).float()
        logits = hidden.new_empty(batch, rows, matrix.outputs, dtype=torch.float32)
        launch = self._launch("head", matrix, hidden, 1)
        linear.head_kernel[_grid(matrix, hidden, matrix.outputs // launch.outputs)](
            *_unnormed(weights, stream), *_data(matrix), logits, batch * rows, matrix.outputs,
            **_constants(matrix, launch, hidden),
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

    def _launch(self, role: str, matrix: Matrix, rows: Tensor, pairs: int) -> Launch:
        """The launch for a weight and ``rows`` [B, R, K]; ``pairs`` is 2 where outputs come in pairs."""
        item = matrix.nbytes / (matrix.outputs * matrix.inputs)
        block_m, shared = _block_m(matrix, rows), _shared_memory(rows.device)

        def step_bytes(launch: Launch, count: int = block_m) -> int:
            return int(launch.inputs * (pairs * launch.outputs * item + count * rows.element_size()))

        launch = self.launches[role, matrix.kind]
        if matrix.packed:
            if rows.dtype == torch.float32:  # for checks only: without matrix units, operands fill shared memory
                launch = Launch(outputs=16 // pairs, inputs=256, warps=4, stages=2)
            return launch.fit_packed(matrix.outputs // pairs, step_bytes, block_m, shared, 16 // pairs)
        return launch.fit(matrix.outputs // pairs, matrix.inputs, step_bytes, shared)

    def _norm(self, weights: DecoderWeights, stream: Residual) -> Tensor:
        hidden = stream.hidden
        out, width = torch.empty_like(hidden), hidden.shape[-1]
        pointwise.rms_norm_kernel[(hidden.numel() // width,)](
            hidden, stream.gain, out, weights.shape.rms_norm_eps, N=width, BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )  # fmt: skip
        return out

    def _product(self, rows: Tensor, matrix: Matrix, add: Tensor | None = None) -> Tensor:
        """``[add +] rows @ matrix.T`` for many rows, [B, R, N]."""
        batch, count, _ = rows.shape
        flat = rows.reshape(batch * count, -1).contiguous()
        tile = self._tile(flat, matrix) if matrix.packed and self.fused_gemm else None
        if tile is not None:
            out = add if add is not None else rows.new_empty(batch, count, matrix.outputs)
            self._fused(flat, matrix, out, tile, add is not None)
            return out
        weight = self._dequantize(matrix, rows.dtype) if matrix.packed else matrix.data
        if add is None:
            return functional.linear(flat, weight).view(batch, count, -1)
        target = add.view(batch * count, -1)
        torch.addmm(target, flat, weight.t(), out=target)  # the residual is added by the product itself
        return add

    def _tile(self, flat: Tensor, matrix: Matrix) -> Tile | None:
        if flat.dtype == torch.float32:  # for checks only: twice the shared memory, and no matrix units
            return Tile(outputs=32, rows=32, tail=0)
        if self.tile is not None:
            return self.tile
        return choose_tile(matrix.kind, flat.shape[0], matrix.outputs, matrix.inputs, _processors(flat.device))

    def _fused(self, flat: Tensor, matrix: Matrix, out: Tensor, tile: Tile, add: bool) -> None:
        count, block_n, splits = flat.shape[0], divisor(matrix.outputs, tile.outputs), tile.splits
        limit = {} if tile.registers is None else {"maxnreg": tile.registers}
        to = out if splits == 1 else out.new_empty(splits, count, matrix.outputs, dtype=torch.float32)
        lowbit.gemm_kernel[(triton.cdiv(count, tile.rows + tile.tail), matrix.outputs // block_n, splits)](
            flat, *_data(matrix), to, count, matrix.outputs, K=matrix.inputs, KIND=matrix.kind, ADD=add,
            ASM=_use_asm(flat), UNITS=block_n // UNIT, PARTS=divisor(matrix.data.shape[1], tile.parts),
            BLOCK_M=tile.rows, TAIL=tile.tail, SPLITS=splits, EVEN=count % (tile.rows + tile.tail) == 0,
            WGMMA=flat.dtype != torch.float32 and _has_wgmma(flat.device), PRECISION=_precision(flat),
            num_warps=tile.warps, num_stages=tile.stages, **limit,
        )  # fmt: skip
        if splits > 1:
            lowbit.sum_kernel[(triton.cdiv(count * matrix.outputs, 1024),)](
                to, _data(matrix)[1], out, count, matrix.outputs, KIND=matrix.kind, ADD=add, SPLITS=splits,
                BLOCK=1024,
            )  # fmt: skip

    def _dequantize(self, matrix: Matrix, dtype: torch.dtype) -> Tensor:
        out = torch.empty(matrix.outputs, matrix.inputs, dtype=dtype, device=matrix.data.device)
        units = divisor(matrix.outputs // UNIT, 4)
        lowbit.dequantize_kernel[(matrix.outputs // UNIT // units, matrix.data.shape[1])](
            *_data(matrix), out, K=matrix.inputs, KIND=matrix.kind, ASM=_use_asm(out), UNITS=units
        )
        return out


def _data(matrix: Matrix) -> tuple[Tensor, Tensor]:
    return matrix.data, matrix.data if matrix.scale is None else matrix.scale


def _unnormed(weights: DecoderWeights, stream: Residual) -> tuple[Tensor | None, Tensor | None, float]:
    """What a kernel of few rows takes instead of normed rows."""
    return stream.scaled, stream.squares, weights.shape.rms_norm_eps


def _block_m(matrix: Matrix, rows: Tensor) -> int:
    """Rows of a program, padded to what a matrix instruction takes: its wide side, or narrow for packed weights."""
    padded = int(triton.next_power_of_2(rows.shape[0] * rows.shape[1]))
    return min(PACKED_ROWS, max(8, padded)) if matrix.packed else max(16, padded)


def _grid(matrix: Matrix, rows: Tensor, programs: int) -> tuple[int, int]:
    # Programs of one weight and different rows run together: it is read from memory once.
    return triton.cdiv(rows.shape[0] * rows.shape[1], _block_m(matrix, rows)), programs


@cache
def _has_wgmma(device: torch.device) -> bool:
    """Whether Triton multiplies many rows by instructions that read registers while the program goes on: Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: 227 KiB on Hopper, 99 KiB on an RTX 4090; some are kept for reductions."""
    if device.type != "cuda":
        return 200 * 1024
    properties = torch.cuda.get_device_properties(device)
    available: int = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    return available - 4096


def _constants(matrix: Matrix, launch: Launch, rows: Tensor) -> dict[str, object]:
    return {
        "K": matrix.inputs,
        "KIND": matrix.kind,
        "MORE": rows.shape[0] * rows.shape[1] > _block_m(matrix, rows),
        "ASM": _use_asm(rows),
        "BLOCK_M": _block_m(matrix, rows),
        "BLOCK_N": launch.outputs,
        "BLOCK_K": launch.inputs,
        "PRECISION": _precision(rows),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _use_asm(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _precision(rows: Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"  # tf32 is Triton's default, unused for bfloat16
