"""Flow steps of few rows: six kernels per layer, each bound by the latency of its loads and by its code size.

As in ``linear``, the norm before a product has no separate kernel. The epilogue that writes the residual stream
also writes the stream times the norm's scale and, for each tile, the sum of squares. The next product divides its
results by the root mean square and adds a constant, the weight times the norm's shift. If a weight has few
outputs, SPLITS programs split its inputs; the last to finish adds the partial sums in order, so that results are
reproducible bit for bit.

Epilogue operands are loaded before the K loop and first used after it, because a use waits for its load. The loop's
length is hidden from the compiler, which would otherwise unroll the loop: the time of code that runs only once
grows with its size.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
import triton
import triton.language as tl

from vla_ros_models.engine.kernels.attention import locate_pairs
from vla_ros_models.engine.kernels.linear import pair_ids, store_rotated
from vla_ros_models.engine.kernels.pointwise import tanh_gelu


@triton.jit
def _multiply(
    x, weight, rows, outputs, first, M, count, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``x[rows] @ weight[outputs].T`` over ``count`` inputs from ``first``, float32 [BLOCK_M, BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inside = (rows < M)[:, None]
    for start in range(0, count, BLOCK_K):
        columns = first + start + tl.arange(0, BLOCK_K)
        part = tl.load(weight + outputs[:, None] * K + columns[None, :])
        some = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
        total = tl.dot(some, tl.trans(part), total, input_precision=PRECISION)
    return total


@triton.jit
def _load_squares(squares, rows, M, TILES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the sums of squares of the rows in each tile, [TILES, BLOCK_M]."""
    at = squares + tl.arange(0, TILES)[:, None] * BLOCK_M + rows[None, :]
    return tl.load(at, mask=(rows < M)[None, :], other=1.0)


@triton.jit
def root(sums, eps, N: tl.constexpr):
    """Return the factor of an RMS norm of width N from sums of squares [TILES, ..]."""
    return tl.rsqrt(tl.sum(sums, axis=0) * (1.0 / N) + eps)


@triton.jit
def _by_time(now, fixed, times, zero, rows, M, ADAPTIVE: tl.constexpr):
    """Return ``fixed`` [BLOCK_N] for rows whose time is ``zero``, ``now`` for others: [BLOCK_M, BLOCK_N]."""
    if ADAPTIVE:
        free = tl.load(times + rows, mask=rows < M, other=0) != zero
        return tl.where(free[:, None], now[None, :], fixed[None, :])
    else:
        return now[None, :]


