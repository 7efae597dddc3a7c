"""The operations between the matrix products of a vision transformer; each tensor is read and written once.

Every step rounds like a separate operation, so that only the order of a norm's sums differs from torch. Compile
with ``enable_fp_fusion=False``: a fused multiply-add would round only once.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


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

    One program per token. With FILM, the sum is multiplied by ``factor`` [N] and shifted by ``offset`` [N] first.
    """
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = tl.program_id(0) * N + column
    # All loads are issued before the first is used.
    value = tl.load(tokens + at, mask=inside, other=0.0)
    added = tl.load(branch + at, mask=inside, other=0.0)
    if SCALED:
        added = _multiply(added, tl.load(scale + column, mask=inside, other=0.0))
    weight = tl.load(gain + column, mask=inside, other=0.0)
    shift = tl.load(bias + column, mask=inside, other=0.0)
    value = _add(value, added)
    if FILM:
        value = _multiply(value, tl.load(factor + column, mask=inside, other=0.0))
        value = _add(value, tl.load(offset + column, mask=inside, other=0.0))
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
