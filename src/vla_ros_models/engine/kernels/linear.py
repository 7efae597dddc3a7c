"""Products of few rows with a large weight, which dominate decoding and are bound by reading the weight.

Every kernel here takes rows ``x`` [M, K] and a weight [N, K], stored as in the checkpoint or in the order of
:mod:`vla_ros_models.engine.lowbit`. One program computes a tile of ``BLOCK_M`` rows and ``BLOCK_N`` outputs and
loops over K. The weight is the wide operand of the tensor cores, the rows are the narrow operand, padded to 8. The
order of multiplications and additions does not depend on M, so the result of a row does not depend on the number of
rows: verifying six tokens is bit-identical to decoding them one by one. For the same reason, the compiler must not
fuse multiplications with additions, which it would do in some kernels but not in others.

The product is fused with the dequantisation of the weight, the epilogue (rotary embedding and cache, gated
activation, residual), and the norm before it. When a program writes its tile of a row, the row's RMS norm lacks
only the sum of squares over the whole row. So the epilogue that writes the residual stream also writes the stream
times the norm's weight, and adds up the squares; the next product reads both and divides its results by the root
mean square. Squares are added in float64, where squares of bfloat16 values are exact, so that the order of the
programs does not matter.

Epilogue operands are prefetched before the K loop.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
import triton
import triton.language as tl

from vla_ros_models.engine.kernels.lowbit import add_groups, multiply_packed
from vla_ros_models.engine.kernels.unpack import FRAGMENT_N


@triton.jit
def multiply(
    x, weight, scale, rows, outputs, M, K: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr,
    ASM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``x[rows] @ weight[outputs].T``, float32 [BLOCK_M, BLOCK_N]; with PAIRS, partners are adjacent.

    ``outputs`` comes from :func:`output_ids` or :func:`pair_ids`.
    """
    if (KIND == "int4") or (KIND == "int8"):
        fragments: tl.constexpr = BLOCK_N // FRAGMENT_N
        k_groups: tl.constexpr = BLOCK_K // (128 if KIND == "int4" else 64)
        both = multiply_packed(
            x, weight, scale, rows, outputs // FRAGMENT_N, M, K, KIND, ASM, fragments, k_groups, BLOCK_M, PRECISION
        )
        if PAIRS:
            both = (
                both.reshape(fragments // 2, 2, FRAGMENT_N, BLOCK_M).permute(0, 2, 1, 3).reshape(BLOCK_N, BLOCK_M)
            )
    else:
        both = multiply_dense(
            x, weight, scale, rows, outputs, M, K, KIND, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )
    return tl.trans(both)


@triton.jit
def multiply_dense(
    x, weight, scale, rows, outputs, M, K: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply dense or FP8 weights [N, K] by rows: float32 [BLOCK_N, BLOCK_M].

    As in :func:`multiply_packed`, each of the GROUPS parts of an iteration has separate sums, and the parts are
    spread over the warps. FP8 weights are widened to the type of ``x``, with float16 two per instruction.
    """
    size: tl.constexpr = BLOCK_K // GROUPS
    columns: tl.constexpr = max(BLOCK_M, 8)
    part, input = tl.arange(0, GROUPS)[:, None] * size, tl.arange(0, size)[None, :]
    total = tl.zeros((GROUPS, BLOCK_N, columns), tl.float32)
    if KIND == "fp8":
        factors = tl.load(scale + outputs)
    for start in range(0, K, BLOCK_K):
        inputs = start + part + input
        some = tl.load(weight + outputs[None, :, None] * K + inputs[:, None, :])
        if BLOCK_M == 1:  # one row, repeated in all columns
            row = tl.broadcast_to(tl.load(x + inputs)[:, :, None], (GROUPS, size, columns))
        else:
            at = rows[None, None, :] * K + inputs[:, :, None]
            row = tl.load(x + at, mask=(rows < M)[None, None, :], other=0.0)
        if KIND == "fp8":
            some = some.to(x.dtype.element_ty)
        elif x.dtype.element_ty != weight.dtype.element_ty:  # the head after quantised layers
            row = row.to(weight.dtype.element_ty)
        total = tl.dot(some, row, total, input_precision=PRECISION)
    summed = add_groups(total, BLOCK_M)
    if KIND == "fp8":
        summed *= factors[:, None]
    return summed


@triton.jit
def saturate(value, DTYPE: tl.constexpr):
    """Convert float32 to the type of stored rows; float16 is clamped to its range."""
    if tl.float16 == DTYPE:
        value = tl.clamp(value, -65504.0, 65504.0)
    return value.to(DTYPE)


@triton.jit
def block_of_rows(BLOCK_M: tl.constexpr, MORE: tl.constexpr):
    """Return the rows of a program; without MORE there is one block, whose start the compiler knows."""
    rows = tl.arange(0, BLOCK_M)
    if MORE:
        rows += tl.program_id(0) * BLOCK_M
    return rows


@triton.jit
def output_ids(first, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Return COUNT outputs from ``first`` for :func:`multiply`; for packed weights, one per fragment: its first."""
    if (KIND == "int4") or (KIND == "int8"):
        return first + tl.arange(0, COUNT // FRAGMENT_N) * FRAGMENT_N
    else:
        return first + tl.arange(0, COUNT)


@triton.jit
def pair_ids(first, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Return the indices of COUNT pairs of rows from ``first``, each twice, and 0 or 1 for the row in its pair.

    For packed weights, pairs are of fragments of rows.
    """
    if (KIND == "int4") or (KIND == "int8"):
        fragment = tl.arange(0, 2 * COUNT // FRAGMENT_N)
        return first + fragment // 2 * FRAGMENT_N, fragment % 2
    else:
        pair = tl.arange(0, 2 * COUNT)
        return first + pair // 2, pair % 2


@triton.jit
def load_squares(squares, rows, M):
    """Load the sums of squares of ``rows``."""
    return tl.load(squares + rows, mask=rows < M, other=1.0)


@triton.jit
def inverse_root(sums, eps, N: tl.constexpr):
    """Return the factor of an RMS norm of width N from sums of squares, float32."""
    return tl.rsqrt((sums / N).to(tl.float32) + eps)


@triton.jit
def lm_head_kernel(
    x, squares, eps, weight, scale, out, M, N, K: tl.constexpr, KIND: tl.constexpr, MORE: tl.constexpr,
    ASM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``out = norm(x) @ weight.T``, [M, N] in the type of ``out``."""
    rows = block_of_rows(BLOCK_M, MORE)
    sums = load_squares(squares, rows, M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = multiply(
        x, weight, scale, rows, output_ids(tl.program_id(1) * BLOCK_N, BLOCK_N, KIND), M,
        K, KIND, False, ASM, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    at = out + rows[:, None] * N + outputs[None, :]
    total *= inverse_root(sums, eps, K)[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def add_kernel(
    x, weight, scale, out, norm, scaled, next_squares, squares, M, N, K: tl.constexpr, KIND: tl.constexpr,
    MORE: tl.constexpr, ASM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``out += x @ weight.T`` [M, N] and the next norm's inputs.

    ``scaled`` [M, N] is ``out`` times ``norm``; ``next_squares`` [M], 0 before, gets the sums of squares of
    ``out``; ``squares`` [M] of the previous norm are set to 0.
    """
    rows = block_of_rows(BLOCK_M, MORE)
    tile = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None] * N + outputs[None, :]
    inside = (rows < M)[:, None]
    before, factor = tl.load(out + at, mask=inside, other=0.0), tl.load(norm + outputs)
    total = multiply(
        x, weight, scale, rows, output_ids(tile * BLOCK_N, BLOCK_N, KIND), M,
        K, KIND, False, ASM, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    value = (before.to(tl.float32) + total).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside)
    weighted = value.to(tl.float32) * factor.to(tl.float32)[None, :]
    tl.store(scaled + at, saturate(weighted, scaled.dtype.element_ty), mask=inside)
    wide = value.to(tl.float64)
    tl.atomic_add(next_squares + rows, tl.sum(wide * wide, axis=1), mask=rows < M, sem="relaxed")
    if tile == 0:
        tl.store(squares + rows, tl.zeros((BLOCK_M,), tl.float64), mask=rows < M)


@triton.jit
def product_kernel(
    x, weight, scale, out, M, N, K: tl.constexpr, KIND: tl.constexpr, MORE: tl.constexpr, ASM: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``out = x @ weight.T``, float32 [M, N]: the part of a rank's shard in a product."""
    rows = block_of_rows(BLOCK_M, MORE)
    tile = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = multiply(
        x, weight, scale, rows, output_ids(tile * BLOCK_N, BLOCK_N, KIND), M,
        K, KIND, False, ASM, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    tl.store(out + rows[:, None] * N + outputs[None, :], total, mask=(rows < M)[:, None])


@triton.jit
def gate_up_kernel(
    x, squares, eps, weight, scale, out, M, N, K: tl.constexpr, KIND: tl.constexpr, MORE: tl.constexpr,
    ASM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``silu(gate) * up`` of the normed rows, ``out`` [M, N]; weight [2 N, K] holds gate, then up."""
    rows = block_of_rows(BLOCK_M, MORE)
    sums = load_squares(squares, rows, M)
    number, partner = pair_ids(tl.program_id(1) * BLOCK_N, BLOCK_N, KIND)  # gate and up of the same feature
    both = multiply(
        x, weight, scale, rows, number + partner * N, M,
        K, KIND, True, ASM, GROUPS, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    both *= inverse_root(sums, eps, K)[:, None]
    gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = gate / (1.0 + tl.exp(-gate)) * up
    at = out + rows[:, None] * N + features[None, :]
    tl.store(at, saturate(value, out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def qkv_kernel(
    x, squares, eps, weight, scale, positions, cosine, sine, query, keys, values, M, ROWS, CAPACITY,
    K: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    MORE: tl.constexpr, ASM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Project the normed rows, rotate queries and keys, and store keys and values in the cache.

    ``query`` [M, HEADS, HEAD]; ``keys`` and ``values`` [M / ROWS, KV_HEADS, CAPACITY, HEAD]; ``positions`` [M];
    ``cosine`` and ``sine`` [positions, HEAD / 2].
    """
    half: tl.constexpr = HEAD // 2
    rows = block_of_rows(BLOCK_M, MORE)
    sums = load_squares(squares, rows, M)
    mine = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, feature = mine // half, mine % half
    position = tl.load(positions + rows, mask=rows < M, other=0)
    table = position[:, None] * half + feature[None, :]
    cos, sin = tl.load(cosine + table), tl.load(sine + table)
    number, partner = pair_ids(tl.program_id(1) * BLOCK_N, BLOCK_N, KIND)  # the two features that rotate together
    both = multiply(
        x, weight, scale, rows, (number // half) * HEAD + number % half + partner * half, M,
        K, KIND, True, ASM, GROUPS, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    both *= inverse_root(sums, eps, K)[:, None]
    first, second = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    store_rotated(
        first, second, cos, sin, rows[:, None], position[:, None], head[None, :], feature[None, :],
        (rows < M)[:, None], query, keys, values, ROWS, CAPACITY, HEADS, KV_HEADS, HEAD,
    )  # fmt: skip


@triton.jit
def store_rotated(
    first, second, cosine, sine, row, position, head, feature, inside, query, keys, values, ROWS, CAPACITY,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys; store queries, keys and values. Arguments as for :func:`qkv_kernel`.

    ``head`` counts the heads of queries, then of keys, then of values; ``first`` and ``second`` are the values of
    ``feature`` in both halves of a head.
    """
    half: tl.constexpr = HEAD // 2
    turns = head < HEADS + KV_HEADS
    cos, sin = tl.where(turns, cosine.to(tl.float32), 1.0), tl.where(turns, sine.to(tl.float32), 0.0)
    low = (first * cos - second * sin).to(query.dtype.element_ty)
    high = (second * cos + first * sin).to(query.dtype.element_ty)
    to_query = query + (row * HEADS + head) * HEAD + feature
    is_query = inside & (head < HEADS)
    tl.store(to_query, low, mask=is_query)
    tl.store(to_query + half, high, mask=is_query)
    if KV_HEADS > 0:
        slot = ((row // ROWS * KV_HEADS + (head - HEADS) % KV_HEADS) * CAPACITY + position) * HEAD + feature
        is_key = inside & ((head >= HEADS) & turns)
        is_value = inside & (head >= HEADS + KV_HEADS)
        tl.store(keys + slot, low, mask=is_key)
        tl.store(keys + slot + half, high, mask=is_key)
        tl.store(values + slot, low, mask=is_value)
        tl.store(values + slot + half, high, mask=is_value)
