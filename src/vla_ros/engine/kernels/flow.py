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

from vla_ros.engine.kernels.attention import locate_pairs
from vla_ros.engine.kernels.linear import pair_ids, store_rotated
from vla_ros.engine.kernels.pointwise import tanh_gelu


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
def _root(sums, eps, N: tl.constexpr):
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
    product *= _root(sums, eps, K)[:, None]
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
    """Merge the partial softmaxes of all chunks into ``out`` [TOTAL, HEAD]; PADDED is a power of two >= CHUNKS."""
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


@triton.jit
def start_kernel(
    tokens, actions, weight, bias, norm, times, hidden, scaled, squares, spare, counters, TIME, A: tl.constexpr,
    ADAPTIVE: tl.constexpr, EMBED: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``hidden`` [M, N] and the inputs of the first norm; one program per row.

    Rows are those of ``tokens`` or, with EMBED, ``actions`` [M, A] @ ``weight`` [N, A].T + ``bias`` [N]. ``scaled``
    is the row times the norm's scale; ``squares`` [TILES, BLOCK_M] has the row's sum of squares in the first tile;
    ``spare`` and ``counters`` [TILES] are set to 0.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    norm += column
    if ADAPTIVE:
        norm += tl.load(times + row) * TIME
    if EMBED:
        number = tl.arange(0, A)
        action = tl.load(actions + row * A + number)
        part = tl.load(weight + column[:, None] * A + number[None, :], mask=inside[:, None], other=0.0)
        value = tl.sum(part * action[None, :], axis=1) + tl.load(bias + column, mask=inside, other=0.0)
    else:
        value = tl.load(tokens + row * N + column, mask=inside, other=0.0)
    value = value.to(hidden.dtype.element_ty)
    tl.store(hidden + row * N + column, value, mask=inside)
    scale = tl.load(norm, mask=inside, other=0.0)
    tl.store(scaled + row * N + column, (value.to(tl.float32) * scale).to(scaled.dtype.element_ty), mask=inside)
    wide = tl.where(inside, value.to(tl.float32), 0.0)
    tile = tl.arange(0, TILES)
    tl.store(squares + tile * BLOCK_M + row, tl.where(tile == 0, tl.sum(wide * wide, axis=0), 0.0))
    tl.store(spare + tile * BLOCK_M + row, tl.zeros((TILES,), tl.float32))
    if row == 0:
        tl.store(counters + tile, tl.zeros((TILES,), tl.int32))


@triton.jit
def start_mlp_kernel(
    actions, weight, bias, second, second_bias, norm, hidden, scaled, squares, spare, counters, M, count,
    A: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Like :func:`start_kernel` with EMBED, for two layers with a SiLU between; a program per BLOCK_N features.

    ``second`` [K, K] and ``second_bias`` [K] are float32 and multiplied in the type of ``hidden`` [M, K]. Every
    program computes the first layer of all rows, which has few inputs.
    """
    tile, rows = tl.program_id(0), tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, number = (rows < M)[:, None], tl.arange(0, A)
    scale, constant = tl.load(norm + outputs), tl.load(second_bias + outputs)
    action = tl.load(actions + rows[:, None] * A + number[None, :], mask=inside, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, count, BLOCK_K):
        feature = start + tl.arange(0, BLOCK_K)
        part = tl.load(weight + feature[:, None] * A + number[None, :])
        both = tl.load(second + outputs[:, None] * K + feature[None, :]).to(hidden.dtype.element_ty)
        inner = tl.dot(action, tl.trans(part), input_precision=PRECISION) + tl.load(bias + feature)[None, :]
        inner *= tl.sigmoid(inner)
        total = tl.dot(inner.to(both.dtype), tl.trans(both), total, input_precision=PRECISION)
    value = (total + constant[None, :]).to(hidden.dtype.element_ty)
    at = rows[:, None] * K + outputs[None, :]
    tl.store(hidden + at, value, mask=inside)
    wide = value.to(tl.float32)
    tl.store(scaled + at, (wide * scale[None, :]).to(scaled.dtype.element_ty), mask=inside)
    tl.store(squares + tile * BLOCK_M + rows, tl.sum(wide * wide, axis=1))
    if tile == 0:
        each = tl.arange(0, TILES)
        place = each[:, None] * BLOCK_M + rows[None, :]
        zeros = tl.zeros((TILES, BLOCK_M), tl.float32)
        tl.store(squares + place, zeros, mask=(each >= K // BLOCK_N)[:, None])
        tl.store(spare + place, zeros)
        tl.store(counters + each, tl.zeros((TILES,), tl.int32))


@triton.jit
def advance_kernel(
    x, squares, eps, norm, times, weight, bias, actions, previous, weights, limits, given, ROWS, time, delta,
    factor, TIME, H: tl.constexpr, A: tl.constexpr, ADAPTIVE: tl.constexpr, SCALED: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute last norm, velocity and guidance; advance ``actions`` [B, H, A] in place. One program per action.

    ``x`` [B * ROWS, N] is the normed stream or, with SCALED, the stream times the norm's scale, with the stream's
    sums of squares in ``squares``. ``weight`` [A, N] and ``bias`` [A] project to the velocity.
    """
    action = tl.program_id(0)
    batch = action // H
    row = batch * ROWS + ROWS - H + action % H
    column = tl.arange(0, BLOCK)
    inside = column < N
    number = tl.arange(0, A)
    part = tl.load(weight + number[:, None] * N + column[None, :], mask=inside[None, :], other=0.0)
    value = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value *= _root(tl.load(squares + tl.arange(0, TILES) * BLOCK_M + row), eps, N)
        if ADAPTIVE:
            shift = norm + tl.load(times + row) * TIME + N
            value += tl.load(shift + column, mask=inside, other=0.0)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    velocity = tl.sum(part * value[None, :], axis=1) + tl.load(bias + number)
    at = action * A + number
    now, before = tl.load(actions + at), tl.load(previous + at)
    error = tl.load(weights + action) * (before - (now - time * velocity))
    velocity -= tl.minimum(tl.load(limits + batch), factor) * error
    now = tl.where(tl.load(given + action) != 0, before, now + delta * velocity)
    tl.store(actions + at, now)
