"""The elementwise operations around an all-reduce of the ranks' parts of a product."""

import triton
import triton.language as tl

from vla_ros_models.engine.kernels.linear import saturate

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors


@triton.jit
def add_sum_kernel(product, hidden, norm, scaled, squares, N: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``product``, float32 [M, N], to ``hidden`` in place; write the inputs of its norm as `gather_kernel`."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row.to(tl.int64) * N + column
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(hidden + at, mask=inside, other=0.0)
    added = tl.load(product + at, mask=inside, other=0.0)
    value = (before.to(tl.float32) + added).to(before.dtype)
    tl.store(hidden + at, value, mask=inside)
    tl.store(scaled + at, saturate(value.to(tl.float32) * weight, scaled.dtype.element_ty), mask=inside)
    wide = value.to(tl.float64)
    tl.store(squares + row, tl.sum(wide * wide, axis=0))


@triton.jit
def scale_kernel(product, row_scale, column_scale, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply ``product`` [M, N] by the scales of its rows and columns; write it to ``out``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(product + row * N + column, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(column_scale + column, mask=inside, other=0.0) * tl.load(row_scale + row)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=inside)
