"""Attention of few rows to the filled part of the KV cache, attention of whole sequences, greedy sampling."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def merge_softmax(top, norm, mixed, other_top, other_norm, other_mixed):
    """Merge two partial softmaxes: largest score [R], sum of weights [R] and weighted values [R, HEAD] of each."""
    new_top = tl.maximum(top, other_top)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: the weight is 0
    keep, take = tl.exp(top - origin), tl.exp(other_top - origin)
    return new_top, norm * keep + other_norm * take, mixed * keep[:, None] + other_mixed * take[:, None]


@triton.jit
def load_block(keys, values, base, column, end, HEAD: tl.constexpr):
    """Load keys and values of positions before ``end``; zeros for the others."""
    at, there = base + column[:, None] * HEAD + tl.arange(0, HEAD)[None, :], (column < end)[:, None]
    return tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)


@triton.jit
def attend_block(q, k, v, column, position, scale, PRECISION: tl.constexpr):
    """Return the partial softmax of a block: largest score [R], sum of weights [R], weighted values [R, HEAD].

    Queries ``q`` [R, HEAD] at ``position`` [R] see keys and values [C, HEAD] whose ``column`` [C] is no larger.
    """
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    score = tl.where(column[None, :] <= position[:, None], score, float("-inf"))
    top = tl.max(score, axis=1)
    share = tl.exp(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return top, tl.sum(share, axis=1), tl.dot(share.to(v.dtype), v, input_precision=PRECISION)


@triton.jit
def attend_kernel(
    query, keys, values, positions, out, partial, split_counters, ROWS, CAPACITY, scale,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention with SPLITS programs per head: ``query`` [B * ROWS, HEADS, HEAD] to ``out`` of that shape.

    Row r sees the cache up to ``positions[r]``. The loop ends at the last position needed, whatever the capacity.
    Program s processes blocks s, s + SPLITS, ... and writes its partial softmax to ``partial``; the last program to
    finish merges the partial softmaxes in order. ``split_counters`` [B * HEADS] count the finished programs and are
    reset to 0. Blocks that a row does not see leave its bits unchanged, so rows do not depend on each other.
    """
    split, which = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    batch, head = which // HEADS, which % HEADS
    row = tl.arange(0, BLOCK_R)
    feature = tl.arange(0, HEAD)
    inside = row < ROWS
    base = (batch * KV_HEADS + head // (HEADS // KV_HEADS)) * CAPACITY * HEAD
    # The first block is loaded before the positions are known: usually it is the program's only block.
    column = split * BLOCK_C + tl.arange(0, BLOCK_C)
    k, v = load_block(keys, values, base, column, CAPACITY, HEAD)
    position = tl.load(positions + batch * ROWS + row, mask=inside, other=0)
    at = ((batch * ROWS + row)[:, None] * HEADS + head) * HEAD + feature[None, :]
    q = tl.load(query + at, mask=inside[:, None], other=0.0)
    end = tl.max(position, axis=0) + 1
    v = tl.where((column < end)[:, None], v, 0.0)  # their weight is 0, but they may be NaN
    top, norm, mixed = attend_block(q, k, v, column, position, scale, PRECISION)
    for start in range((split + SPLITS) * BLOCK_C, end, SPLITS * BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        k, v = load_block(keys, values, base, column, end, HEAD)
        highest, total, part = attend_block(q, k, v, column, position, scale, PRECISION)
        top, norm, mixed = merge_softmax(top, norm, mixed, highest, total, part)
    if SPLITS > 1:
        size = tl.num_programs(0) * ROWS  # of all parts: sums, then largest scores, then mixed values
        mine = (which * SPLITS + split) * ROWS + row
        tl.store(partial + mine, norm, mask=inside)
        tl.store(partial + size + mine, top, mask=inside)
        tl.store(partial + 2 * size + mine[:, None] * HEAD + feature[None, :], mixed, mask=inside[:, None])
        tl.debug_barrier()  # every thread has written before the counter is incremented
        if tl.atomic_add(split_counters + which, 1, sem="acq_rel") == SPLITS - 1:
            top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            norm = tl.zeros((BLOCK_R,), tl.float32)
            mixed = tl.zeros((BLOCK_R, HEAD), tl.float32)
            for one in tl.static_range(SPLITS):
                theirs = (which * SPLITS + one) * ROWS + row
                # Bypass the L1 cache, which belongs to one multiprocessor and may be stale.
                their_norm = tl.load(partial + theirs, mask=inside, other=1.0, cache_modifier=".cg")
                their_top = tl.load(partial + size + theirs, mask=inside, other=0.0, cache_modifier=".cg")
                there = partial + 2 * size + theirs[:, None] * HEAD + feature[None, :]
                their_mixed = tl.load(there, mask=inside[:, None], other=0.0, cache_modifier=".cg")
                top, norm, mixed = merge_softmax(top, norm, mixed, their_top, their_norm, their_mixed)
            tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
            tl.store(split_counters + which, 0)
    else:
        tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def attend_both_ways_kernel(
    query, keys, values, length, out, ROWS, CAPACITY, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from every row to the first ``length[b]`` positions: ``query`` [B * ROWS, HEADS, HEAD] to ``out``.

    A program computes BLOCK_R rows of one head of one observation. Padding after ``length`` is not read; only the
    last block of positions is masked. The softmax is that of FlashAttention, with exp2.
    """
    head, batch = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    count = tl.load(length + batch)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    feature = tl.arange(0, HEAD)
    at = ((batch * ROWS + row)[:, None] * HEADS + head) * HEAD + feature[None, :]
    inside = (row < ROWS)[:, None]
    q = tl.load(query + at, mask=inside, other=0.0)
    base = (batch * KV_HEADS + head // (HEADS // KV_HEADS)) * CAPACITY * HEAD
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_R,), tl.float32)
    mixed = tl.zeros((BLOCK_R, HEAD), tl.float32)
    whole = count // BLOCK_C * BLOCK_C
    for start in range(0, whole, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        k = tl.load(keys + base + column[None, :] * HEAD + feature[:, None])
        v = tl.load(values + base + column[:, None] * HEAD + feature[None, :])
        score = tl.dot(q, k, input_precision=PRECISION) * (scale * 1.4426950408889634)
        top, norm, mixed = add_block(score, v, top, norm, mixed, PRECISION)
    if whole < count:
        column = whole + tl.arange(0, BLOCK_C)
        there = column < count
        k = tl.load(keys + base + column[None, :] * HEAD + feature[:, None], mask=there[None, :], other=0.0)
        v = tl.load(values + base + column[:, None] * HEAD + feature[None, :], mask=there[:, None], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * (scale * 1.4426950408889634)
        score = tl.where(there[None, :], score, float("-inf"))
        top, norm, mixed = add_block(score, v, top, norm, mixed, PRECISION)
    tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_block(score, v, top, norm, mixed, PRECISION: tl.constexpr):
    """Add a block of positions to a running softmax; scores are pre-scaled by log2(e), for exp2."""
    new_top = tl.maximum(top, tl.max(score, axis=1))
    share, keep = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
    mixed = tl.dot(share.to(v.dtype), v, mixed * keep[:, None], input_precision=PRECISION)
    return new_top, norm * keep + tl.sum(share, axis=1), mixed


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
def attend_prefix_kernel(
    query, keys, values, ends, out, ROWS, CAPACITY, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of BLOCK_R (row, head) pairs of one kv head: ``query`` [B * ROWS, HEADS, HEAD] to ``out``.

    Heads that share keys are rows of one product. Row r sees the cache before ``ends[r]``; the loop ends at the
    last position needed. WIDTH is HEAD, padded to a power of two.
    """
    which, feature = tl.program_id(1), tl.arange(0, WIDTH)
    whole: tl.constexpr = WIDTH == HEAD
    pair, inside, end = locate_pairs(tl.program_id(0), which, ends, ROWS, HEADS, KV_HEADS, BLOCK_R)
    at = pair[:, None] * HEAD + feature[None, :]
    exists = inside[:, None] if whole else inside[:, None] & (feature < HEAD)[None, :]
    q = tl.load(query + at, mask=exists, other=0.0)
    base = which * CAPACITY * HEAD
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_R,), tl.float32)
    mixed = tl.zeros((BLOCK_R, WIDTH), tl.float32)
    last = tl.max(end, axis=0)
    for start in range(0, last, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        place = base + column[:, None] * HEAD + feature[None, :]
        # The cache has whole blocks. Unseen scores are masked, but an unseen NaN value times a weight of 0 is NaN.
        seen = (column < last)[:, None] if whole else (column < last)[:, None] & (feature < HEAD)[None, :]
        k = tl.load(keys + place) if whole else tl.load(keys + place, mask=seen, other=0.0)
        v = tl.load(values + place, mask=seen, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(column[None, :] < end[:, None], score, float("-inf"))
        top, norm, mixed = add_block(score, v, top, norm, mixed, PRECISION)
    tl.store(out + at, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=exists)


@triton.jit
def choose_kernel(logits, tokens, margins, N, BLOCK: tl.constexpr):
    """Find the largest of each row of ``logits`` [M, N] (the first of equals) and its margin over the second."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        column = start + lane
        value = tl.load(logits + row * N + column, mask=column < N, other=float("-inf")).to(tl.float32)
        wrong += (value != value).to(tl.int32)
        second = tl.where(value > best, best, tl.maximum(second, value))
        index = tl.where(value > best, column, index)
        best = tl.maximum(best, value)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, index, N), axis=0)
    others = tl.where((best == top) & (index == winner), second, best)
    tl.store(tokens + row, winner.to(tl.int64))
    margin = top - tl.max(others, axis=0)
    # Comparisons ignore NaN, so a row with NaN gets a NaN margin.
    tl.store(margins + row, tl.where(tl.sum(wrong, axis=0) > 0, float("nan"), margin))
