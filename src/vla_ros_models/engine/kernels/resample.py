"""Steps of :mod:`vla_ros_models.engine.resample` in one kernel each, with bit-identical results.

Compile with ``enable_fp_fusion=False``: a fused multiply-add would round only once.
"""

import triton
import triton.language as tl

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors


@triton.jit
def float_resize_kernel(
    images, rows, row_weights, columns, column_weights, out, H, W, HEIGHT, WIDTH, ROW_TAPS, COLUMN_TAPS, levels,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Resize ``images`` uint8 [B, H, W, 3] to ``out`` [B, HEIGHT, WIDTH, 3]; a program has BLOCK values of a row.

    ``rows`` [HEIGHT, ROW_TAPS] and ``columns`` [WIDTH, COLUMN_TAPS] are source positions. Taps are added in
    order. ``out`` is uint8 or, with the values ``levels`` [256] of the pixels, float32 in [0, 1].
    """
    y, first = tl.program_id(0) % HEIGHT, tl.program_id(0) // HEIGHT * H
    level = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = level < WIDTH * 3
    x = level // 3
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(0, COLUMN_TAPS):
        column = tl.load(columns + x * COLUMN_TAPS + tap, mask=inside, other=0) * 3 + level % 3
        value = tl.zeros((BLOCK,), tl.float32)
        for other in range(0, ROW_TAPS):
            row = first + tl.load(rows + y * ROW_TAPS + other)
            pixel = tl.load(images + row * W * 3 + column, mask=inside, other=0)
            seen = pixel.to(tl.float32) if levels is None else tl.load(levels + pixel.to(tl.int32))
            value += seen * tl.load(row_weights + y * ROW_TAPS + other)
        total += value * tl.load(column_weights + x * COLUMN_TAPS + tap, mask=inside, other=0.0)
    total = tl.clamp(total, 0.0, 255.0 if levels is None else 1.0)
    if levels is None:
        total = total + 12582912.0 - 12582912.0  # 1.5 * 2^23: rounds half to even
    tl.store(out + tl.program_id(0) * WIDTH * 3 + level, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def taps_kernel(images, positions, weights, out, N, M, C, TAPS, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Resize ``images`` uint8 [A, N, C] to ``out`` [A, M, C] in fixed point; a program computes BLOCK values.

    ``positions`` and ``weights``, multiples of 2^-BITS, are [TAPS, M].
    """
    blocks = tl.cdiv(M * C, BLOCK)
    image, value = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside, sample = value < M * C, value // C
    total = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    for tap in range(0, TAPS):
        place = image * N + tl.load(positions + tap * M + sample, mask=inside, other=0)
        seen = tl.load(images + place * C + value % C, mask=inside, other=0).to(tl.int32)
        total += seen * tl.load(weights + tap * M + sample, mask=inside, other=0)
    level = tl.minimum(tl.maximum(total >> BITS, 0), 255)
    tl.store(out + image * M * C + value, level.to(tl.uint8), mask=inside)


@triton.jit
def crop_kernel(
    images, above, below, left, right, across, down, out, H, W, HEIGHT, WIDTH, unit, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply TensorFlow's ``crop_and_resize``: ``images`` uint8 [B, H, W, 3] to ``out`` [B, HEIGHT, WIDTH, 3].

    A sample is interpolated between rows ``above``, ``below`` [HEIGHT] and columns ``left``, ``right`` [WIDTH].
    """
    y, first = tl.program_id(0) % HEIGHT, tl.program_id(0) // HEIGHT * H
    level = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = level < WIDTH * 3
    x = level // 3
    share = tl.load(across + x, mask=inside, other=0.0)
    one = tl.load(left + x, mask=inside, other=0) * 3 + level % 3
    other = tl.load(right + x, mask=inside, other=0) * 3 + level % 3
    top = interpolate(images + (first + tl.load(above + y)) * W * 3, one, other, share, unit, inside)
    bottom = interpolate(images + (first + tl.load(below + y)) * W * 3, one, other, share, unit, inside)
    value = top + (bottom - top) * tl.load(down + y)
    tl.store(
        out + tl.program_id(0) * WIDTH * 3 + level, (tl.clamp(value, 0.0, 1.0) * 255.5).to(tl.uint8), mask=inside
    )


@triton.jit
def interpolate(row, one, other, share, unit, inside):
    """Interpolate between two columns of a row; return values in [0, 1]."""
    left = tl.load(row + one, mask=inside, other=0).to(tl.float32) * unit
    right = tl.load(row + other, mask=inside, other=0).to(tl.float32) * unit
    return left + (right - left) * share


@triton.jit
def code_kernel(
    images, to_ycc, offsets, forward, before, factors, after, steps, scales, luma, chroma, H, W,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Encode and decode the planes of ``images`` uint8 [B, H, W, 3]; one program per 16 x 16 pixels.

    Each image has ROWS x COLUMNS programs. ``luma`` uint8 [B, 16 ROWS, 16 COLUMNS]; ``chroma`` [B, 2, 8 ROWS,
    8 COLUMNS]. ``steps`` and ``scales`` [2, 8, 8] are for luma and chroma; ``before`` [8, 8] and ``after`` [8, 16]
    are padded with zeros.
    """
    image, tile = tl.program_id(0) // (ROWS * COLUMNS), tl.program_id(0) % (ROWS * COLUMNS)
    block = tl.arange(0, 4)[:, None, None]
    row, column = tl.arange(0, 8)[None, :, None], tl.arange(0, 8)[None, None, :]
    y, x = tile // COLUMNS * 16 + block // 2 * 8 + row, tile % COLUMNS * 16 + block % 2 * 8 + column
    value = component(images, to_ycc, offsets, image, y, x, H, W, 0)
    value = code(value, forward, before, factors, after, steps, scales)
    tl.store(luma + (image * 16 * ROWS + y) * 16 * COLUMNS + x, value.to(tl.uint8))
    y, x = tile // COLUMNS * 8 + row, tile % COLUMNS * 8 + column
    y = tl.minimum(y, (H + 1) // 2 - 1)  # padding repeats the last row of samples, but the last column of pixels
    for plane in tl.static_range(2):
        total = (1 + x % 2).to(tl.int32)
        for corner in tl.static_range(4):
            total += component(
                images, to_ycc, offsets, image, 2 * y + corner // 2, 2 * x + corner % 2, H, W, plane + 1
            )
        value = code(total >> 2, forward, before, factors, after, steps + 64, scales + 64)
        to = chroma + ((image * 2 + plane) * 8 * ROWS + tile // COLUMNS * 8 + row) * 8 * COLUMNS
        tl.store(to + x, value.to(tl.uint8))


@triton.jit
def component(images, to_ycc, offsets, image, y, x, H, W, which: tl.constexpr):
    """Return luma, Cb or Cr of pixels; beyond the border the last pixel is repeated."""
    at = images + ((image * H + tl.minimum(y, H - 1)) * W + tl.minimum(x, W - 1)) * 3
    total = tl.load(offsets + which)
    for colour in tl.static_range(3):
        total += tl.load(at + colour).to(tl.int32) * tl.load(to_ycc + 3 * which + colour)
    return total >> 16


@triton.jit
def code(blocks, forward, before, factors, after, steps, scales):
    """Quantise the DCT of ``blocks`` [A, 8, 8] and invert it: values from 0 to 255."""
    row, column = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
    table = row * 8 + column
    dct = tl.load(forward + table)
    value = (_multiply(blocks - 128, dct) + 1024) >> 11
    value = ((_multiply(value.permute(0, 2, 1), dct) + 16384) >> 15).permute(0, 2, 1)
    step = tl.load(steps + table)[None]
    level = (tl.abs(value) + step // 2) // step
    value = tl.where(value < 0, -level, level) * tl.load(scales + table)[None]
    taken, factor = tl.load(before + table), tl.load(factors + tl.arange(0, 8))[None, None, :]
    first, second = tl.load(after + row * 16 + column), tl.load(after + row * 16 + 8 + column)
    for _ in tl.static_range(2):
        value = value.permute(0, 2, 1)
        products = (_multiply(value, taken) * factor) >> 8
        value = _multiply(value, first) + _multiply(products, second)
    return tl.minimum(tl.maximum((value >> 5) + 128, 0), 255)


@triton.jit
def _multiply(x, matrix):
    """Multiply ``x`` [A, 8, 8] by ``matrix`` [8, 8] along the last axis."""
    return tl.sum(x[:, :, None, :] * matrix[None, None, :, :], axis=3)


@triton.jit
def merge_kernel(
    luma, chroma, from_chroma, out, H, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Enlarge the planes of :func:`code_kernel` and convert them: ``out`` uint8 [B, H, W, 3].

    A program computes BLOCK pixels of a row. A sample is three quarters of the nearest sample plus a quarter of the
    next nearest.
    """
    image, y = tl.program_id(0) // H, tl.program_id(0) % H
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < W
    near = x // 2
    beside = tl.minimum(tl.maximum(near + x % 2 * 2 - 1, 0), (W + 1) // 2 - 1)
    other = tl.minimum(tl.maximum(y // 2 + y % 2 * 2 - 1, 0), (H + 1) // 2 - 1)
    planes = chroma + image * 128 * ROWS * COLUMNS
    blue = enlarged(planes, y // 2, other, near, beside, 8 - x % 2, inside, COLUMNS)
    red = enlarged(planes + 64 * ROWS * COLUMNS, y // 2, other, near, beside, 8 - x % 2, inside, COLUMNS)
    light = tl.load(luma + (image * 16 * ROWS + y) * 16 * COLUMNS + x, mask=inside, other=0).to(tl.int32)
    for colour in tl.static_range(3):
        factors = from_chroma + 2 * colour
        added = (blue * tl.load(factors) + red * tl.load(factors + 1) + 32768) >> 16
        level = tl.minimum(tl.maximum(light + added, 0), 255)
        tl.store(out + (tl.program_id(0) * W + x) * 3 + colour, level.to(tl.uint8), mask=inside)


@triton.jit
def enlarged(plane, row, other, near, beside, rounding, inside, COLUMNS: tl.constexpr):
    """Interpolate between ``row`` and ``other``, and between columns ``near`` and ``beside``; subtract 128."""
    total = rounding
    for column in tl.static_range(2):
        at = beside if column else near
        tall = 3 * tl.load(plane + row * 8 * COLUMNS + at, mask=inside, other=0).to(tl.int32)
        tall += tl.load(plane + other * 8 * COLUMNS + at, mask=inside, other=0).to(tl.int32)
        total += tall if column else 3 * tall
    return (total >> 4) - 128
