"""Products of a few rows with a large weight: the whole cost of decoding, and bound by reading the weight once.

Every kernel here takes rows ``x`` [M, K] and a weight [N, K] stored as the checkpoint has it. One program makes
``BLOCK_N`` outputs for all rows and walks along K. Rows are padded to a multiple of 16 and multiplied on the matrix
units, in the same order whatever M is: the result of one row does not depend on how many rows there are. Verifying
six tokens therefore gives the bits that decoding them one by one gives.

What surrounds the product is folded in: dequantisation of the weight, and what follows (rotary embedding and cache,
gated activation, residual). The norm before it is a kernel of its own: folded in, every program computed it anew
and the weight waited.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_int4(packed, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Low and high nibbles of uint8 ``packed`` as 128 + nibble. ASM is for bfloat16: 9 instructions for 8 weights.

    A bfloat16 of exponent 7 counts in ones, so that a nibble written into the mantissa of 128 is 128 + nibble. The
    constant is taken off later, together with the zero point.
    """
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd, shifted;
            prmt.b32 even, $4, 0, 0x4140;
            prmt.b32 odd, $4, 0, 0x4342;
            lop3.b32 $0, even, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, odd, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 shifted, even, 4;
            lop3.b32 $2, shifted, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 shifted, odd, 4;
            lop3.b32 $3, shifted, 0x000F000F, 0x43004300, 0xEA;
            }
            """,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 15).to(tl.float32) + 128.0).to(DTYPE)
        high = ((packed >> 4).to(tl.float32) + 128.0).to(DTYPE)
    return low, high


@triton.jit
def load_group(scale, zero, group, width, outputs, DTYPE: tl.constexpr):
    """Scale [outputs] float32, and what to take off a weight of :func:`unpack_int4`: 128 and the zero point.

    ``scale`` and ``zero`` are [K / GROUP, width], so that one load is one stretch of memory.
    """
    factor = tl.load(scale + group * width + outputs).to(tl.float32)
    return factor, (tl.load(zero + group * width + outputs).to(tl.float32) + 128.0).to(DTYPE)


@triton.jit
def multiply(
    x, weight, scale, zero, width, rows, outputs, M,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [BLOCK_M, BLOCK_N]: ``x[rows] @ weight[outputs].T``."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inside = (rows < M)[:, None]
    if KIND == "int4":
        # Byte j of a block of 2 * GROUP weights holds weight j (low) and weight GROUP + j (high).
        for block in range(0, K // (2 * GROUP)):
            lane = tl.arange(0, GROUP)
            packed = tl.load(weight + outputs[:, None] * (K // 2) + block * GROUP + lane[None, :])
            at = x + rows[:, None] * K + block * 2 * GROUP + lane[None, :]
            x_low = tl.load(at, mask=inside, other=0.0)
            x_high = tl.load(at + GROUP, mask=inside, other=0.0)
            low, high = unpack_int4(packed, x.dtype.element_ty, ASM)
            scale_low, zero_low = load_group(scale, zero, 2 * block, width, outputs, x.dtype.element_ty)
            scale_high, zero_high = load_group(scale, zero, 2 * block + 1, width, outputs, x.dtype.element_ty)
            low, high = low - zero_low[:, None], high - zero_high[:, None]  # whole numbers below 16: exact
            total += tl.dot(x_low, tl.trans(low), input_precision=PRECISION) * scale_low[None, :]
            total += tl.dot(x_high, tl.trans(high), input_precision=PRECISION) * scale_high[None, :]
    else:
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            part = tl.load(weight + outputs[:, None] * K + columns[None, :])
            some = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
            total = tl.dot(some, tl.trans(part.to(x.dtype.element_ty)), total, input_precision=PRECISION)
        if KIND == "int8":
            total *= tl.load(scale + outputs).to(tl.float32)[None, :]
    return total


@triton.jit
def linear_kernel(
    x, weight, scale, zero, width, out, M, N,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out = [out +] x @ weight.T``; ``out`` [M, N] of its own type."""
    rows = tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = multiply(
        x, weight, scale, zero, width, rows, outputs, M,
        K, GROUP, KIND, ASM, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    at = out + rows[:, None] * N + outputs[None, :]
    inside = (rows < M)[:, None]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_up_kernel(
    x, weight, scale, zero, width, out, M, N,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``silu(gate) * up`` of the normed rows; weight [2 N, K] holds gate, then up; ``out`` [M, N]."""
    rows = tl.arange(0, BLOCK_M)
    pair = tl.arange(0, 2 * BLOCK_N)  # gate and up of the same feature side by side
    outputs = tl.program_id(0) * BLOCK_N + pair // 2 + (pair % 2) * N
    both = multiply(
        x, weight, scale, zero, width, rows, outputs, M,
        K, GROUP, KIND, ASM, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = gate / (1.0 + tl.exp(-gate)) * up
    at = out + rows[:, None] * N + features[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def qkv_kernel(
    x, weight, scale, zero, width, positions, cosine, sine, query, keys, values, M, ROWS, CAPACITY,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of the normed rows, rotated; keys and values go straight into the cache.

    ``query`` [M, HEADS, HEAD]; ``keys`` and ``values`` [M / ROWS, KV_HEADS, CAPACITY, HEAD]; ``positions`` [M];
    ``cosine`` and ``sine`` [positions, HEAD / 2].
    """
    half: tl.constexpr = HEAD // 2
    rows = tl.arange(0, BLOCK_M)
    pair = tl.arange(0, 2 * BLOCK_N)  # the two features that rotate together side by side
    number = tl.program_id(0) * BLOCK_N + pair // 2
    outputs = (number // half) * HEAD + number % half + (pair % 2) * half
    both = multiply(
        x, weight, scale, zero, width, rows, outputs, M,
        K, GROUP, KIND, ASM, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    first, second = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    mine = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, feature = mine // half, mine % half
    inside = (rows < M)[:, None]
    position = tl.load(positions + rows, mask=rows < M, other=0)
    table = position[:, None] * half + feature[None, :]
    turns = (head < HEADS + KV_HEADS)[None, :]
    cos = tl.where(turns, tl.load(cosine + table).to(tl.float32), 1.0)
    sin = tl.where(turns, tl.load(sine + table).to(tl.float32), 0.0)
    low = (first * cos - second * sin).to(query.dtype.element_ty)
    high = (second * cos + first * sin).to(query.dtype.element_ty)

    to_query = query + rows[:, None] * (HEADS * HEAD) + head[None, :] * HEAD + feature[None, :]
    is_query = inside & (head < HEADS)[None, :]
    tl.store(to_query, low, mask=is_query)
    tl.store(to_query + half, high, mask=is_query)
    is_key = inside & ((head >= HEADS) & (head < HEADS + KV_HEADS))[None, :]
    is_value = inside & (head >= HEADS + KV_HEADS)[None, :]
    kv_head = (head - HEADS) % KV_HEADS
    slot = (((rows // ROWS)[:, None] * KV_HEADS + kv_head[None, :]) * CAPACITY + position[:, None]) * HEAD
    slot += feature[None, :]
    tl.store(keys + slot, low, mask=is_key)
    tl.store(keys + slot + half, high, mask=is_key)
    tl.store(values + slot, low, mask=is_value)
    tl.store(values + slot + half, high, mask=is_value)
