"""The operations of a decoder pass on a GPU: own kernels for few rows, the library's products for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

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

    def fit(self, outputs: int, inputs: int, step_bytes: Callable[[Launch], int], shared: int) -> Launch:
        """The nearest launch that divides a weight [outputs, inputs] and whose loads in flight find room.

        Fewer steps in flight, then shorter ones; neither changes the order in which products are added up.

        Args:
            outputs: Of the weight, pairs for ``qkv`` and ``gate_up``.
            inputs: Of the weight.
            step_bytes: What one step loads.
            shared: Bytes of shared memory that a program may have.
        """
        fitting = replace(self, outputs=_divisor(outputs, self.outputs), inputs=_divisor(inputs, self.inputs))
        while (fitting.stages - 1) * step_bytes(fitting) > shared and fitting.stages > 2:
            fitting = replace(fitting, stages=fitting.stages - 1)
        while step_bytes(fitting) > shared and fitting.inputs > 32:
            fitting = replace(fitting, inputs=fitting.inputs // 2)
        return fitting


LAUNCHES: dict[tuple[str, str], Launch] = {
    ("qkv", "dense"): Launch(8, 256, 1, 3),
    ("add", "dense"): Launch(32, 256, 2, 6),
    ("gate_up", "dense"): Launch(32, 128, 2, 4),
    ("head", "dense"): Launch(16, 256, 1, 4),
    ("qkv", "int8"): Launch(16, 512, 4, 3),
    ("add", "int8"): Launch(32, 256, 4, 4),
    ("gate_up", "int8"): Launch(32, 256, 4, 4),
    ("qkv", "int4"): Launch(16, 256, 4, 6),
    ("add", "int4"): Launch(32, 256, 4, 4),
    ("gate_up", "int4"): Launch(16, 256, 2, 4),
}
"""By role and kind of weight, as ``benchmarks/gpu_session.py`` found them on an H200."""


@dataclass(frozen=True)
class AttentionLaunch:
    """How the attention of a few rows is cut.

    Attributes:
        columns: Positions per step.
        warps: Warps per program.
        stages: Steps whose loads are in flight.
    """

    columns: int = 64
    warps: int = 4
    stages: int = 3


ATTENTION = AttentionLaunch()
"""Likewise."""


class TritonOps:
    """:class:`~vla_ros.engine.ops.Ops` in Triton.

    Args:
        launches: Takes the place of entries of :data:`LAUNCHES`.
        fused_gemm: True multiplies many rows with quantised weights in one kernel that dequantises on its way;
            False dequantises each weight first.
        attention: How the attention of a few rows is cut.
    """

    def __init__(
        self,
        launches: dict[tuple[str, str], Launch] | None = None,
        fused_gemm: bool = True,
        attention: AttentionLaunch | None = None,
    ) -> None:
        self.launches = {**LAUNCHES, **(launches or {})}
        self.fused_gemm = fused_gemm
        self.attention = attention or ATTENTION

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
            launch = self._launch("qkv", matrix, hidden, 2)
            normed = self._norm(weights, hidden, layer.attention_norm)
            linear.qkv_kernel[(matrix.outputs // 2 // launch.outputs,)](
                normed, *_data(matrix), *cache, query, keys, values, count, rows, keys.shape[2], **sizes,
                **_constants(matrix, launch, hidden),
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
        out, launch = query.new_empty(batch, rows, heads * head), self.attention
        attention.attend_kernel[(batch * heads,)](
            query, keys, values, positions, out, rows, keys.shape[2], head**-0.5,
            HEADS=heads, KV_HEADS=keys.shape[1], HEAD=head, BLOCK_R=max(16, triton.next_power_of_2(rows)),
            BLOCK_C=launch.columns, PRECISION=_precision(query), num_warps=launch.warps,
            num_stages=launch.stages,
        )  # fmt: skip
        return out

    def add_linear(self, hidden: Tensor, rows: Tensor, matrix: Matrix) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`; changes ``hidden``."""
        count = rows.shape[0] * rows.shape[1]
        if count > SKINNY:
            return self._product(rows, matrix, hidden)
        self._skinny("add", matrix, rows, hidden)
        return hidden

    def gate_up(self, weights: DecoderWeights, layer: Layer, hidden: Tensor) -> Tensor:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        batch, rows, _ = hidden.shape
        matrix, width = layer.gate_up, weights.shape.intermediate_size
        out = hidden.new_empty(batch, rows, width)
        if batch * rows <= SKINNY:
            launch = self._launch("gate_up", matrix, hidden, 2)
            linear.gate_up_kernel[(width // launch.outputs,)](
                self._norm(weights, hidden, layer.mlp_norm), *_data(matrix), out, batch * rows, width,
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
        normed = self._norm(weights, hidden, weights.norm)
        if batch * rows > SKINNY:
            return self._product(normed, weights.head).float()
        logits = hidden.new_empty(batch, rows, weights.head.outputs, dtype=torch.float32)
        self._skinny("head", weights.head, normed, logits)
        return logits

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~vla_ros.engine.ops.Ops`."""
        batch, rows, vocabulary = logits.shape
        tokens = torch.empty(batch, rows, dtype=torch.int64, device=logits.device)
        margins = torch.empty(batch, rows, dtype=torch.float32, device=logits.device)
        block = min(4096, triton.next_power_of_2(vocabulary))
        attention.choose_kernel[(batch * rows,)](logits, tokens, margins, vocabulary, BLOCK=block, num_warps=8)
        return tokens, margins

    def _skinny(self, role: str, matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        launch, rows = self._launch(role, matrix, rows, 1), rows.contiguous()
        linear.linear_kernel[(matrix.outputs // launch.outputs,)](
            rows, *_data(matrix), out, rows.shape[0] * rows.shape[1], matrix.outputs, ADD=role == "add",
            **_constants(matrix, launch, rows),
        )  # fmt: skip

    def _launch(self, role: str, matrix: Matrix, rows: Tensor, pairs: int) -> Launch:
        """The launch for a weight and ``rows`` [B, R, K]; ``pairs`` is 2 where outputs come in pairs."""
        item = matrix.nbytes / (matrix.outputs * matrix.inputs)

        def step_bytes(launch: Launch) -> int:
            return int(launch.inputs * (pairs * launch.outputs * item + _block_m(rows) * rows.element_size()))

        launch = self.launches[role, matrix.kind]
        return launch.fit(matrix.outputs // pairs, matrix.inputs, step_bytes, _shared_memory(rows.device))

    def _norm(self, weights: DecoderWeights, hidden: Tensor, gain: Tensor) -> Tensor:
        out, width = torch.empty_like(hidden), hidden.shape[-1]
        pointwise.rms_norm_kernel[(hidden.numel() // width,)](
            hidden, gain, out, weights.shape.rms_norm_eps, N=width, BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )  # fmt: skip
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
        # float32, for checks only, needs twice the shared memory per element and has no matrix units.
        most = 32 if flat.dtype == torch.float32 else 128 if _shared_memory(flat.device) > 150_000 else 64
        block_n, block_m = _divisor(matrix.outputs, most), 16 if flat.shape[0] <= 16 else most
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


def _block_m(rows: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(rows.shape[0] * rows.shape[1])))


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
        "GROUP": matrix.group or 1,
        "KIND": matrix.kind,
        "ASM": _use_asm(rows),
        "BLOCK_M": _block_m(rows),
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
