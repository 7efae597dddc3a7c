"""Gemma's kernels: attention, the operations between products of many rows, and whole products of few rows.

A flow step has so few rows that every product is bound by reading its weight once. As in ``linear``, the norm in
front of a product has no kernel: the epilogue that writes the residual stream also writes it times the norm's scale
and adds up its squares, in float64, where the order does not matter. The next product divides its sums by the root
of their mean and adds the weight times the norm's shift, a constant. Where a weight has few outputs, SPLITS
programs share its inputs; the last to finish adds their sums in order, so that results repeat to the bit.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from vla_ros.engine.kernels.attention import merge_softmax
from vla_ros.engine.kernels.linear import inverse_root, load_squares, pair_ids


@triton.jit
def add_norm_kernel(
    hidden, branch, norm, times, out, scales, eps, TIME, ADAPTIVE: tl.constexpr, BRANCH: tl.constexpr,
    QUANTIZE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: adds ``[gate *] branch`` to ``hidden`` [M, N] in place, then its norm to ``out``.

    ``norm`` is the norm's scale and shift at the first time, behind the gate of the norm before; those of the next
    time are TIME numbers further.
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
        wide = _quantize(wide, scales + row)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize(row, to):
    """A float32 row divided by its scale, which is stored: its largest number becomes 448, FP8's largest."""
    scale = tl.maximum(tl.max(tl.abs(row), axis=0), 1e-12) / 448.0
    tl.store(to, scale)
    return row / scale


