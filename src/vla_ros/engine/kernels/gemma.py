"""Gemma's kernels: attention, and the operations between products of many rows."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from vla_ros.engine.kernels.attention import add_block
from vla_ros.engine.kernels.pointwise import fp8_scale


@triton.jit
def add_norm_kernel(
    hidden, branch, norm, times, out, scales, eps, TIME, ADAPTIVE: tl.constexpr, BRANCH: tl.constexpr,
    QUANTIZE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``[gate *] branch`` to ``hidden`` [M, N] in place, then store its norm; one program per row.

    ``norm`` points to the norm's scale and shift at the first time, which follow the previous norm's gate in
    memory; those of the next time are TIME numbers further.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row.to(tl.int64) * N + column
    norm += column
    if ADAPTIVE:
        norm += tl.load(times + row) * TIME
    value = tl.load(hidden + at, mask=inside, other=0.0)
    if BRANCH:
        added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        if ADAPTIVE:
            added *= tl.load(norm - N, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(hidden + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / N + eps) * tl.load(norm, mask=inside, other=0.0)
    if ADAPTIVE:
        wide += tl.load(norm + N, mask=inside, other=0.0)
    if QUANTIZE:
        wide = _quantized(wide, scales + row)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantized(row, to):
    """Return a float32 row divided by its FP8 scale, and store the scale."""
    scale = fp8_scale(tl.max(tl.abs(row), axis=0))
    tl.store(to, scale)
    return row / scale


@triton.jit
def gelu_multiply_kernel(both, out, scales, N, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``gelu(gate) * up`` of ``both`` [M, 2 N] (gate, then up) in ``out`` [M, N].

    With QUANTIZE, one program handles a whole row and writes its scale to ``scales``.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    gate = tl.load(both + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    value = tanh_gelu(gate) * up
    if QUANTIZE:
        value = _quantized(value, scales + row)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tanh_gelu(x):
    """Return the tanh form of GELU, float32."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def locate_pairs(block, which, ends, ROWS, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return, for a block of (row, head) pairs of one kv head: index, whether the pair exists, and its end."""
    group: tl.constexpr = HEADS // KV_HEADS
    index = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = index < ROWS * group
    row = which // KV_HEADS * ROWS + index // group
    end = tl.load(ends + row, mask=inside, other=1)
    return row * HEADS + which % KV_HEADS * group + index % group, inside, end


@triton.jit
def attend_kernel(
    query, keys, values, ends, out, ROWS, CAPACITY, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of BLOCK_R (row, head) pairs of one kv head: ``query`` [B * ROWS, HEADS, HEAD] to ``out``.

    Heads that share keys are rows of one product. Row r sees the cache before ``ends[r]``; the loop ends at the
    last position needed.
    """
    which, feature = tl.program_id(1), tl.arange(0, HEAD)
    pair, inside, end = locate_pairs(tl.program_id(0), which, ends, ROWS, HEADS, KV_HEADS, BLOCK_R)
    at = pair[:, None] * HEAD + feature[None, :]
    q = tl.load(query + at, mask=inside[:, None], other=0.0)
    base = which * CAPACITY * HEAD
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_R,), tl.float32)
    mixed = tl.zeros((BLOCK_R, HEAD), tl.float32)
    last = tl.max(end, axis=0)
    for start in range(0, last, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        place = base + column[:, None] * HEAD + feature[None, :]
        # The cache has whole blocks. Unseen scores are masked, but an unseen NaN value times a weight of 0 is NaN.
        k = tl.load(keys + place)
        v = tl.load(values + place, mask=(column < last)[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(column[None, :] < end[:, None], score, float("-inf"))
        top, norm, mixed = add_block(score, v, top, norm, mixed, PRECISION)
    tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
