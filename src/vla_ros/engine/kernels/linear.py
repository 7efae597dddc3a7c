"""Products of a few rows with a large weight: the whole cost of decoding, and bound by reading the weight once.

Every kernel here takes rows ``x`` [M, K] and a weight [N, K] stored as the checkpoint has it. One program makes
``BLOCK_N`` outputs for all rows and walks along K. Rows are padded to a multiple of 16 and multiplied on the matrix
units, in the same order whatever M is: the result of one row does not depend on how many rows there are. Verifying
six tokens therefore gives the bits that decoding them one by one gives.

What surrounds the product is folded in: the RMS norm before it (its scale is a factor per row, applied at the end),
dequantisation of the weight, and what follows (rotary embedding and cache, gated activation, residual).
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
def load_group(scale, zero, group, width, outputs):
    """Scale, and what to take off for the zero point and the 128 of :func:`unpack_int4`; both [outputs] float32.

    ``scale`` and ``zero`` are [K / GROUP, width], so that one load is one stretch of memory.
    """
    factor = tl.load(scale + group * width + outputs).to(tl.float32)
    return factor, (tl.load(zero + group * width + outputs).to(tl.float32) + 128.0) * factor


@triton.jit
def load_rows(x, gain, rows, columns, M, K: tl.constexpr, NORM: tl.constexpr):
    """Rows of ``x`` at ``columns`` as stored, and multiplied by the norm's weight where there is a norm."""
    raw = tl.load(x + rows[:, None] * K + columns[None, :], mask=(rows < M)[:, None], other=0.0)
    if NORM:
        weight = tl.load(gain + columns).to(tl.float32)
        return raw, (raw.to(tl.float32) * weight[None, :]).to(raw.dtype)
    return raw, raw


@triton.jit
def multiply(
    x, gain, weight, scale, zero, width, rows, outputs, M, eps,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [BLOCK_M, BLOCK_N]: ``rms_norm(x)[rows] @ weight[outputs].T``."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    square = tl.zeros((BLOCK_M,), tl.float32)
    if KIND == "int4":
        # Byte j of a block of 2 * GROUP weights holds weight j (low) and weight GROUP + j (high).
        for block in range(0, K // (2 * GROUP)):
            bytes_at = block * GROUP + tl.arange(0, GROUP)
            packed = tl.load(weight + outputs[:, None] * (K // 2) + bytes_at[None, :])
            columns = block * 2 * GROUP + tl.arange(0, GROUP)
            raw_low, x_low = load_rows(x, gain, rows, columns, M, K, NORM)
            raw_high, x_high = load_rows(x, gain, rows, columns + GROUP, M, K, NORM)
            low, high = unpack_int4(packed, x.dtype.element_ty, ASM)
            scale_low, shift_low = load_group(scale, zero, 2 * block, width, outputs)
            scale_high, shift_high = load_group(scale, zero, 2 * block + 1, width, outputs)
            part_low = tl.dot(x_low, tl.trans(low), input_precision=PRECISION)
            part_high = tl.dot(x_high, tl.trans(high), input_precision=PRECISION)
            sum_low = tl.sum(x_low.to(tl.float32), axis=1)
            sum_high = tl.sum(x_high.to(tl.float32), axis=1)
            total += part_low * scale_low[None, :] - sum_low[:, None] * shift_low[None, :]
            total += part_high * scale_high[None, :] - sum_high[:, None] * shift_high[None, :]
            if NORM:
                square += tl.sum(raw_low.to(tl.float32) * raw_low.to(tl.float32), axis=1)
                square += tl.sum(raw_high.to(tl.float32) * raw_high.to(tl.float32), axis=1)
    else:
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            part = tl.load(weight + outputs[:, None] * K + columns[None, :])
            raw, scaled = load_rows(x, gain, rows, columns, M, K, NORM)
            total = tl.dot(scaled, tl.trans(part.to(x.dtype.element_ty)), total, input_precision=PRECISION)
            if NORM:
                square += tl.sum(raw.to(tl.float32) * raw.to(tl.float32), axis=1)
        if KIND == "int8":
            total *= tl.load(scale + outputs).to(tl.float32)[None, :]
    if NORM:
        total *= tl.rsqrt(square / K + eps)[:, None]
    return total


@triton.jit
def linear_kernel(
    x, gain, weight, scale, zero, width, out, M, N, eps,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out = [out +] [rms_norm](x) @ weight.T``; ``out`` [M, N] of its own type."""
    rows = tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = multiply(
        x, gain, weight, scale, zero, width, rows, outputs, M, eps,
        K, GROUP, KIND, NORM, ASM, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    at = out + rows[:, None] * N + outputs[None, :]
    inside = (rows < M)[:, None]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_up_kernel(
    x, gain, weight, scale, zero, width, out, M, N, eps,
    K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``silu(gate) * up`` of the normed rows; weight [2 N, K] holds gate, then up; ``out`` [M, N]."""
    rows = tl.arange(0, BLOCK_M)
    pair = tl.arange(0, 2 * BLOCK_N)  # gate and up of the same feature side by side
    outputs = tl.program_id(0) * BLOCK_N + pair // 2 + (pair % 2) * N
    both = multiply(
        x, gain, weight, scale, zero, width, rows, outputs, M, eps,
        K, GROUP, KIND, True, ASM, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = gate / (1.0 + tl.exp(-gate)) * up
    at = out + rows[:, None] * N + features[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def qkv_kernel(
    x, gain, weight, scale, zero, width, positions, cosine, sine, query, keys, values, M, eps, ROWS, CAPACITY,
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
        x, gain, weight, scale, zero, width, rows, outputs, M, eps,
        K, GROUP, KIND, True, ASM, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION,
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
