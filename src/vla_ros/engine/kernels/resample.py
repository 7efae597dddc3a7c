"""Steps of :mod:`vla_ros.engine.resample` in one kernel each, with bit-identical results.

Compile with ``enable_fp_fusion=False``: a fused multiply-add would round only once.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float_resize_kernel(
    images, rows, row_weights, columns, column_weights, out, H, W, HEIGHT, WIDTH, ROW_TAPS, COLUMN_TAPS,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Resize ``images`` uint8 [B, H, W, 3] to ``out`` [B, HEIGHT, WIDTH, 3]; a program has BLOCK values of a row.

    ``rows`` [HEIGHT, ROW_TAPS] and ``columns`` [WIDTH, COLUMN_TAPS] are source positions. Taps are added in
    order.
    """
    y, first = tl.program_id(0) % HEIGHT, tl.program_id(0) // HEIGHT * H
    level = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = level < WIDTH * 3
    x = level // 3
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(0, COLUMN_TAPS):
        column = tl.load(columns + x * COLUMN_TAPS + tap, mask=inside, other=0) * 3 + level % 3
        value = tl.zeros((BLOCK,), tl.float32)
        for other in range(0, ROW_TAPS):
            row = first + tl.load(rows + y * ROW_TAPS + other)
            seen = tl.load(images + row * W * 3 + column, mask=inside, other=0).to(tl.float32)
            value += seen * tl.load(row_weights + y * ROW_TAPS + other)
        total += value * tl.load(column_weights + x * COLUMN_TAPS + tap, mask=inside, other=0.0)
    even = tl.clamp(total, 0.0, 255.0) + 12582912.0 - 12582912.0  # 1.5 * 2^23: rounds half to even
    tl.store(out + tl.program_id(0) * WIDTH * 3 + level, even.to(tl.uint8), mask=inside)


@triton.jit
def crop_kernel(
    images, above, below, left, right, across, down, out, H, W, HEIGHT, WIDTH, unit, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply TensorFlow's ``crop_and_resize``: ``images`` uint8 [B, H, W, 3] to ``out`` [B, HEIGHT, WIDTH, 3].

    A sample is interpolated between rows ``above``, ``below`` [HEIGHT] and columns ``left``, ``right`` [WIDTH].
    """
    y, first = tl.program_id(0) % HEIGHT, tl.program_id(0) // HEIGHT * H
    level = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = level < WIDTH * 3
    x = level // 3
    share = tl.load(across + x, mask=inside, other=0.0)
    one = tl.load(left + x, mask=inside, other=0) * 3 + level % 3
    other = tl.load(right + x, mask=inside, other=0) * 3 + level % 3
    top = interpolate(images + (first + tl.load(above + y)) * W * 3, one, other, share, unit, inside)
    bottom = interpolate(images + (first + tl.load(below + y)) * W * 3, one, other, share, unit, inside)
    value = top + (bottom - top) * tl.load(down + y)
    tl.store(
        out + tl.program_id(0) * WIDTH * 3 + level, (tl.clamp(value, 0.0, 1.0) * 255.5).to(tl.uint8), mask=inside
    )


@triton.jit
def interpolate(row, one, other, share, unit, inside):
    """Interpolate between two columns of a row; return values in [0, 1]."""
    left = tl.load(row + one, mask=inside, other=0).to(tl.float32) * unit
    right = tl.load(row + other, mask=inside, other=0).to(tl.float32) * unit
    return left + (right - left) * share
