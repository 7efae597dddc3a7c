"""The tile and the pipeline of a kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Tile and pipeline of a kernel, which ignores the fields that it does not need."""

    # Outputs per program (pairs for ``qkv`` and ``gate_up``; for one row with packed weights). Attention: cache
    # positions per iteration, or per program if programs split the positions.
    block_n: int = 16
    # Inputs per iteration of the K loop of few rows. The warps split the inputs, and their sums are added after the
    # loop, so ``block_k`` and ``warps`` determine the order of summation.
    block_k: int = 256
    warps: int = 4  # warps per program
    stages: int = 4  # pipeline stages: one iteration is multiplied while the others load
    # Programs that share the inputs of one tile; their sums are added in a fixed order. ``attend``: programs that
    # share a head; program s processes blocks s, s + splits, ... ``attend_flow``: 1 if one program processes all
    # blocks, otherwise each block has its own.
    splits: int = 1
    block_m: int = 128  # many rows: rows per program, a power of two; attention: (row, head) pairs per program
    tail_m: int = 16  # many rows: additional rows, 0 or a power of two of at least 16
    # Maximum registers per thread; None lets the compiler choose. 128 lets two programs of 8 warps run on one
    # multiprocessor.
    max_registers: int | None = None
    # K-groups (:mod:`vla_ros_models.engine.lowbit`) per iteration of many rows. With more of them, each takes fewer
    # instructions, but the program needs more shared memory.
    k_groups: int = 1
