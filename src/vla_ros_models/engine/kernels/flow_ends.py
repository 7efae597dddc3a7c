"""The start and the end of a flow step of few rows, beside the layers in ``flow``; keys of another model."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
import triton
import triton.language as tl

from vla_ros_models.engine.kernels.flow import root


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
    inner, second, bias, norm, hidden, scaled, squares, spare, counters, M, count, K: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, first=None, places=None, ROWS=1,
):  # fmt: skip
    """Like :func:`start_kernel`, for rows ``inner`` [M, K] @ ``second`` [K, K].T + ``bias`` [K]; BLOCK_N features.

    ``second`` is float32 and multiplied in the type of ``inner``. With ``first`` [B, K], the row in ``first`` comes
    before the ROWS - 1 rows of each observation, which ``places`` [ROWS - 1, K] are added to.
    """
    tile, rows = tl.program_id(0), tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None]
    scale, constant = tl.load(norm + outputs), tl.load(bias + outputs)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    at = rows[:, None] * K + outputs[None, :]
    source, given = rows, inside
    if first is not None:
        batch, action = rows // ROWS, rows % ROWS - 1
        source, given = rows - batch - 1, (action >= 0)[:, None] & inside
        begins = (action < 0)[:, None] & inside
        head = tl.load(first + batch[:, None] * K + outputs[None, :], mask=begins, other=0.0)
        added = tl.load(places + action[:, None] * K + outputs[None, :], mask=given, other=0.0)
    for start in range(0, count, BLOCK_K):
        feature = start + tl.arange(0, BLOCK_K)
        some = tl.load(inner + source[:, None] * K + feature[None, :], mask=given, other=0.0)
        part = tl.load(second + outputs[:, None] * K + feature[None, :]).to(some.dtype)
        total = tl.dot(some, tl.trans(part), total, input_precision=PRECISION)
    total += constant[None, :]
    if first is not None:
        total = tl.where(given, total + added, head)
    value = total.to(hidden.dtype.element_ty)
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
def flow_linear_kernel(
    x, squares, eps, weight, bias, out, factor, M, ROWS, EACH, count, N: tl.constexpr, K: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALED: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Apply a float32 layer and an ACTIVATION (or none) to the last EACH of ROWS rows: ``out`` [M, N].

    With SCALED, ``x`` [.., K] is a stream times its norm's scale, with its sums of ``squares``. With ``factor``
    [M], the result times the row's factor is added to ``out``.
    """
    rows, outputs = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = rows // EACH * ROWS + ROWS - EACH + rows % EACH
    inside, exists = (rows < M)[:, None], outputs < N
    constant = tl.load(bias + outputs, mask=exists, other=0.0)
    at = rows[:, None] * N + outputs[None, :]
    there = inside & exists[None, :]
    if factor is not None:
        before = tl.load(out + at, mask=there, other=0.0)
        share = tl.load(factor + rows, mask=rows < M, other=0.0)
    if SCALED:
        place = squares + tl.arange(0, TILES)[:, None] * BLOCK_M + source[None, :]
        sums = tl.load(place, mask=(rows < M)[None, :], other=1.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, count, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        whole = columns < K
        known = exists[:, None] & whole[None, :]
        part = tl.load(weight + outputs[:, None] * K + columns[None, :], mask=known, other=0.0)
        some = tl.load(x + source[:, None] * K + columns[None, :], mask=inside & whole[None, :], other=0.0)
        total = tl.dot(some, tl.trans(part.to(some.dtype)), total, input_precision=PRECISION)
    if SCALED:
        total *= root(sums, eps, K)[:, None]
    total += constant[None, :]
    if ACTIVATION == "silu":
        total *= tl.sigmoid(total)
    if ACTIVATION == "relu":
        total = tl.maximum(total, 0.0)
    if factor is not None:
        total = before + share[:, None] * total
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


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
        value *= root(tl.load(squares + tl.arange(0, TILES) * BLOCK_M + row), eps, N)
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


@triton.jit
def cross_kernel(
    keys, values, key_weight, value_weight, to_keys, to_values, C, CAPACITY, count, HEADS: tl.constexpr,
    HEAD: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Project ``keys`` and ``values`` [B, HEADS, C, HEAD] to ``to_..`` [B, KV_HEADS, CAPACITY, WIDTH].

    ``count`` is HEADS, hidden from the compiler. A program computes BLOCK_C keys or values of one head.
    """
    source, weight, to = keys, key_weight, to_keys
    if tl.program_id(2) == 1:
        source, weight, to = values, value_weight, to_values
    which, column = tl.program_id(1), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    feature, number = tl.arange(0, HEAD), tl.arange(0, WIDTH)
    total = tl.zeros((BLOCK_C, WIDTH), tl.float32)
    for head in range(0, count):
        place = (which // KV_HEADS * HEADS + head) * C + column
        some = tl.load(source + place[:, None] * HEAD + feature[None, :])
        at = (which % KV_HEADS * WIDTH + number)[:, None] * (HEADS * HEAD) + head * HEAD + feature[None, :]
        total = tl.dot(some, tl.trans(tl.load(weight + at)), total, input_precision=PRECISION)
    place = to + (which * CAPACITY + column)[:, None] * WIDTH + number[None, :]
    tl.store(place, total.to(to.dtype.element_ty))
