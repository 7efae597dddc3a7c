"""Quantised weights against many rows: a matrix product that dequantises on the way, and plain dequantisation."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from vla_ros.engine.kernels.linear import load_group, unpack_int4


@triton.jit
def times(number, scale, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Whole numbers below 16 times their float32 ``scale``, which holds a bfloat16: one rounding either way."""
    if ASM:
        return number * scale.to(DTYPE)
    else:
        return (number.to(tl.float32) * scale).to(DTYPE)


@triton.jit
def dequantize_kernel(
    weight, scale, zero, width, out, K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[N, K] in the type of ``out``; a program makes BLOCK_N rows of BLOCK_K (int8) or 2 * GROUP (int4) weights."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND == "int4":
        lane = tl.arange(0, GROUP)
        packed = tl.load(weight + rows[:, None] * (K // 2) + tl.program_id(1) * GROUP + lane[None, :])
        low, high = unpack_int4(packed, out.dtype.element_ty, ASM)
        kind = out.dtype.element_ty
        scale_low, zero_low = load_group(scale, zero, 2 * tl.program_id(1), width, rows, kind)
        scale_high, zero_high = load_group(scale, zero, 2 * tl.program_id(1) + 1, width, rows, kind)
        at = out + rows[:, None].to(tl.int64) * K + tl.program_id(1) * 2 * GROUP + lane[None, :]
        tl.store(at, times(low - zero_low[:, None], scale_low[:, None], kind, ASM))
        tl.store(at + GROUP, times(high - zero_high[:, None], scale_high[:, None], kind, ASM))
    else:
        columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
        at = rows[:, None].to(tl.int64) * K + columns[None, :]
        value = tl.load(weight + at).to(tl.float32) * tl.load(scale + rows)[:, None]
        tl.store(out + at, value.to(out.dtype.element_ty))


@triton.jit
def gemm_kernel(
    x, weight, scale, zero, width, out, M, N, K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ADD: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = [out +] x [M, K] @ weight.T``, the weight dequantised block by block on its way.

    The weight is the left operand: on Hopper it may come from registers, where dequantisation leaves it.
    """
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)  # programs of one weight block run together: one read
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if KIND == "int4":
        for block in range(0, K // (2 * GROUP)):
            lane = tl.arange(0, GROUP)
            packed = tl.load(weight + outputs[:, None] * (K // 2) + block * GROUP + lane[None, :])
            low, high = unpack_int4(packed, x.dtype.element_ty, ASM)
            kind = x.dtype.element_ty
            scale_low, zero_low = load_group(scale, zero, 2 * block, width, outputs, kind)
            scale_high, zero_high = load_group(scale, zero, 2 * block + 1, width, outputs, kind)
            at = x + rows[None, :] * K + block * 2 * GROUP + lane[:, None]
            x_low = tl.load(at, mask=inside, other=0.0)  # [GROUP, BLOCK_M]
            x_high = tl.load(at + GROUP, mask=inside, other=0.0)
            # Dequantised to the type of x before the product: that is what a dense weight would hold.
            low = times(low - zero_low[:, None], scale_low[:, None], kind, ASM)
            high = times(high - zero_high[:, None], scale_high[:, None], kind, ASM)
            total = tl.dot(low, x_low, total, input_precision=PRECISION)
            total = tl.dot(high, x_high, total, input_precision=PRECISION)
    else:
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            part = tl.load(weight + outputs[:, None] * K + columns[None, :]).to(x.dtype.element_ty)
            rows_x = tl.load(x + rows[None, :] * K + columns[:, None], mask=inside, other=0.0)
            total = tl.dot(part, rows_x, total, input_precision=PRECISION)
        total *= tl.load(scale + outputs)[:, None]
    at = out + rows[None, :] * N + outputs[:, None]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
