"""A barrier of all programs of one kernel, for kernels that run several dependent stages."""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grid_barrier(counter, target):
    """Wait until ``counter`` reaches ``target``; what was written before is visible behind it.

    All programs must run at once: at most one per multiprocessor. Each of them counts 1, so ``target`` is the
    number of programs times that of barriers so far. One thread polls, by an atomic operation (0.9 us for 132
    programs of an H200; 1.1 to 1.35 us if every thread polls by a load).
    """
    tl.debug_barrier()  # every thread has written before the counter says so
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass


@triton.jit
def leave_grid(counter, barriers):
    """Replace the last barrier: the last program to leave sets ``counter`` to 0 for the next launch."""
    if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == (barriers + 1) * tl.num_programs(0) - 1:
        tl.store(counter, 0)
