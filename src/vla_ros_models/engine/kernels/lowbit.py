"""Products with 4-bit and 8-bit weights, packed in the order of :mod:`vla_ros_models.engine.lowbit`.

``scale`` is the grid of :mod:`vla_ros_models.engine.lowbit`, or, for int8, one float32 per output, applied to sums.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
import triton
import triton.language as tl

from vla_ros_models.engine.kernels.unpack import (
    FRAGMENT_N,
    WORDS,
    as_operand,
    in_eight,
    in_four,
    matrix_fp8,
    matrix_int4,
    matrix_int8,
    narrow,
    per_lane,
    read_grid,
    unpack_int4,
    unpack_int4_half,
    unpack_int8,
    unpack_int8_half,
)

ALIGN_K = tl.constexpr(128)


@triton.jit
def multiply_packed(
    x, words, scale, rows, fragment, M, K: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    FRAGMENTS: tl.constexpr, K_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply ``fragment`` [FRAGMENTS] by ``rows`` [BLOCK_M] of ``x`` [M, K]: float32 [8 FRAGMENTS, BLOCK_M].

    There are K_GROUPS partial sums: sum p covers K-groups p, p + K_GROUPS, ... of all fragments. The sums are
    spread over the warps and added up after the loop, always in the same order. Scales are applied to sums, not to
    weights.
    """
    size: tl.constexpr = 128 if KIND == "int4" else 64  # inputs of a K-group
    count: tl.constexpr = (K + ALIGN_K - 1) // ALIGN_K * (ALIGN_K // size)
    kind: tl.constexpr = x.dtype.element_ty
    columns: tl.constexpr = max(BLOCK_M, 8)
    part, word, output = tl.arange(0, K_GROUPS), tl.arange(0, WORDS), tl.arange(0, FRAGMENT_N)
    total = tl.zeros((K_GROUPS, FRAGMENTS * FRAGMENT_N, columns), tl.float32)
    place = fragment[:, None, None] * count + part[None, :, None]  # of the first K-groups
    some_words, some_entries = place * WORDS + word[None, None, :], place * FRAGMENT_N + output[None, None, :]
    for first in range(0, count, K_GROUPS):
        there = (first + part) < count
        if count % K_GROUPS == 0:
            packed = tl.load(words + first * WORDS + some_words)
        else:
            packed = tl.load(words + first * WORDS + some_words, mask=there[None, :, None], other=0)
        some = load_few_rows(x, rows, first, part, M, K, count, size, K_GROUPS, BLOCK_M)
        if KIND == "int4":
            if count % K_GROUPS == 0:
                entries = tl.load(scale + first * FRAGMENT_N + some_entries)
            else:
                entries = tl.load(scale + first * FRAGMENT_N + some_entries, mask=there[None, :, None], other=0)
            factor, offset = read_grid(entries)
            if ASM and kind == tl.float16:
                low = per_lane((offset - 896.0).to(tl.float16), FRAGMENTS, K_GROUPS)
                high = per_lane((offset + 64.0).to(tl.float16), FRAGMENTS, K_GROUPS)
                numbers = unpack_int4_half(packed, low, high)
            else:
                offset = per_lane(narrow(offset, kind, ASM), FRAGMENTS, K_GROUPS)
                numbers = unpack_int4(packed, offset, kind, ASM)
            parts = in_eight(some, K_GROUPS, columns)
            partial = tl.zeros_like(total)
            for j in tl.static_range(8):
                weight = as_operand(numbers[j], FRAGMENTS, K_GROUPS)
                partial = tl.dot(weight, parts[j], partial, input_precision=PRECISION)
            factor = factor.permute(1, 0, 2).reshape(K_GROUPS, FRAGMENTS * FRAGMENT_N)[:, :, None]
            total = tl.fma(partial, tl.broadcast_to(factor, partial.shape), total)
        else:
            half: tl.constexpr = ASM and kind == tl.float16
            numbers = unpack_int8_half(packed) if half else unpack_int8(packed, kind, ASM)
            parts = in_four(some, K_GROUPS, columns)
            for j in tl.static_range(4):
                weight = as_operand(numbers[j], FRAGMENTS, K_GROUPS)
                total = tl.dot(weight, parts[j], total, input_precision=PRECISION)
    summed = add_groups(total, BLOCK_M)
    if KIND == "int8":
        factors = tl.load(scale + fragment[:, None] * FRAGMENT_N + output[None, :])
        summed *= factors.reshape(FRAGMENTS * FRAGMENT_N)[:, None]
    return summed


