"""The elementwise operations of a prefill, fused so that each tensor is read and written once."""

import triton
import triton.language as tl

from vla_ros_models.engine.kernels.linear import saturate, store_rotated

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors


@triton.jit
def fp8_scale(largest):
    """Return the FP8 scale of a row, given its largest magnitude, which becomes 448."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def store_fp8(value, scale, out, sums, row, start, N, GROUPED: tl.constexpr):
    """Store ``value / scale`` [BLOCK] in a row, from column ``start``; values beyond column N are zero.

    With GROUPED, in the order of ``engine.lowbit.reorder``, and each group's sum times 2^-9 in ``sums``.
    """
    size: tl.constexpr = value.shape[0]
    column, end = start + tl.arange(0, size), N
    number = (value.to(tl.float32) * (1.0 / scale)).to(out.dtype.element_ty)
    if GROUPED:
        count = (N + 127) // 128
        group = start // 128 + tl.arange(0, size // 128)
        total = tl.sum(number.to(tl.float32).reshape(size // 128, 128), axis=1)
        tl.store(sums + row * count + group, total * 0.001953125, mask=group < count)
        number = number.reshape(size // 128, 2, 2, 2, 2, 4, 2).permute(0, 4, 1, 3, 5, 6, 2).reshape(size)
        end = count * 128
    tl.store(out + row * end + column, number, mask=column < end)


@triton.jit
def quantize_kernel(x, out, scales, sums, GROUPED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise ``x`` [M, N] to FP8 with scales [M]; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * N + column, mask=column < N, other=0.0)
    scale = fp8_scale(tl.max(tl.abs(value.to(tl.float32)), axis=0))
    tl.store(scales + row, scale)
    store_fp8(value, scale, out, sums, row, 0, N, GROUPED)


@triton.jit
def rms_norm_kernel(
    x, branch, row_scale, column_scale, norm, out, scales, sums, eps,
    PARTS: tl.constexpr, FP8: tl.constexpr, GROUPED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the scaled sum of ``branch`` [PARTS, M, N] to ``x`` [M, N], and store its norm; one program per row.

    The norm is rounded before the weight is applied, as in Llama; with FP8, the result is quantised with ``scales``
    [M]. PARTS may be 0; ``row_scale`` [M] and ``column_scale`` [N] may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row * N + column
    weight = tl.load(norm + column, mask=inside, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(branch + part * tl.num_programs(0) * N + at, mask=inside, other=0.0)
        if column_scale is not None:
            added *= tl.load(column_scale + column, mask=inside, other=0.0)
        if row_scale is not None:
            added *= tl.load(row_scale + row)
        total = (value + added).to(x.dtype.element_ty)
        tl.store(x + at, total, mask=inside)
        value = total.to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, axis=0) / N + eps)
    normed = (value * root).to(x.dtype.element_ty) * weight
    if FP8:
        scale = fp8_scale(tl.max(tl.abs(normed.to(tl.float32)), axis=0))
        tl.store(scales + row, scale)
        store_fp8(normed, scale, out, sums, row, 0, N, GROUPED)
    else:
        tl.store(out + at, normed, mask=inside)


@triton.jit
def gather_kernel(table, index, hidden, norm, scaled, squares, next_squares, N: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``hidden`` [M, N] = ``table[index]`` and the inputs of its norm; one program per row.

    ``scaled`` [M, N] is the row times the norm's weight; ``squares`` [M], float64, is the sum of the row's squares;
    ``next_squares`` [M] is set to 0.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row.to(tl.int64) * N + column
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(table + tl.load(index + row) * N + column, mask=inside, other=0.0)
    tl.store(hidden + at, value, mask=inside)
    tl.store(scaled + at, saturate(value.to(tl.float32) * weight, scaled.dtype.element_ty), mask=inside)
    wide = value.to(tl.float64)
    tl.store(squares + row, tl.sum(wide * wide, axis=0))
    tl.store(next_squares + row, 0.0)


@triton.jit
def rotate_kernel(
    qkv, positions, cosine, sine, query, keys, values, ROWS, CAPACITY,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_H: tl.constexpr,
    row_scale=None, column_scale=None, SCALED: tl.constexpr = False, query_norm=None, key_norm=None, eps=0.0,
    BY_ROW: tl.constexpr = False,
):  # fmt: skip
    """Rotate ``qkv`` [B * ROWS, (HEADS + 2 KV_HEADS) * HEAD] and store it; one program per row and BLOCK_H heads.

    ``query`` [B * ROWS, HEADS, HEAD]; ``keys`` and ``values`` [B, KV_HEADS, CAPACITY, HEAD]. With SCALED, ``qkv``
    is multiplied by the scales of its row and of its columns first. ``query_norm`` and ``key_norm`` [HEAD] are the
    weights of RMS norms of each head before it is rotated. BY_ROW finds ``cosine`` and ``sine`` by row instead of
    position.
    """
    half: tl.constexpr = HEAD // 2
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    feature = tl.arange(0, half)
    position = tl.load(positions + row)
    angle = (row if BY_ROW else position) * half + feature
    cos, sin = tl.load(cosine + angle)[None, :], tl.load(sine + angle)[None, :]
    source = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD) + head[:, None] * HEAD + feature[None, :]
    there = (head < HEADS + 2 * KV_HEADS)[:, None]
    first = tl.load(qkv + source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(qkv + source + half, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(row_scale + row)
        columns = head[:, None] * HEAD + feature[None, :]
        first *= tl.load(column_scale + columns, mask=there, other=0.0) * factor
        second *= tl.load(column_scale + columns + half, mask=there, other=0.0) * factor
    if query_norm is not None:
        is_query, normed = (head < HEADS)[:, None], (head < HEADS + KV_HEADS)[:, None]
        root = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD + eps)[:, None]
        low = tl.where(is_query, tl.load(query_norm + feature)[None, :], tl.load(key_norm + feature)[None, :])
        high = tl.where(
            is_query, tl.load(query_norm + half + feature)[None, :], tl.load(key_norm + half + feature)[None, :]
        )
        kind = query.dtype.element_ty
        first = tl.where(normed, ((first * root).to(kind) * low).to(tl.float32), first)
        second = tl.where(normed, ((second * root).to(kind) * high).to(tl.float32), second)
    store_rotated(
        first, second, cos, sin, row, position, head[:, None], feature[None, :], there, query, keys,
        values, ROWS, CAPACITY, HEADS, KV_HEADS, HEAD,
    )  # fmt: skip


@triton.jit
def gated(both, row_scale, column_scale, row, column, N, SCALED: tl.constexpr):
    """Return ``silu(gate) * up`` of some columns of a row of ``both`` [M, 2 N]."""
    inside = column < N
    gate = tl.load(both + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(row_scale + row)
        gate *= tl.load(column_scale + column, mask=inside, other=0.0) * factor
        up *= tl.load(column_scale + N + column, mask=inside, other=0.0) * factor
    return (gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up).to(both.dtype.element_ty)


@triton.jit
def silu_multiply_kernel(
    both, row_scale, column_scale, out, scales, sums, N,
    SCALED: tl.constexpr, FP8: tl.constexpr, GROUPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store ``silu(gate) * up`` of ``both`` [M, 2 N] (gate, then up) in ``out`` [M, N].

    With SCALED, ``both`` is multiplied by the scales of its row and of its columns first. With FP8, ``out``
    is quantised with ``scales`` [M]; a program computes a whole row twice, first to find its largest magnitude.
    """
    row = tl.program_id(0).to(tl.int64)
    if FP8:
        top = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            value = gated(both, row_scale, column_scale, row, start + tl.arange(0, BLOCK), N, SCALED)
            top = tl.maximum(top, tl.abs(value.to(tl.float32)))
        scale = fp8_scale(tl.max(top, axis=0))
        tl.store(scales + row, scale)
        for start in range(0, N, BLOCK):
            value = gated(both, row_scale, column_scale, row, start + tl.arange(0, BLOCK), N, SCALED)
            store_fp8(value, scale, out, sums, row, start, N, GROUPED)
    else:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = gated(both, row_scale, column_scale, row, column, N, SCALED)
        tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def add_norm_kernel(
    hidden, branch, norm, times, out, scales, eps, TIME, ADAPTIVE: tl.constexpr, BRANCH: tl.constexpr,
    QUANTIZE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``[gate *] branch`` to ``hidden`` [M, N] in place, then store its norm; one program per row.

    ``norm`` points to the norm's scale and shift at the first time, which follow the previous norm's gate in
    memory; those of the next time are TIME numbers further.
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
        wide = _quantized(wide, scales + row)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantized(row, to):
    """Return a float32 row divided by its FP8 scale, and store the scale."""
    scale = fp8_scale(tl.max(tl.abs(row), axis=0))
    tl.store(to, scale)
    return row / scale


@triton.jit
def gelu_multiply_kernel(both, out, scales, N, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``gelu(gate) * up`` of ``both`` [M, 2 N] (gate, then up) in ``out`` [M, N].

    With QUANTIZE, one program handles a whole row and writes its scale to ``scales``.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    gate = tl.load(both + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    value = tanh_gelu(gate) * up
    if QUANTIZE:
        value = _quantized(value, scales + row)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tanh_gelu(x):
    """Return the tanh form of GELU, float32."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def patchify_kernel(
    images, table, out, SIDE: tl.constexpr, PATCH: tl.constexpr, TOWERS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Split ``images`` uint8 [B, H, W, 3] into ``out`` [TOWERS, B * patches, WIDTH]; one program per patch.

    ``table`` [TOWERS, 3, 256] maps a byte to its normalised value. ``SIDE`` is the number of patches across. Zeros
    follow the 3 * PATCH * PATCH values.
    """
    length: tl.constexpr = 3 * PATCH * PATCH
    patch = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < length
    channel, y, x = at // (PATCH * PATCH), at // PATCH % PATCH, at % PATCH
    row = (patch // SIDE) * PATCH + y  # of all images, stacked vertically
    source = (row * (SIDE * PATCH) + (patch % SIDE) * PATCH + x) * 3 + channel
    value = tl.load(images + source, mask=inside, other=0).to(tl.int32)
    for tower in tl.static_range(TOWERS):
        pixel = tl.load(table + (tower * 3 + channel) * 256 + value, mask=inside, other=0.0)
        tl.store(out + (tower * tl.num_programs(0) + patch) * WIDTH + at, pixel, mask=at < WIDTH)


@triton.jit
def embed_kernel(
    patches, positions, prefix, gain, bias, tokens, out, eps,
    ROWS: tl.constexpr, PREFIX: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``prefix`` [PREFIX, N], followed by ``patches`` [B, ROWS - PREFIX, N] plus ``positions``.

    The result goes to ``tokens`` [B, ROWS, N], its layer norm to ``out``; one program per token.
    """
    token = tl.program_id(0)
    row = token % ROWS
    column = tl.arange(0, BLOCK)
    inside = column < N
    is_patch = inside & (row >= PREFIX)
    patch = (token // ROWS) * (ROWS - PREFIX) + row - PREFIX
    embedded = tl.load(patches + patch * N + column, mask=is_patch, other=0.0)
    position = tl.load(positions + (row - PREFIX) * N + column, mask=is_patch, other=0.0)
    value = _add(embedded, position)
    if PREFIX > 0:
        first = tl.load(prefix + row * N + column, mask=inside & (row < PREFIX), other=0.0)
        value = tl.where(row < PREFIX, first, value)
    weight = tl.load(gain + column, mask=inside, other=0.0)
    shift = tl.load(bias + column, mask=inside, other=0.0)
    tl.store(tokens + token * N + column, value, mask=inside)
    normed = _layer_norm(value, weight, shift, inside, eps, N)
    tl.store(out + token * N + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tower_add_norm_kernel(
    tokens, branch, scale, gain, bias, factor, offset, out, eps,
    SCALED: tl.constexpr, FILM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``[scale *] branch`` to ``tokens`` [M, N] in place; write the layer norm to ``out``.

    One program per token. ``branch`` may be None. With FILM, the sum is multiplied by ``factor`` [N] and shifted by
    ``offset`` [N] first.
    """
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = tl.program_id(0) * N + column
    # All loads are issued before the first is used.
    value = tl.load(tokens + at, mask=inside, other=0.0)
    if branch is not None:
        added = tl.load(branch + at, mask=inside, other=0.0)
    if SCALED:
        added = _multiply(added, tl.load(scale + column, mask=inside, other=0.0))
    weight = tl.load(gain + column, mask=inside, other=0.0)
    shift = tl.load(bias + column, mask=inside, other=0.0)
    if branch is not None:
        value = _add(value, added)
    if FILM:
        value = _multiply(value, tl.load(factor + column, mask=inside, other=0.0))
        value = _add(value, tl.load(offset + column, mask=inside, other=0.0))
    if branch is not None:
        tl.store(tokens + at, value, mask=inside)
    normed = _layer_norm(value, weight, shift, inside, eps, N)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tower_add_kernel(
    tokens, branch, scale, out, stride,
    ROWS: tl.constexpr, PREFIX: tl.constexpr, SCALED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store ``tokens + [scale *] branch`` [B, ROWS, N] without the first PREFIX rows; one program per patch.

    Rows of ``out`` [B * (ROWS - PREFIX), N] are ``stride`` apart, as parts of wider rows.
    """
    patch = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = (patch // (ROWS - PREFIX) * ROWS + PREFIX + patch % (ROWS - PREFIX)) * N + column
    value = tl.load(tokens + at, mask=inside, other=0.0)
    added = tl.load(branch + at, mask=inside, other=0.0)
    if SCALED:
        added = _multiply(added, tl.load(scale + column, mask=inside, other=0.0))
    tl.store(out + patch * stride + column, _add(value, added), mask=inside)


@triton.jit
def _add(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def _multiply(a, b):
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def _layer_norm(value, gain, bias, inside, eps, N: tl.constexpr):
    """Return the layer norm, float32; the last step is fused as in torch's kernel."""
    wide = value.to(tl.float32)
    off = tl.where(inside, wide - tl.sum(wide, axis=0) / N, 0.0)
    scale = tl.rsqrt(tl.sum(off * off, axis=0) / N + eps)
    return tl.fma(off * scale, gain.to(tl.float32), bias.to(tl.float32))
