"""The operations of a decoder pass on a GPU: own kernels for few rows, the library's products for many."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.nn import functional

from vla_ros.engine.kernels import attention, linear, pointwise, quantized
from vla_ros.engine.ops import attend
from vla_ros.engine.weights import DecoderWeights, Layer, Matrix

SKINNY = 64
"""Up to this many rows a product is bound by its weight, and the kernels of ``linear`` are used."""


@dataclass(frozen=True)
class Launch:
    """How a kernel of ``linear`` is cut and pipelined.

    Attributes:
        outputs: Outputs per program (pairs for ``qkv`` and ``gate_up``).
        inputs: Inputs per step; int4 always takes two groups.
        warps: Warps per program.
        stages: Steps whose loads are in flight.
    """

    outputs: int = 16
    inputs: int = 256
    warps: int = 4
    stages: int = 4

    def fit(self, outputs: int, inputs: int) -> Launch:
        """The nearest smaller blocks that divide a weight [outputs, inputs] without remainder."""
        return replace(self, outputs=_divisor(outputs, self.outputs), inputs=_divisor(inputs, self.inputs))


LAUNCHES: dict[tuple[str, str], Launch] = {
    ("qkv", "dense"): Launch(8, 256, 4, 4),
    ("add", "dense"): Launch(16, 256, 4, 5),
    ("gate_up", "dense"): Launch(8, 256, 4, 4),
    ("head", "dense"): Launch(16, 256, 4, 4),
    ("qkv", "int8"): Launch(8, 256, 4, 5),
    ("add", "int8"): Launch(16, 256, 4, 5),
    ("gate_up", "int8"): Launch(8, 256, 4, 5),
    ("qkv", "int4"): Launch(16, 256, 4, 4),
    ("add", "int4"): Launch(16, 256, 4, 5),
    ("gate_up", "int4"): Launch(16, 256, 4, 4),
}
"""By role and kind of weight. Chosen by count of bytes in flight; ``benchmarks/gpu_session.py`` measures others."""


class TritonOps:
    """:class:`~vla_ros.engine.ops.Ops` in Triton.

    Args:
        launches: Takes the place of entries of :data:`LAUNCHES`.
        fused_gemm: True multiplies many rows with quantised weights in one kernel that dequantises on its way;
            False dequantises each weight first.
    """

    def __init__(self, launches: dict[tuple[str, str], Launch] | None = None, fused_gemm: bool = True) -> None:
        self.launches = {**LAUNCHES, **(launches or {})}
        self.fused_gemm = fused_gemm

    def qkv(
        self, weights: DecoderWeights, layer: Layer, hidden: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        shape, (batch, rows, _) = weights.shape, hidden.shape
        count, total_heads = batch * rows, shape.heads + 2 * shape.kv_heads
        sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD": shape.head_dim}
        cache = (positions, weights.cosine, weights.sine)
        if count <= SKINNY:
            query = hidden.new_empty(batch, rows, shape.heads, shape.head_dim)
            matrix = layer.qkv
            launch = self._launch("qkv", matrix, total_heads * shape.head_dim // 2)
            linear.qkv_kernel[(matrix.outputs // 2 // launch.outputs,)](
                hidden, layer.attention_norm, *_data(matrix), *cache, query, keys, values, count,
                shape.rms_norm_eps, rows, keys.shape[2], **sizes, **_constants(matrix, launch, hidden),
            )  # fmt: skip
            return query
        mixed = self._product(self._norm(weights, hidden, layer.attention_norm), layer.qkv)
        # Laid out as attention wants it, [B, heads, R, head_dim]; returned with rows first.
        query = hidden.new_empty(batch, shape.heads, rows, shape.head_dim)
        pointwise.rotate_kernel[(count,)](
            mixed, *cache, query, keys, values, rows, keys.shape[2], **sizes,
            BLOCK_H=triton.next_power_of_2(total_heads), num_warps=8,
        )  # fmt: skip
        return query.transpose(1, 2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor | None) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        if positions is None:
            return attend(query, keys, values, None)
        batch, rows, heads, head = query.shape
        out = query.new_empty(batch, rows, heads * head)
        attention.attend_kernel[(batch * heads,)](
            query, keys, values, positions, out, rows, keys.shape[2], head**-0.5,
            HEADS=heads, KV_HEADS=keys.shape[1], HEAD=head, BLOCK_R=max(16, triton.next_power_of_2(rows)),
            BLOCK_C=64, PRECISION=_precision(query), num_warps=4, num_stages=3,
        )  # fmt: skip
        return out

    def add_linear(self, hidden: Tensor, rows: Tensor, matrix: Matrix) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`; changes ``hidden``."""
        count = rows.shape[0] * rows.shape[1]
        if count > SKINNY:
            return self._product(rows, matrix, hidden)
        self._skinny("add", matrix, rows, None, hidden, 0.0)
        return hidden

    def gate_up(self, weights: DecoderWeights, layer: Layer, hidden: Tensor) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        batch, rows, _ = hidden.shape
        matrix, width = layer.gate_up, weights.shape.intermediate_size
        out = hidden.new_empty(batch, rows, width)
        if batch * rows <= SKINNY:
            launch = self._launch("gate_up", matrix, width)
            linear.gate_up_kernel[(width // launch.outputs,)](
                hidden, layer.mlp_norm, *_data(matrix), out, batch * rows, width, weights.shape.rms_norm_eps,
                **_constants(matrix, launch, hidden),
            )  # fmt: skip
            return out
        both = self._product(self._norm(weights, hidden, layer.mlp_norm), matrix)
        block = min(2048, triton.next_power_of_2(width))
        pointwise.silu_multiply_kernel[(batch * rows, triton.cdiv(width, block))](both, out, width, BLOCK=block)
        return out

    def head(self, weights: DecoderWeights, hidden: Tensor) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        batch, rows, _ = hidden.shape
        if batch * rows > SKINNY:
            return self._product(self._norm(weights, hidden, weights.norm), weights.head).float()
        logits = hidden.new_empty(batch, rows, weights.head.outputs, dtype=torch.float32)
        self._skinny("head", weights.head, hidden, weights.norm, logits, weights.shape.rms_norm_eps)
        return logits

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        batch, rows, vocabulary = logits.shape
        tokens = torch.empty(batch, rows, dtype=torch.int64, device=logits.device)
        margins = torch.empty(batch, rows, dtype=torch.float32, device=logits.device)
        block = min(4096, triton.next_power_of_2(vocabulary))
        attention.choose_kernel[(batch * rows,)](logits, tokens, margins, vocabulary, BLOCK=block, num_warps=8)
        return tokens, margins

    def _skinny(
        self, role: str, matrix: Matrix, rows: Tensor, gain: Tensor | None, out: Tensor, eps: float
    ) -> None:
        launch, rows = self._launch(role, matrix, matrix.outputs), rows.contiguous()
        linear.linear_kernel[(matrix.outputs // launch.outputs,)](
            rows, rows if gain is None else gain, *_data(matrix), out, rows.shape[0] * rows.shape[1],
            matrix.outputs, eps, NORM=gain is not None, ADD=role == "add", **_constants(matrix, launch, rows),
        )  # fmt: skip

    def _launch(self, role: str, matrix: Matrix, outputs: int) -> Launch:
        return self.launches[role, matrix.kind].fit(outputs, matrix.inputs)

    def _norm(self, weights: DecoderWeights, hidden: Tensor, gain: Tensor) -> Tensor:
        out, width = torch.empty_like(hidden), hidden.shape[-1]
        pointwise.rms_norm_kernel[(hidden.numel() // width,)](
            hidden, gain, out, weights.shape.rms_norm_eps, N=width, BLOCK=triton.next_power_of_2(width), num_warps=8
        )
        return out

    def _product(self, rows: Tensor, matrix: Matrix, add: Tensor | None = None) -> Tensor:
        """``[add +] rows @ matrix.T`` for many rows, [B, R, N]."""
        batch, count, _ = rows.shape
        flat = rows.reshape(batch * count, -1).contiguous()
        if matrix.kind != "dense" and self.fused_gemm:
            out = add if add is not None else rows.new_empty(batch, count, matrix.outputs)
            self._fused(flat, matrix, out, add is not None)
            return out
        weight = matrix.data if matrix.kind == "dense" else self._dequantize(matrix, rows.dtype)
        if add is None:
            return functional.linear(flat, weight).view(batch, count, -1)
        target = add.view(batch * count, -1)
        torch.addmm(target, flat, weight.t(), out=target)  # the residual is added by the product itself
        return add

    def _fused(self, flat: Tensor, matrix: Matrix, out: Tensor, add: bool) -> None:
        block_n, block_m = _divisor(matrix.outputs, 128), 16 if flat.shape[0] <= 16 else 128
        quantized.gemm_kernel[(triton.cdiv(flat.shape[0], block_m), matrix.outputs // block_n)](
            flat, *_data(matrix), out, flat.shape[0], matrix.outputs, K=matrix.inputs, GROUP=matrix.group or 1,
            KIND=matrix.kind, ADD=add, ASM=_use_asm(flat), BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=_divisor(matrix.inputs, 64), PRECISION=_precision(flat), num_warps=8,
            num_stages=2 if matrix.kind == "int4" else 3,
        )  # fmt: skip

    def _dequantize(self, matrix: Matrix, dtype: torch.dtype) -> Tensor:
        out = torch.empty(matrix.outputs, matrix.inputs, dtype=dtype, device=matrix.data.device)
        step = 2 * matrix.group or _divisor(matrix.inputs, 256)
        block = _divisor(matrix.outputs, 16)
        quantized.dequantize_kernel[(matrix.outputs // block, matrix.inputs // step)](
            *_data(matrix), out, K=matrix.inputs, GROUP=matrix.group or 1, KIND=matrix.kind, ASM=_use_asm(out),
            BLOCK_N=block, BLOCK_K=step,
        )  # fmt: skip
        return out


def _data(matrix: Matrix) -> tuple[Tensor, Tensor, Tensor, int]:
    scale = matrix.data if matrix.scale is None else matrix.scale
    return matrix.data, scale, scale if matrix.zero is None else matrix.zero, matrix.outputs


def _constants(matrix: Matrix, launch: Launch, rows: Tensor) -> dict[str, object]:
    count = rows.shape[0] * rows.shape[1]
    return {
        "K": matrix.inputs,
        "GROUP": matrix.group or 1,
        "KIND": matrix.kind,
        "ASM": _use_asm(rows),
        "BLOCK_M": max(16, triton.next_power_of_2(count)),
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


def _divisor(number: int, most: int) -> int:
    """Largest power of two that divides ``number`` and is at most ``most``."""
    return min(most, number & -number)