@triton.jit
def gelu_multiply_kernel(both, out, scales, N, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``gelu(gate) * up`` for ``both`` [M, 2 N] (gate, then up) to ``out`` [M, N].

    With QUANTIZE one program has a whole row, and ``scales`` takes its scale.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    gate = tl.load(both + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    value = tanh_gelu(gate) * up
    if QUANTIZE:
        value = _quantize(value, scales + row)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tanh_gelu(x):
    """The tanh form of GELU, float32."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def attend_kernel(
    query, keys, values, ends, out, partial, mixes, counters, ROWS, CAPACITY, scale,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SPLITS programs for BLOCK_R rows of one kv head: ``query`` [B * ROWS, HEADS, HEAD] to ``out`` of that shape.

    The heads that share keys are rows of one product. Row r sees the cache before ``ends[r]``; the loop ends at the
    last position needed. Program s takes blocks s, s + SPLITS, ... and writes its softmax to ``partial`` and its
    values to ``mixes``; the last to finish merges them, in their order. ``counters`` count the finished programs,
    from 0 to 0 again.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    block, split, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = which // KV_HEADS, which % KV_HEADS
    index = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = index < ROWS * group
    feature = tl.arange(0, HEAD)
    row = batch * ROWS + index // group
    end = tl.load(ends + row, mask=inside, other=0)
    at = (row * HEADS + kv_head * group + index % group)[:, None] * HEAD + feature[None, :]
    q = tl.load(query + at, mask=inside[:, None], other=0.0)
    base = which * CAPACITY * HEAD
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_R,), tl.float32)
    mixed = tl.zeros((BLOCK_R, HEAD), tl.float32)
    last = tl.max(end, axis=0)
    for start in range(split * BLOCK_C, last, SPLITS * BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        place = base + column[:, None] * HEAD + feature[None, :]
        # The cache has whole blocks. A score that is not seen is dropped, but a NaN times a weight of zero is not.
        k = tl.load(keys + place)
        v = tl.load(values + place, mask=(column < last)[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(column[None, :] < end[:, None], score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, axis=1))
        origin = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp2(score - origin[:, None])
        keep = tl.exp2(top - origin)
        norm = norm * keep + tl.sum(share, axis=1)
        mixed = tl.dot(share.to(v.dtype), v, mixed * keep[:, None], input_precision=PRECISION)
        top = highest
    if SPLITS == 1:
        tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    else:
        tile = which * tl.num_programs(0) + block
        size = tl.num_programs(0) * tl.num_programs(2) * SPLITS * BLOCK_R  # of sums; then scores
        mine = (tile * SPLITS + split) * BLOCK_R + tl.arange(0, BLOCK_R)
        tl.store(partial + mine, norm)
        tl.store(partial + size + mine, top)
        here = mixes + mine[:, None] * HEAD + feature[None, :]
        tl.store(here, (mixed / tl.where(norm > 0, norm, 1.0)[:, None]).to(mixes.dtype.element_ty))
        tl.debug_barrier()  # every thread has written before the counter says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            norm = tl.zeros((BLOCK_R,), tl.float32)
            mixed = tl.zeros((BLOCK_R, HEAD), tl.float32)
            for one in tl.static_range(SPLITS):
                theirs = (tile * SPLITS + one) * BLOCK_R + tl.arange(0, BLOCK_R)
                # Past the L1 cache, which belongs to one multiprocessor and may be stale.
                their_norm = tl.load(partial + theirs, cache_modifier=".cg")
                their_top = tl.load(partial + size + theirs, cache_modifier=".cg") * 0.6931471805599453
                there = mixes + theirs[:, None] * HEAD + feature[None, :]
                their_mixed = tl.load(there, cache_modifier=".cg").to(tl.float32) * their_norm[:, None]
                top, norm, mixed = merge_softmax(top, norm, mixed, their_top, their_norm, their_mixed)
            tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
            tl.store(counters + tile, 0)


@triton.jit
def _multiply(
    x, weight, rows, outputs, first, M, K: tl.constexpr, COUNT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float32 [BLOCK_M, BLOCK_N]: ``x[rows] @ weight[outputs].T`` over COUNT inputs from ``first`` on."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inside = (rows < M)[:, None]
    for start in range(0, COUNT, BLOCK_K):
        columns = first + start + tl.arange(0, BLOCK_K)
        part = tl.load(weight + outputs[:, None] * K + columns[None, :])
        some = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
        total = tl.dot(some, tl.trans(part), total, input_precision=PRECISION)
    return total


@triton.jit
def _load_shift(shift, times, rows, outputs, M, N, SHIFTED: tl.constexpr):
    """The product with the norm's shift, of ``shift`` [times, N], [BLOCK_M, BLOCK_N]; 0 without."""
    if SHIFTED:
        time = tl.load(times + rows, mask=rows < M, other=0)
        return tl.load(shift + time[:, None] * N + outputs[None, :])
    else:
        return 0.0


@triton.jit
def qkv_kernel(
    x, squares, eps, weight, shift, times, positions, cosine, sine, query, keys, values, M, ROWS, CAPACITY,
    K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of the normed rows, rotated; keys and values go straight into the cache.

    ``query`` [M, HEADS, HEAD]; ``keys`` and ``values`` [M / ROWS, KV_HEADS, CAPACITY, HEAD]; ``positions`` [M];
    ``cosine`` and ``sine`` [positions, HEAD / 2].
    """
    half: tl.constexpr = HEAD // 2
    rows = tl.arange(0, BLOCK_M)
    number, partner = pair_ids(tl.program_id(0) * BLOCK_N, BLOCK_N, "dense")  # two features that rotate together
    outputs = (number // half) * HEAD + number % half + partner * half
    wide: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD
    mine = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, feature = mine // half, mine % half
    turns = (head < HEADS + KV_HEADS)[None, :]
    # All that the epilogue needs is loaded before the loop.
    root = inverse_root(load_squares(squares, rows, M), eps, K)[:, None]
    shifted = _load_shift(shift, times, rows, outputs, M, wide, SHIFTED)
    position = tl.load(positions + rows, mask=rows < M, other=0)
    table = position[:, None] * half + feature[None, :]
    cos = tl.where(turns, tl.load(cosine + table).to(tl.float32), 1.0)
    sin = tl.where(turns, tl.load(sine + table).to(tl.float32), 0.0)
    both = _multiply(x, weight, rows, outputs, 0, M, K, K, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION)
    first, second = tl.split((both * root + shifted).reshape(BLOCK_M, BLOCK_N, 2))
    low = (first * cos - second * sin).to(query.dtype.element_ty)
    high = (second * cos + first * sin).to(query.dtype.element_ty)
    inside = (rows < M)[:, None]
    to_query = query + rows[:, None] * (HEADS * HEAD) + head[None, :] * HEAD + feature[None, :]
    is_query = inside & (head < HEADS)[None, :]
    tl.store(to_query, low, mask=is_query)
    tl.store(to_query + half, high, mask=is_query)
    slot = ((rows // ROWS)[:, None] * KV_HEADS + (head - HEADS)[None, :] % KV_HEADS) * CAPACITY + position[:, None]
    slot = slot * HEAD + feature[None, :]
    is_key = inside & ((head >= HEADS) & (head < HEADS + KV_HEADS))[None, :]
    is_value = inside & (head >= HEADS + KV_HEADS)[None, :]
    tl.store(keys + slot, low, mask=is_key)
    tl.store(keys + slot + half, high, mask=is_key)
    tl.store(values + slot, low, mask=is_value)
    tl.store(values + slot + half, high, mask=is_value)


@triton.jit
def gate_up_kernel(
    x, squares, eps, weight, shift, times, out, M, N: tl.constexpr, K: tl.constexpr, SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``gelu(gate) * up`` of the normed rows; weight [2 N, K] holds gate, then up; ``out`` [M, N]."""
    rows = tl.arange(0, BLOCK_M)
    number, partner = pair_ids(tl.program_id(0) * BLOCK_N, BLOCK_N, "dense")  # gate and up of the same feature
    outputs = number + partner * N
    root = inverse_root(load_squares(squares, rows, M), eps, K)[:, None]
    shifted = _load_shift(shift, times, rows, outputs, M, 2 * N, SHIFTED)
    both = _multiply(x, weight, rows, outputs, 0, M, K, K, BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION)
    gate, up = tl.split((both * root + shifted).reshape(BLOCK_M, BLOCK_N, 2))
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + rows[:, None] * N + features[None, :]
    tl.store(at, (tanh_gelu(gate) * up).to(out.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit
def add_kernel(
    x, weight, out, norm, times, scaled, squares, next_squares, partial, counters, M, TIME,
    N: tl.constexpr, K: tl.constexpr, ADAPTIVE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out += [gate *] x @ weight.T`` [M, N], and for the next norm ``scaled`` and ``next_squares``, which were 0.

    ``norm`` as for :func:`add_norm_kernel`. ``squares`` [M] are those of the norm before, which nothing needs any
    more: they become 0. ``partial`` [SPLITS, M, N] and ``counters`` [tiles] are those of programs that share a
    tile; the counters stay 0.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    share: tl.constexpr = K // SPLITS
    at = rows[:, None] * N + outputs[None, :]
    inside = (rows < M)[:, None]
    norm += outputs[None, :]
    if ADAPTIVE:
        norm += tl.load(times + rows, mask=rows < M, other=0)[:, None] * TIME
        gate = tl.load(norm - N)  # of the norm before
    scale, before = tl.load(norm), tl.load(out + at, mask=inside, other=0.0)
    total = _multiply(x, weight, rows, outputs, split * share, M, K, share, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    last = True
    if SPLITS > 1:
        tl.store(partial + split * M * N + at, total, mask=inside)
        tl.debug_barrier()  # every thread has written before the counter says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for one in tl.static_range(SPLITS):
                total += tl.load(partial + one * M * N + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
        if ADAPTIVE:
            total *= gate
        value = (before.to(tl.float32) + total).to(out.dtype.element_ty)
        tl.store(out + at, value, mask=inside)
        tl.store(scaled + at, (value.to(tl.float32) * scale).to(scaled.dtype.element_ty), mask=inside)
        wide = value.to(tl.float64)
        tl.atomic_add(next_squares + rows, tl.sum(wide * wide, axis=1), mask=rows < M, sem="relaxed")
        if tile == 0:
            tl.store(squares + rows, tl.zeros((BLOCK_M,), tl.float64), mask=rows < M)


@triton.jit
def start_kernel(
    tokens, actions, weight, bias, norm, times, hidden, scaled, squares, next_squares, counters, TIME,
    A: tl.constexpr, ADAPTIVE: tl.constexpr, EMBED: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row of ``hidden`` [M, N], and what kernels of few rows need for its first norm.

    The row is that of ``tokens``, or with EMBED the product of ``actions`` [M, A] with ``weight`` [N, A], and
    ``bias`` [N]. ``scaled`` is the row times the norm's scale, ``squares`` the sum of its squares;
    ``next_squares`` and ``counters`` [BLOCK] become 0.
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
    wide = value.to(tl.float64)
    tl.store(squares + row, tl.sum(wide * wide, axis=0))
    tl.store(next_squares + row, 0.0)
    if row == 0:
        tl.store(counters + column, tl.zeros((BLOCK,), tl.int32))


@triton.jit
def advance_kernel(
    x, squares, eps, norm, times, weight, bias, actions, previous, weights, limits, given, ROWS, time, delta,
    factor, TIME, H: tl.constexpr, A: tl.constexpr, ADAPTIVE: tl.constexpr, SCALED: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr,
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
        value *= inverse_root(tl.load(squares + row), eps, N)
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