@triton.jit
def load_few_rows(
    x, rows, first, part, M, K: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, K_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load K-groups ``first + part`` of BLOCK_M ``rows`` of ``x`` [M, K]: [K_GROUPS, SIZE, BLOCK_M].

    A single row is repeated in 8 columns.
    """
    input = tl.arange(0, SIZE)
    if BLOCK_M == 1:
        inputs = part[:, None] * SIZE + input[None, :]
        if COUNT % K_GROUPS == 0 and COUNT * SIZE == K:
            row = tl.load(x + first * SIZE + inputs)
        else:
            row = tl.load(x + first * SIZE + inputs, mask=first * SIZE + inputs < K, other=0.0)
        some = tl.broadcast_to(row[:, :, None], (K_GROUPS, SIZE, 8))
    else:
        inputs = (first + part)[:, None, None] * SIZE + input[None, :, None]
        seen = (rows < M)[None, None, :] & ((first + part) < COUNT)[:, None, None]
        if COUNT * SIZE != K:
            seen = seen & (inputs < K)
        some = tl.load(x + rows[None, None, :] * K + inputs, mask=seen, other=0.0)
    return some


@triton.jit
def add_groups(sums, BLOCK_M: tl.constexpr):
    """Add up the sums of groups of inputs, [groups, outputs, rows of x], to [outputs, BLOCK_M].

    A single row of x stands in all columns of ``sums``, and is returned once.
    """
    summed = tl.sum(sums, axis=0)
    if BLOCK_M == 1:
        summed = tl.max(summed, axis=1)[:, None]
    return summed


@triton.jit
def load_weights(
    words, scale, place, KIND: tl.constexpr, ASM: tl.constexpr, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Load the K-groups at ``place`` [FRAGMENTS], one per fragment, as a dense matrix; int8 without scales."""
    place = place[:, None, None]
    packed = tl.load(words + place * WORDS + tl.arange(0, WORDS)[None, None, :])
    if KIND == "int4":
        entries = tl.load(scale + place * FRAGMENT_N + tl.arange(0, FRAGMENT_N)[None, None, :])
        weight = matrix_int4(packed, entries, FRAGMENTS, DTYPE, ASM)
    else:
        weight = matrix_int8(packed, FRAGMENTS, DTYPE, ASM)
    return weight


@triton.jit
def load_rows(x, rows, start, M, K: tl.constexpr, EVEN: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT inputs, from ``start``, of ``rows`` of ``x`` [M, K], transposed: [COUNT, rows].

    EVEN states that no row is beyond M; loading without a mask saves a tenth of the loop's instructions.
    """
    input = tl.arange(0, COUNT)
    at = x + start + (rows[None, :] * K + input[:, None])  # only the start differs between steps
    if K // ALIGN_K * ALIGN_K != K:
        some = tl.load(at, mask=(rows < M)[None, :] & (start + input < K)[:, None], other=0.0)
    elif EVEN:
        some = tl.load(at)
    else:
        some = tl.load(at, mask=(rows < M)[None, :], other=0.0)
    return some


@triton.jit
def fence_async_proxy(step, WGMMA: tl.constexpr):
    """Make rows that were copied to shared memory visible to wgmma, which reads it through the async proxy."""
    if WGMMA:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_wgmma(step, WGMMA: tl.constexpr):
    """Wait until wgmma has read its operands.

    wgmma reads the weight from registers asynchronously, while the next weight is unpacked into registers. Triton
    3.6 lets iterations overlap, and without this wait some 8-bit tiles were intermittently wrong on an H200.
    """
    if WGMMA:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;",
            "=r,r",
            [step],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def epilogue(
    out, total, scale, rows, outputs, M, N, split, KIND: tl.constexpr, ADD: tl.constexpr, SPLIT_K: tl.constexpr
):  # fmt: skip
    """Store ``out[rows, outputs] = [out +] total``; with SPLIT_K, partial sums in ``out`` [SPLIT_K, M, N]."""
    at, inside = out + rows[None, :] * N + outputs[:, None], (rows < M)[None, :]
    if SPLIT_K > 1:
        tl.store(at + split * (M * N), total, mask=inside)
    else:
        if KIND == "int8":
            total *= tl.load(scale + outputs)[:, None]
        if ADD:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemm_kernel(
    x, words, scale, out, M, N, K: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr,
    FRAGMENTS: tl.constexpr, K_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN: tl.constexpr, WGMMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``out [M, N] = [out +] x [M, K] @ weight.T`` for many rows and a packed weight.

    A program computes 8 * FRAGMENTS outputs of BLOCK_M + TAIL_M rows, since prompts have any length and a weight
    is unpacked once per program. The weight is the left operand, which Hopper reads from registers.
    Programs that share a weight tile run together, so that the tile is read once. If SPLIT_K programs split the
    inputs, each stores its sums in ``out``, and the next kernel adds up the sums.
    """
    size: tl.constexpr = 128 if KIND == "int4" else 64  # inputs of a K-group
    count: tl.constexpr = (K + ALIGN_K - 1) // ALIGN_K * (ALIGN_K // size)
    steps: tl.constexpr = count // K_GROUPS
    each: tl.constexpr = (steps + SPLIT_K - 1) // SPLIT_K
    kind: tl.constexpr = x.dtype.element_ty
    start, split = tl.program_id(0) * (BLOCK_M + TAIL_M), tl.program_id(2)
    rows = start + tl.arange(0, BLOCK_M)
    fragment = tl.program_id(1) * FRAGMENTS + tl.arange(0, FRAGMENTS)
    total = tl.zeros((FRAGMENTS * FRAGMENT_N, BLOCK_M), tl.float32)
    if TAIL_M > 0:
        more = start + BLOCK_M + tl.arange(0, TAIL_M)
        rest = tl.zeros((FRAGMENTS * FRAGMENT_N, TAIL_M), tl.float32)
    for step in range(split * each, tl.minimum(split * each + each, steps)):
        for part in tl.static_range(K_GROUPS):
            at = step * K_GROUPS + part
            weight = load_weights(words, scale, fragment * count + at, KIND, ASM, FRAGMENTS, kind)
            fence_async_proxy(at, WGMMA)
            total = tl.dot(
                weight, load_rows(x, rows, at * size, M, K, EVEN, size), total, input_precision=PRECISION
            )
            if TAIL_M > 0:
                rest = tl.dot(
                    weight, load_rows(x, more, at * size, M, K, EVEN, size), rest, input_precision=PRECISION
                )
            wait_for_wgmma(at, WGMMA)
    outputs = tl.program_id(1) * FRAGMENTS * FRAGMENT_N + tl.arange(0, FRAGMENTS * FRAGMENT_N)
    epilogue(out, total, scale, rows, outputs, M, N, split, KIND, ADD, SPLIT_K)
    if TAIL_M > 0:
        epilogue(out, rest, scale, more, outputs, M, N, split, KIND, ADD, SPLIT_K)


@triton.jit
def zero_points(
    grid, sums, fragment, rows, first, last, M, COUNT: tl.constexpr, FRAGMENTS: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """Return the zero points' part of the sums over K-groups ``first`` to ``last`` - 1: [8 FRAGMENTS, rows]."""
    group = first + tl.arange(0, ROOM)
    there = group < last
    at = (fragment[:, None, None] * COUNT + group[None, :, None]) * FRAGMENT_N
    entries = tl.load(grid + at + tl.arange(0, FRAGMENT_N)[None, None, :], mask=there[None, :, None], other=0)
    factor, offset = read_grid(entries)
    weight = (factor * (offset + 128.0)).permute(0, 2, 1).reshape(FRAGMENTS * FRAGMENT_N, ROOM)
    seen = (rows < M)[None, :] & there[:, None]
    return tl.dot(weight, tl.load(sums + rows[None, :] * COUNT + group[:, None], mask=seen, other=0.0))


@triton.jit
def epilogue_fp8(out, total, row_scale, rows, outputs, M, N, split, ADD: tl.constexpr, SPLIT_K: tl.constexpr):
    """Like :func:`epilogue`, for sums that must still be multiplied by 2^9 and the scales of their rows."""
    total *= 512.0 * tl.load(row_scale + rows, mask=rows < M, other=0.0)[None, :]
    epilogue(out, total, row_scale, rows, outputs, M, N, split, "int4", ADD, SPLIT_K)


@triton.jit
def gemm_fp8_kernel(
    x, row_scale, sums, words, grid, out, M, N, K: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr,
    FRAGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, SPLIT_K: tl.constexpr,
    ROOM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Like :func:`gemm_kernel`, for rows in FP8 (``ops.QuantizedRows``) and 4-bit weights, on FP8 tensor cores.

    Nibbles are multiplied without conversion. The sums of each K-group are multiplied by its scales. The total
    starts with the zero points' part, which needs only the sum of each row's K-group. ROOM is a power of two and at
    least the number of K-groups of a split.
    """
    count: tl.constexpr = (K + ALIGN_K - 1) // ALIGN_K
    each: tl.constexpr = (count + SPLIT_K - 1) // SPLIT_K
    start, split = tl.program_id(0) * (BLOCK_M + TAIL_M), tl.program_id(2)
    first, last = split * each, tl.minimum(split * each + each, count)
    rows = start + tl.arange(0, BLOCK_M)
    fragment = tl.program_id(1) * FRAGMENTS + tl.arange(0, FRAGMENTS)
    total = zero_points(grid, sums, fragment, rows, first, last, M, count, FRAGMENTS, ROOM)
    if TAIL_M > 0:
        more = start + BLOCK_M + tl.arange(0, TAIL_M)
        rest = zero_points(grid, sums, fragment, more, first, last, M, count, FRAGMENTS, ROOM)
    scales = grid + (fragment * count)[:, None, None] * FRAGMENT_N + tl.arange(0, FRAGMENT_N)[None, None, :]
    entries = tl.load(scales + first * FRAGMENT_N)
    for group in range(first, last):
        place = (fragment * count + group)[:, None, None]
        weight = matrix_fp8(tl.load(words + place * WORDS + tl.arange(0, WORDS)[None, None, :]), FRAGMENTS, ASM)
        factor = read_grid(entries)[0].reshape(FRAGMENTS * FRAGMENT_N)[:, None]
        entries = tl.load(scales + tl.minimum(group + 1, last - 1) * FRAGMENT_N)  # Triton would not prefetch it
        some = load_rows(x, rows, group * ALIGN_K, M, count * ALIGN_K, EVEN, ALIGN_K)
        total += tl.dot(weight, some) * factor
        if TAIL_M > 0:
            some = load_rows(x, more, group * ALIGN_K, M, count * ALIGN_K, EVEN, ALIGN_K)
            rest += tl.dot(weight, some) * factor
    outputs = tl.program_id(1) * FRAGMENTS * FRAGMENT_N + tl.arange(0, FRAGMENTS * FRAGMENT_N)
    epilogue_fp8(out, total, row_scale, rows, outputs, M, N, split, ADD, SPLIT_K)
    if TAIL_M > 0:
        epilogue_fp8(out, rest, row_scale, more, outputs, M, N, split, ADD, SPLIT_K)
