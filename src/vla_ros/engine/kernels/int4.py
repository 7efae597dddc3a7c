"""Products with weights of 4 bits, in the order of :mod:`vla_ros.engine.int4`.

What a lane loads is unpacked where it is: nibble j of a lane's words is the matrix units' operand for inputs 16 j
to 16 j + 15 of a group, register by register. The compiler finds the layouts equal and moves nothing; a compiler
that does not find it moves the numbers and stays right.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(8)
GROUP = tl.constexpr(128)


@triton.jit
def unpack(words, offset, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Nibble j of ``words`` + 128 + ``offset`` for j = 0 to 7: whole numbers, exact in every type.

    ASM is for bfloat16 and takes two words at a time: a bfloat16 of exponent 7 counts in ones, so that a nibble
    written into the mantissa of 128 is 128 + nibble, and one packed addition makes two weights of it. 3.0
    instructions for two weights, 2 of them logical.
    """
    if ASM:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, number, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 low, $8, $9, 0x5410;
            prmt.b32 high, $8, $9, 0x7632;
            lop3.b32 number, low, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, number, one, $10;
            shr.u32 low, low, 4;
            lop3.b32 number, low, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, number, one, $10;
            shr.u32 low, low, 4;
            lop3.b32 number, low, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, number, one, $10;
            shr.u32 low, low, 4;
            lop3.b32 number, low, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, number, one, $10;
            lop3.b32 number, high, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $4, number, one, $10;
            shr.u32 high, high, 4;
            lop3.b32 number, high, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $5, number, one, $10;
            shr.u32 high, high, 4;
            lop3.b32 number, high, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $6, number, one, $10;
            shr.u32 high, high, 4;
            lop3.b32 number, high, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $7, number, one, $10;
            }
            """,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [words, offset],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        add = offset.to(tl.float32) + 128.0
        n0 = ((words & 15).to(tl.float32) + add).to(DTYPE)
        n1 = (((words >> 4) & 15).to(tl.float32) + add).to(DTYPE)
        n2 = (((words >> 8) & 15).to(tl.float32) + add).to(DTYPE)
        n3 = (((words >> 12) & 15).to(tl.float32) + add).to(DTYPE)
        n4 = (((words >> 16) & 15).to(tl.float32) + add).to(DTYPE)
        n5 = (((words >> 20) & 15).to(tl.float32) + add).to(DTYPE)
        n6 = (((words >> 24) & 15).to(tl.float32) + add).to(DTYPE)
        n7 = (((words >> 28) & 15).to(tl.float32) + add).to(DTYPE)
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def read_grid(entries):
    """Scale and offset (-128 - zero point) of grid entries, float32."""
    return (entries << 16).to(tl.float32, bitcast=True), (entries & -65536).to(tl.float32, bitcast=True)


@triton.jit
def narrow(value, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A scale or an offset in the type that ASM computes in, bfloat16, which holds it exactly."""
    return value.to(DTYPE) if ASM else value


@triton.jit
def per_lane(entries, A: tl.constexpr, B: tl.constexpr):
    """[A, B, 8], one per output of a unit, to [A, B, 128], one per word."""
    return tl.broadcast_to(entries[:, :, :, None], (A, B, UNIT, 16)).reshape(A, B, GROUP)


@triton.jit
def as_operand(number, UNITS: tl.constexpr, PARTS: tl.constexpr):
    """One nibble of words [UNITS, PARTS, 128] as matrices [PARTS, 8 UNITS, 16]."""
    split = number.reshape(UNITS, PARTS, UNIT, 4, 2, 2)  # unit, part, g, t, h, e
    return split.permute(1, 0, 2, 4, 3, 5).reshape(PARTS, UNITS * UNIT, 16)


