"""Flow steps of few rows: six kernels a layer, each bound by how soon its loads arrive, and by its own size.

As in ``linear``, the norm in front of a product has no kernel: the epilogue that writes the residual stream also
writes it times the norm's scale and, for each of its tiles, the sum of its squares; the next product divides its
sums by the root of their mean and adds the weight times the norm's shift, a constant. Where a weight has few
outputs, SPLITS programs share its inputs; the last to finish adds their sums in order: results repeat to the bit.

What an epilogue needs is loaded before the K loop and first used behind it, since a use waits for its load. The
compiler does not know the loop's length, or it would unroll it: code that runs once costs as much as its size.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from vla_ros.engine.kernels.gemma import locate_pairs, tanh_gelu
from vla_ros.engine.kernels.linear import pair_ids, store_rotated


@triton.jit
def _multiply(
    x, weight, rows, outputs, first, M, count, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [BLOCK_M, BLOCK_N]: ``x[rows] @ weight[outputs].T`` over ``count`` inputs from ``first`` on."""
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
    """Load the sums of squares of each tile of the rows, [TILES, BLOCK_M]."""
    at = squares + tl.arange(0, TILES)[:, None] * BLOCK_M + rows[None, :]
    return tl.load(at, mask=(rows < M)[None, :], other=1.0)


@triton.jit
def _root(sums, eps, N: tl.constexpr):
    """Return the factor of an RMS norm of width N from sums of squares [TILES, ..]."""
    return tl.rsqrt(tl.sum(sums, axis=0) * (1.0 / N) + eps)


@triton.jit
def _by_time(now, fixed, times, zero, rows, M, ADAPTIVE: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: ``fixed`` [BLOCK_N] for rows whose time is ``zero``, and ``now`` for others."""
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
    """Float32 [BLOCK_M, BLOCK_N]: the normed rows times ``weight[outputs]``, shifted if the norm is adaptive."""
    if ADAPTIVE:
        now, fixed = tl.load(now + outputs), tl.load(fixed + outputs)
    sums = _load_squares(squares, rows, M, TILES, BLOCK_M)
    product = _multiply(x, weight, rows, outputs, 0, M, count, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    product *= _root(sums, eps, K)[:, None]
    if ADAPTIVE:
        product += _by_time(now, fixed, times, zero, rows, M, ADAPTIVE)
    return product


@triton.jit
def qkv_kernel(
    x, squares, eps, weight, now, fixed, times, zero, positions, cosine, sine, query, keys, values, M, ROWS,
    CAPACITY, count, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    ADAPTIVE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute queries, keys and values of the normed rows, rotated; store keys and values in the cache.

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
    query, keys, values, positions, ends, sums, parts, ROWS, CAPACITY, scale, TOTAL,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of one kv head over BLOCK_C positions; programs [blocks, chunks, B * KV_HEADS].

    Writes the softmax to ``sums`` [2, chunks, TOTAL] (sums, then largest scores) and the values, weighted but not
    divided by the sums, to ``parts`` [chunks, TOTAL, HEAD]; TOTAL is M * HEADS.
    """
    chunk, which = tl.program_id(1), tl.program_id(2)
    feature, column = tl.arange(0, HEAD), chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    at, inside, end = locate_pairs(tl.program_id(0), which, ends, ROWS, HEADS, KV_HEADS, BLOCK_R)
    filled = tl.load(positions + which // KV_HEADS * ROWS) + ROWS
    place = (which * CAPACITY + column)[:, None] * HEAD + feature[None, :]
    q = tl.load(query + at[:, None] * HEAD + feature[None, :], mask=inside[:, None], other=0.0)
    # The cache has whole blocks. A score that is not seen is dropped, but a NaN times a weight of zero is not.
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
def merge_kernel(sums, parts, out, TOTAL, CHUNKS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Merge the chunks of a row's softmax to ``out`` [TOTAL, HEAD]; PADDED is a power of two."""
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
def gate_up_kernel(
    x, squares, eps, weight, now, fixed, times, zero, out, M, count, N: tl.constexpr, K: tl.constexpr,
    ADAPTIVE: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``gelu(gate) * up`` of the normed rows; weight [2 N, K] holds gate, then up; ``out`` [M, N]."""
    rows = tl.arange(0, BLOCK_M)
    number, partner = pair_ids(tl.program_id(0) * BLOCK_N, BLOCK_N, "dense")  # gate and up of the same feature
    outputs = number + partner * N
    both = _multiply_normed(
        x, squares, eps, weight, now, fixed, times, zero, rows, outputs, M, count, K, ADAPTIVE, TILES, BLOCK_M,
        2 * BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    at = rows[:, None] * N + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + at, (tanh_gelu(gate) * up).to(out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def add_kernel(
    x, weight, out, now, fixed, times, zero, scaled, squares, partial, counters, M, count,
    N: tl.constexpr, K: tl.constexpr, ADAPTIVE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out += [gate *] x @ weight.T`` [M, N], and for the next norm ``scaled`` and ``squares`` [tiles, BLOCK_M].

    ``now`` and ``fixed`` are the next norm's scale at the step's time and at 0, behind the gate of the norm before.
    ``partial`` [SPLITS, M, N] and ``counters`` [tiles] belong to programs that share a tile; the counters stay 0.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None] * N + outputs[None, :]
    inside = (rows < M)[:, None]
    scale, fixed_scale = tl.load(now + outputs), tl.load(fixed + outputs)
    if ADAPTIVE:
        gate, fixed_gate = tl.load(now - N + outputs), tl.load(fixed - N + outputs)
    share: tl.constexpr = K // SPLITS
    before = tl.load(out + at, mask=inside, other=0.0)
    total = _multiply(x, weight, rows, outputs, split * share, M, count, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    last = True
    if SPLITS > 1:
        tl.store(partial + split * M * N + at, total, mask=inside)
        tl.debug_barrier()  # every thread has written before the counter says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for one in tl.static_range(SPLITS):
                # Past the L1 cache, which belongs to one multiprocessor and may be stale.
                total += tl.load(partial + one * M * N + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
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

    A row is that of ``tokens``, or with EMBED ``actions`` [M, A] times ``weight`` [N, A] plus ``bias`` [N].
    ``scaled`` is the row times the norm's scale; ``squares`` [TILES, BLOCK_M] has its sum of squares in the first
    tile; ``spare`` and ``counters`` [TILES] are set to 0.
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
def advance_kernel(
    x, squares, eps, norm, times, weight, bias, actions, previous, weights, limits, given, ROWS, time, delta,
    factor, TIME, H: tl.constexpr, A: tl.constexpr, ADAPTIVE: tl.constexpr, SCALED: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per action: last norm, velocity, guidance, and the Euler step of ``actions`` [B, H, A] in place.

    ``x`` [B * ROWS, N] is normed, or with SCALED the stream times the norm's scale, whose ``squares`` are known.
    ``weight`` [A, N] and ``bias`` [A] project to the velocity.
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
