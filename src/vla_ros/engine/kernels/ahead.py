"""Asking for weights before they are needed: they come into the L2 cache while other kernels still run."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ask_for(data, count, share, shares, LANES: tl.constexpr):
    """Start to bring the first ``count`` bytes of ``data`` into the L2 cache: one share of ``shares``.

    Nothing waits for what comes, and no number changes. Each of LANES threads asks for one stretch, in multiples of
    128 bytes. Needs compute capability 9.0 (PTX ISA, ``cp.async.bulk.prefetch``); LANES = 0 asks for nothing.
    """
    if LANES > 0:
        stretch = (count + shares * LANES * 128 - 1) // (shares * LANES * 128) * 128
        first = (share * LANES + tl.arange(0, LANES)) * stretch
        size = tl.minimum(tl.maximum(count - first, 0), stretch) // 16 * 16
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred some;
            setp.gt.s32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [data.to(tl.int64) + first, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
