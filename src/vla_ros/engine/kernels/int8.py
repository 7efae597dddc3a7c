"""int8 weights against many rows: a matrix product that dequantises on the way, and plain dequantisation."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantize_kernel(weight, scale, out, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[N, K] in the type of ``out``; a program makes BLOCK_N rows of BLOCK_K weights."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    at = rows[:, None].to(tl.int64) * K + columns[None, :]
    value = tl.load(weight + at).to(tl.float32) * tl.load(scale + rows)[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty))


@triton.jit
def gemm_kernel(
    x, weight, scale, out, M, N, K: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = [out +] x [M, K] @ weight.T``, the weight dequantised block by block on its way.

    The weight is the left operand: on Hopper it may come from registers, where dequantisation leaves it.
    """
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)  # programs of one weight block run together: one read
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
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