@triton.jit
def by_sixteen(x, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """[PARTS, 128, ROWS] cut into inputs 16 j to 16 j + 15, j = 0 to 7: [PARTS, 16, ROWS] each."""
    even, odd = tl.split(x.reshape(PARTS, 2, 2, 2, 16, ROWS).permute(0, 4, 5, 1, 2, 3))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def multiply_int4(
    x, words, grid, rows, unit, M, K: tl.constexpr, ASM: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [8 UNITS, BLOCK_M]: the weights of ``unit`` [UNITS] times ``rows`` [BLOCK_M] of ``x`` [M, K].

    Part p of PARTS takes groups p, p + PARTS, ... of all units, the parts are spread over the warps, and their sums
    are added at the end, in the same order always. The scale is applied to a group's sum, not to its weights.
    """
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    kind: tl.constexpr = x.dtype.element_ty
    part, input = tl.arange(0, PARTS), tl.arange(0, GROUP)
    word, output = tl.arange(0, GROUP), tl.arange(0, UNIT)
    total = tl.zeros((PARTS, UNITS * UNIT, BLOCK_M), tl.float32)
    for first in range(0, groups, PARTS):
        group = first + part
        there = group < groups
        seen = (rows < M)[None, None, :] & there[:, None, None]
        if groups * GROUP != K:
            seen = seen & ((group[:, None] * GROUP + input[None, :]) < K)[:, :, None]
        place = unit[:, None, None] * groups + group[None, :, None]
        packed = tl.load(words + place * GROUP + word[None, None, :], mask=there[None, :, None], other=0)
        entries = tl.load(grid + place * UNIT + output[None, None, :], mask=there[None, :, None], other=0)
        inputs = group[:, None, None] * GROUP + input[None, :, None]
        some = tl.load(x + rows[None, None, :] * K + inputs, mask=seen, other=0.0)
        scale, offset = read_grid(entries)
        offset = per_lane(narrow(offset, kind, ASM), UNITS, PARTS)
        n0, n1, n2, n3, n4, n5, n6, n7 = unpack(packed, offset, kind, ASM)
        x0, x1, x2, x3, x4, x5, x6, x7 = by_sixteen(some, PARTS, BLOCK_M)
        partial = tl.dot(as_operand(n0, UNITS, PARTS), x0, input_precision=PRECISION)
        partial = tl.dot(as_operand(n1, UNITS, PARTS), x1, partial, input_precision=PRECISION)
        partial = tl.dot(as_operand(n2, UNITS, PARTS), x2, partial, input_precision=PRECISION)
        partial = tl.dot(as_operand(n3, UNITS, PARTS), x3, partial, input_precision=PRECISION)
        partial = tl.dot(as_operand(n4, UNITS, PARTS), x4, partial, input_precision=PRECISION)
        partial = tl.dot(as_operand(n5, UNITS, PARTS), x5, partial, input_precision=PRECISION)
        partial = tl.dot(as_operand(n6, UNITS, PARTS), x6, partial, input_precision=PRECISION)
        partial = tl.dot(as_operand(n7, UNITS, PARTS), x7, partial, input_precision=PRECISION)
        total += partial * scale.permute(1, 0, 2).reshape(PARTS, UNITS * UNIT)[:, :, None]
    return tl.sum(total, axis=0)


@triton.jit
def dequantize_units(packed, entries, UNITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words [UNITS, 128] and grid entries [UNITS, 8] of one group to weights [8 UNITS, 128] of a dense matrix."""
    scale, offset = read_grid(entries[:, None, :])
    offset = per_lane(narrow(offset, DTYPE, ASM), UNITS, 1)
    scale = per_lane(narrow(scale, DTYPE, ASM), UNITS, 1)
    n0, n1, n2, n3, n4, n5, n6, n7 = unpack(packed[:, None, :], offset, DTYPE, ASM)
    even = tl.join(tl.join(n0 * scale, n4 * scale), tl.join(n2 * scale, n6 * scale))
    odd = tl.join(tl.join(n1 * scale, n5 * scale), tl.join(n3 * scale, n7 * scale))
    both = tl.join(even, odd).reshape(UNITS, UNIT, 4, 2, 2, 2, 2, 2)  # unit, g, t, h, e, j / 4, j / 2 % 2, j % 2
    return both.permute(0, 1, 5, 6, 7, 3, 2, 4).reshape(UNITS * UNIT, GROUP).to(DTYPE)


@triton.jit
def dequantize_int4_kernel(words, grid, out, K: tl.constexpr, ASM: tl.constexpr, UNITS: tl.constexpr):
    """[N, K] in the type of ``out``; a program makes 8 UNITS outputs of one group."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    group, unit = tl.program_id(1), tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    place = unit[:, None] * groups + group
    packed = tl.load(words + place * GROUP + tl.arange(0, GROUP)[None, :])
    entries = tl.load(grid + place * UNIT + tl.arange(0, UNIT)[None, :])
    weight = dequantize_units(packed, entries, UNITS, out.dtype.element_ty, ASM)
    rows = tl.program_id(0) * UNITS * UNIT + tl.arange(0, UNITS * UNIT)
    columns = group * GROUP + tl.arange(0, GROUP)
    tl.store(out + rows[:, None].to(tl.int64) * K + columns[None, :], weight, mask=(columns < K)[None, :])


@triton.jit
def load_rows(x, rows, group, M, K: tl.constexpr):
    """Inputs of one group of some rows of ``x`` [M, K], the inputs first: [128, rows]."""
    inputs = group * GROUP + tl.arange(0, GROUP)
    inside = (rows < M)[None, :]
    if K // GROUP * GROUP != K:
        inside = inside & (inputs < K)[:, None]
    return tl.load(x + rows[None, :] * K + inputs[:, None], mask=inside, other=0.0)


@triton.jit
def store_rows(out, total, rows, outputs, M, N, ADD: tl.constexpr):
    """``out[rows, outputs] = [out +] total`` [outputs, rows]."""
    at, inside = out + rows[None, :] * N + outputs[:, None], (rows < M)[None, :]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemm_int4_kernel(
    x, words, grid, out, M, N, K: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, UNITS: tl.constexpr,
    BLOCK_M: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = [out +] x [M, K] @ weight.T`` for many rows, the weight dequantised on its way.

    A program makes 8 UNITS outputs of BLOCK_M + TAIL rows: a prompt's length is no power of two, and each weight
    should be unpacked for as many rows as there are. The weight is the left operand: on Hopper it may come from
    registers, where dequantisation leaves it. Programs of one weight run together, so that it is read once.
    """
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    start = tl.program_id(0) * (BLOCK_M + TAIL)
    rows = start + tl.arange(0, BLOCK_M)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    word, output = tl.arange(0, GROUP), tl.arange(0, UNIT)
    total = tl.zeros((UNITS * UNIT, BLOCK_M), tl.float32)
    if TAIL > 0:
        more = start + BLOCK_M + tl.arange(0, TAIL)
        rest = tl.zeros((UNITS * UNIT, TAIL), tl.float32)
    for group in range(0, groups):
        place = unit[:, None] * groups + group
        packed = tl.load(words + place * GROUP + word[None, :])
        entries = tl.load(grid + place * UNIT + output[None, :])
        weight = dequantize_units(packed, entries, UNITS, x.dtype.element_ty, ASM)
        total = tl.dot(weight, load_rows(x, rows, group, M, K), total, input_precision=PRECISION)
        if TAIL > 0:
            rest = tl.dot(weight, load_rows(x, more, group, M, K), rest, input_precision=PRECISION)
    outputs = tl.program_id(1) * UNITS * UNIT + tl.arange(0, UNITS * UNIT)
    store_rows(out, total, rows, outputs, M, N, ADD)
    if TAIL > 0:
        store_rows(out, rest, more, outputs, M, N, ADD)