@triton.jit
def _multiply_normed(
    x, squares, eps, weight, now, fixed, times, zero, rows, outputs, M, count, K: tl.constexpr,
    ADAPTIVE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the normed rows times ``weight[outputs].T``, with the norm's shift: float32 [BLOCK_M, BLOCK_N]."""
    if ADAPTIVE:
        now, fixed = tl.load(now + outputs), tl.load(fixed + outputs)
    sums = _load_squares(squares, rows, M, TILES, BLOCK_M)
    product = _multiply(x, weight, rows, outputs, 0, M, count, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    product *= root(sums, eps, K)[:, None]
    if ADAPTIVE:
        product += _by_time(now, fixed, times, zero, rows, M, ADAPTIVE)
    return product


@triton.jit
def flow_qkv_kernel(
    x, squares, eps, weight, now, fixed, times, zero, positions, cosine, sine, query, keys, values, M, ROWS,
    CAPACITY, count, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    ADAPTIVE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Project the normed rows, rotate queries and keys, and store keys and values in the cache.

    ``query`` [M, HEADS, HEAD]; ``keys`` and ``values`` [M / ROWS, KV_HEADS, CAPACITY, HEAD]; ``positions`` [M];
    ``cosine`` and ``sine`` [positions, HEAD / 2]. ``now`` and ``fixed`` [outputs] are the products with the norm's
    shift at the step's time and at 0.
    """
    half: tl.constexpr = HEAD // 2
    rows = tl.arange(0, BLOCK_M)
    tile = tl.program_id(0)
    number, partner = pair_ids(tile * BLOCK_N, BLOCK_N, "dense")  # two features that rotate together
    outputs = (number // half) * HEAD + number % half + partner * half
    mine = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    head, feature = mine // half, mine % half
    position = tl.load(positions + rows, mask=rows < M, other=0)
    both = _multiply_normed(
        x, squares, eps, weight, now, fixed, times, zero, rows, outputs, M, count, K, ADAPTIVE, TILES, BLOCK_M,
        2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    first, second = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    table = position[:, None] * half + feature[None, :]
    store_rotated(
        first, second, tl.load(cosine + table), tl.load(sine + table), rows[:, None], position[:, None],
        head[None, :], feature[None, :], (rows < M)[:, None], query, keys, values, ROWS, CAPACITY, HEADS, KV_HEADS,
        HEAD,
    )  # fmt: skip


@triton.jit
def attend_chunk_kernel(
    query, keys, values, ends, sums, parts, ROWS, CAPACITY, scale, TOTAL,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of BLOCK_R (row, head) pairs of one kv head over BLOCK_C positions.

    The grid is [blocks, chunks, B * KV_HEADS]. Writes the partial softmax to ``sums`` [2, chunks, TOTAL] (sums,
    then largest scores), and the weighted values, not divided by the sums, to ``parts`` [chunks, TOTAL, HEAD].
    TOTAL is M * HEADS.
    """
    chunk, which = tl.program_id(1), tl.program_id(2)
    feature, column = tl.arange(0, HEAD), chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    at, inside, end = locate_pairs(tl.program_id(0), which, ends, ROWS, HEADS, KV_HEADS, BLOCK_R)
    filled = tl.load(ends + which // KV_HEADS * ROWS + ROWS - 1)  # the last row sees all that any row sees
    place = (which * CAPACITY + column)[:, None] * HEAD + feature[None, :]
    q = tl.load(query + at[:, None] * HEAD + feature[None, :], mask=inside[:, None], other=0.0)
    # The cache has whole blocks. Unseen scores are masked, but an unseen NaN value times a weight of 0 is NaN.
    k = tl.load(keys + place)
    v = tl.load(values + place, mask=(column < filled)[:, None], other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    score = tl.where(column[None, :] < end[:, None], score, float("-inf"))
    top = tl.max(score, axis=1)
    share = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    mixed = tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
    tl.store(sums + chunk * TOTAL + at, tl.sum(share, axis=1), mask=inside)
    tl.store(sums + (tl.num_programs(1) + chunk) * TOTAL + at, top, mask=inside)
    to = parts + (chunk * TOTAL + at)[:, None] * HEAD + feature[None, :]
    tl.store(to, mixed.to(parts.dtype.element_ty), mask=inside[:, None])


@triton.jit
def flow_merge_kernel(sums, parts, out, TOTAL, CHUNKS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Merge the partial softmaxes over CHUNKS blocks of keys into ``out`` [TOTAL, HEAD], one row per row and head.

    ``sums`` [2, CHUNKS, TOTAL] has the sums of weights and the largest scores, ``parts`` [CHUNKS, TOTAL, HEAD] the
    weighted values. PADDED is a power of two >= CHUNKS.
    """
    chunk, at, feature = tl.arange(0, PADDED), tl.program_id(0), tl.arange(0, HEAD)
    inside = chunk < CHUNKS
    there = chunk * TOTAL + at
    norm = tl.load(sums + there, mask=inside, other=0.0)
    top = tl.load(sums + CHUNKS * TOTAL + there, mask=inside, other=float("-inf"))
    part = tl.load(parts + there[:, None] * HEAD + feature[None, :], mask=inside[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    mixed = tl.sum(part.to(tl.float32) * weight[:, None], axis=0) / tl.sum(norm * weight, axis=0)
    tl.store(out + at * HEAD + feature, mixed.to(out.dtype.element_ty))


@triton.jit
def flow_gate_up_kernel(
    x, squares, eps, weight, now, fixed, times, zero, out, M, count, N: tl.constexpr, K: tl.constexpr,
    ADAPTIVE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GELU: tl.constexpr = True, GATED: tl.constexpr = True,
):  # fmt: skip
    """Compute ``gelu(gate) * up`` of the normed rows, ``out`` [M, N]; weight [2 N, K] holds gate, then up.

    Without GELU, the activation is SiLU. Without GATED, compute ``gelu(up)`` for a weight [N, K].
    """
    rows = tl.arange(0, BLOCK_M)
    number, partner = pair_ids(tl.program_id(0) * BLOCK_N, BLOCK_N, "dense")  # gate and up of the same feature
    outputs = number + partner * N if GATED else tl.program_id(0) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    both = _multiply_normed(
        x, squares, eps, weight, now, fixed, times, zero, rows, outputs, M, count, K, ADAPTIVE, TILES, BLOCK_M,
        2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    if GATED:
        gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
        at = rows[:, None] * N + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        active = tanh_gelu(gate) if GELU else gate * tl.sigmoid(gate)
        tl.store(out + at, (active * up).to(out.dtype.element_ty), mask=(rows < M)[:, None])
    else:
        at = rows[:, None] * N + outputs[None, :]
        tl.store(out + at, tanh_gelu(both).to(out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def flow_add_kernel(
    x, weight, out, now, fixed, times, zero, scaled, squares, partial, counters, M, count,
    N: tl.constexpr, K: tl.constexpr, ADAPTIVE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, bias=None,
):  # fmt: skip
    """Compute ``out += [gate *] (x @ weight.T [+ bias])`` [M, N] and the next norm's ``scaled`` and ``squares``.

    ``squares`` are [tiles, BLOCK_M]. ``now`` and ``fixed`` point to the next norm's scale at the step's time and at
    time 0, which follows the previous norm's gate in memory. Programs that share a tile use ``partial`` [SPLITS, M,
    N] and ``counters`` [tiles], which are 0 before and after.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None] * N + outputs[None, :]
    inside = (rows < M)[:, None]
    scale, fixed_scale = tl.load(now + outputs), tl.load(fixed + outputs)
    if ADAPTIVE:
        gate, fixed_gate = tl.load(now - N + outputs), tl.load(fixed - N + outputs)
    if bias is not None:
        more = tl.load(bias + outputs).to(tl.float32)
    share: tl.constexpr = K // SPLITS
    before = tl.load(out + at, mask=inside, other=0.0)
    total = _multiply(x, weight, rows, outputs, split * share, M, count, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    last = True
    if SPLITS > 1:
        tl.store(partial + split * M * N + at, total, mask=inside)
        tl.debug_barrier()  # every thread has written before the counter is incremented
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for one in tl.static_range(SPLITS):
                # Bypass the L1 cache, which belongs to one multiprocessor and may be stale.
                total += tl.load(partial + one * M * N + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
        if bias is not None:
            total += more[None, :]
        if ADAPTIVE:
            total *= _by_time(gate, fixed_gate, times, zero, rows, M, ADAPTIVE)
        value = (before.to(tl.float32) + total).to(out.dtype.element_ty)
        tl.store(out + at, value, mask=inside)
        wide = value.to(tl.float32)
        normed = wide * _by_time(scale, fixed_scale, times, zero, rows, M, ADAPTIVE)
        tl.store(scaled + at, normed.to(scaled.dtype.element_ty), mask=inside)
        tl.store(squares + tile * BLOCK_M + rows, tl.sum(wide * wide, axis=1))
