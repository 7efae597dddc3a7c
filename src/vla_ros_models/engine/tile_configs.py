"""Chooses the tile and the pipeline of each kernel for a GPU.

:func:`choose_tile` is the only place where this is decided. ``vla-ros tune`` measures tiles on a GPU
(:mod:`vla_ros_models.engine.tile_store`); all others come from the tables below, reduced until they fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from vla_ros.errors import ConfigError
from vla_ros_models.engine.lowbit import ALIGN_K, BITS, k_group
from vla_ros_models.engine.tile import Tile

SKINNY = 64
"""Maximum rows of a few-row product, which is bound by reading its weight and does not quantise its rows."""

PACKED_ROWS = 32
"""Maximum rows per program in a few-row product; further rows have their own programs."""

SHORT = 512
"""Maximum positions for which attention in flow steps is tuned separately."""

RESERVED = 4096
"""Bytes of shared memory that are left for reductions."""

SIMULATE = "VLA_ROS_GPU"
"""Environment variable for developers: a compute capability, such as ``8.9``, whose tiles are used instead."""


@dataclass(frozen=True)
class Gpu:
    """What tiles and kernels depend on."""

    capability: tuple[int, int]  # (0, 0) for a CPU, where Triton's interpreter runs the kernels
    limit: int  # bytes of shared memory that a program may have
    multiprocessors: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory for tiles; the rest is for reductions."""
        return self.limit - RESERVED

    @property
    def name(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


def _gpu(capability: tuple[int, int], shared: int, multiprocessors: int) -> Gpu:
    return Gpu(capability, shared * 1024, multiprocessors)


GPUS = {
    one.name: one
    for one in (
        _gpu((8, 0), 163, 108),  # A100
        _gpu((8, 6), 99, 82),  # RTX 3090
        _gpu((8, 7), 163, 16),  # Jetson AGX Orin
        _gpu((8, 9), 99, 128),  # RTX 4090
        _gpu((9, 0), 227, 132),  # H100 and H200 (SXM)
        _gpu((10, 0), 227, 148),  # B200
        _gpu((11, 0), 227, 20),  # Jetson Thor
        _gpu((12, 0), 99, 170),  # RTX 5090
    )
}
"""Supported GPUs by compute capability (CUDA C++ Programming Guide), with the multiprocessors of a typical one."""


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Describe ``device``, or the GPU that :data:`SIMULATE` names; a CPU runs kernels only in the interpreter."""
    simulated = os.environ.get(SIMULATE, "")
    if device.type == "cpu":
        return _gpu((0, 0), 204, 132)
    if simulated or device.type == "meta":
        if simulated not in GPUS:
            raise ConfigError(f"{SIMULATE}: found '{simulated}', expected one of {', '.join(GPUS)}")
        return GPUS[simulated]
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))
    capability = torch.cuda.get_device_capability(device)
    return Gpu(capability, shared, int(properties.multi_processor_count))


@cache
def uses_wgmma(device: torch.device) -> bool:
    """Return True if Triton compiles for Hopper, where it uses ``wgmma``, which reads registers asynchronously."""
    if device.type == "cuda":  # whatever tiles are simulated
        return torch.cuda.get_device_capability(device)[0] == 9
    return gpu_of(device).capability[0] == 9


def interpreted(rows: Tensor) -> bool:
    """Return True if Triton's interpreter runs the kernels, which knows no assembler."""
    return rows.device.type == "cpu"


@dataclass(frozen=True)
class Work:
    """What a kernel computes, and in which types."""

    # ``decode``: few rows, norms of kind ``rms``; ``flow``: few rows of Gemma; ``gemm``: many rows, packed weights;
    # ``attend``: few rows; ``attend_flow``: few rows of Gemma; ``attend_prefix``: many rows of Gemma;
    # ``attend_both_ways``: bidirectional prompts.
    kernel: str
    inputs: int  # of the weight; of attention: the head size
    outputs: int = 0  # of the weight; ``attend_flow``: :data:`SHORT` if there are at most as many positions, else 0
    role: str = ""  # of the weight, one of :data:`~vla_ros_models.engine.weights.ROLES`
    kind: str = "dense"  # of the weight; ``int4 fp8``: 4-bit weights and rows in FP8
    rows: int = 0  # rows of a program in ``decode``, padded rows in ``flow``, all rows in ``gemm``
    weight_bytes: float = 2.0  # per number of the weight
    row_bytes: int = 2  # per number of a row

    @property
    def pairs(self) -> int:
        """2 if a program computes pairs of outputs."""
        return 2 if self.role in ("qkv", "gate_up") else 1

    @property
    def key(self) -> str:
        """Identifies the tile of this work.

        In ``decode`` and ``attend`` a tile determines the order of summation, which must not depend on the number
        of rows, or verifying several tokens would not be bit-identical to decoding them one by one.
        """
        rows = {"flow": 16 if self.rows <= 16 else SKINNY, "attend_flow": 16 if self.rows <= 16 else SKINNY}
        count = rows.get(self.kernel, self.rows if self.kernel == "gemm" else 0)
        wide = "float32" if self.row_bytes > 2 else ""
        words = (self.kernel, self.role, self.kind, f"{count}x{self.outputs}x{self.inputs}", wide)
        return " ".join(word for word in words if word)


DECODE_TILES: dict[tuple[str, str], Tile] = {
    ("qkv", "dense"): Tile(16, 128, 1, 4),
    ("o_proj", "dense"): Tile(16, 512, 2, 3),
    ("gate_up", "dense"): Tile(16, 128, 1, 3),
    ("down_proj", "dense"): Tile(16, 256, 2, 6),
    ("lm_head", "dense"): Tile(32, 128, 1, 3),
    ("qkv", "fp8"): Tile(16, 256, 1, 4),
    ("o_proj", "fp8"): Tile(16, 256, 2, 6),
    ("gate_up", "fp8"): Tile(16, 256, 1, 4),
    ("down_proj", "fp8"): Tile(16, 256, 2, 8),
    ("qkv", "int8"): Tile(16, 256, 2, 4),
    ("o_proj", "int8"): Tile(16, 512, 4, 4),
    ("gate_up", "int8"): Tile(16, 256, 2, 4),
    ("down_proj", "int8"): Tile(16, 512, 4, 4),
    ("qkv", "int4"): Tile(16, 512, 4, 3),
    ("o_proj", "int4"): Tile(16, 1024, 4, 3),
    ("gate_up", "int4"): Tile(16, 512, 2, 3),
    ("down_proj", "int4"): Tile(16, 1024, 4, 4),
}
"""Few rows, by role and kind of weight: the fastest on an H200 in OpenVLA-7B."""

FLOW_TILES = {
    "qkv": (Tile(16, 256, stages=3), Tile(16, 128, stages=6)),
    "o_proj": (Tile(64, 128, stages=3, splits=8), Tile(32, 128, splits=4)),
    "gate_up": (Tile(16, 128), Tile(32, 64, stages=6)),
    "down_proj": (Tile(64, 128, splits=8), Tile(32, 128, splits=4)),
    "": (Tile(64, stages=3, block_m=16, splits=8), Tile(64, stages=3, block_m=64, splits=8)),
}
"""Flow steps of up to 16 rows and of more, by role, and their attention: the fastest within ten steps of pi0.5 on
an H200, with a horizon of 10 and of 50."""

SHORT_TILE = Tile(64, stages=3, block_m=16)
"""Attention of flow steps to few positions."""

FLOW_SIZES = {
    "flow qkv dense 64x960x768": Tile(8, 128),
    "flow o_proj dense 64x768x960": Tile(32, 64, splits=5),
    "flow gate_up dense 64x4096x768": Tile(16, 128),
    "attend_flow dense 64x512x64": Tile(64, stages=3, block_m=64, splits=8),
    "flow qkv dense 64x4608x1536": Tile(32, 64, stages=6),
    "flow o_proj dense 64x1536x1536": Tile(32, 64, splits=3),
    "flow gate_up dense 64x6144x1536": Tile(32, 128),
    "flow down_proj dense 64x1536x6144": Tile(64, 128, stages=6, splits=4),
}
"""The same by :attr:`Work.key`: the fastest of ``vla-ros tune`` on an H200 in SmolVLA, then in GR00T N1.7."""

ATTEND_TILE = Tile(64, stages=1, splits=5, block_m=16)
"""Attention of few rows, tuned on an H200."""

BOTH_WAYS_WGMMA = Tile(64, stages=3, block_m=64)
"""Attention of a bidirectional prompt, tuned on an H200."""
BOTH_WAYS = Tile(64, warps=8, stages=2, block_m=64)
"""The same without ``wgmma``, where four warps would spill registers."""

PREFIX_TILE = Tile(32, stages=3, block_m=64)
"""Attention of Gemma's prefix."""

_THREE_STAGES = Tile(64, warps=4, stages=3, max_registers=168)
_SPLIT_K = Tile(128, warps=8, stages=4, max_registers=128, splits=4)
_FP8_SPLIT_K = Tile(64, warps=4, stages=4, block_m=64, tail_m=32, splits=2)

GEMM_TILES: dict[tuple[str, int, int, int], Tile] = {
    ("int8", 288, 12288, 4096): _THREE_STAGES,
    ("int8", 288, 22016, 4096): Tile(128, warps=8, stages=3, block_m=64, tail_m=32, max_registers=128, k_groups=2),
    ("int8", 288, 4096, 4096): _SPLIT_K,
    ("int8", 288, 4096, 11008): _SPLIT_K,
    ("int4 fp8", 288, 4096, 4096): _FP8_SPLIT_K,
    ("int4 fp8", 288, 4096, 11008): _FP8_SPLIT_K,
}
"""Many rows, by kind of weight, rows, outputs and inputs: the fastest on an H200 in OpenVLA-7B."""

TUNED_FOR = GPUS["9.0"]
"""The GPU for which :data:`GEMM_TILES` and :data:`FLOW_SIZES` are valid."""

FP8_ROWS = Tile(64, warps=4, stages=3, block_m=64, tail_m=32, max_registers=128)
"""Default for 4-bit weights and rows in FP8; larger tiles wait longer for their own multiplications."""

GEMM_CANDIDATES = (
    Tile(128, warps=8, stages=3, block_m=64, tail_m=32, max_registers=128),
    Tile(128, warps=8, stages=3, block_m=64, tail_m=16, max_registers=128),
    *(Tile(128, warps=8, stages=2, block_m=128, tail_m=tail) for tail in (16, 32, 64, 0)),
)
"""Candidates for sizes that were not measured."""

MeasuredTile = Callable[[Work], Tile | None]
"""Returns the tile that was measured for some work, if any."""


def unmeasured(work: Work) -> Tile | None:
    return None


def choose_tile(gpu: Gpu, work: Work, measured: MeasuredTile = unmeasured) -> Tile:
    """Return the tile of a kernel: the measured one, or the default, reduced until it fits."""
    return fit_tile(measured(work) or default(gpu, work), gpu, work)


def fit_tile(tile: Tile, gpu: Gpu, work: Work) -> Tile:
    """Reduce a tile until it divides the work and fits into shared memory."""
    return _FIT[work.kernel](tile, gpu, work)


def default(gpu: Gpu, work: Work) -> Tile:
    """Return the tile from the tables above."""
    few = work.rows > 16
    if gpu == TUNED_FOR and work.key in FLOW_SIZES:
        return FLOW_SIZES[work.key]
    if work.row_bytes > 2 and work.kernel in ("gemm", "attend_both_ways"):  # for checks only: without tensor cores
        return Tile(32, stages=2, block_m=32, tail_m=0) if work.kernel == "gemm" else Tile(16, stages=1, block_m=16)
    if work.kernel == "decode":
        if work.kind in BITS and work.row_bytes > 2:  # the same: operands fill shared memory
            return Tile(16 // work.pairs, 256, 4, 2)
        return DECODE_TILES[work.role, work.kind]
    if work.kernel == "attend_flow" and work.outputs:
        return SHORT_TILE
    if work.kernel in ("flow", "attend_flow"):
        return FLOW_TILES[work.role][few]
    if work.kernel == "gemm":
        return _default_gemm(gpu, work)
    if work.kernel == "attend_both_ways":
        return BOTH_WAYS_WGMMA if gpu.capability[0] == 9 else BOTH_WAYS
    if work.kernel == "attend":
        return ATTEND_TILE
    return PREFIX_TILE if gpu.capability[0] == 9 else replace(PREFIX_TILE, warps=8)  # four warps would spill


def _default_gemm(gpu: Gpu, work: Work) -> Tile:
    """Return a measured tile, or estimate: waves of programs over the multiprocessors, times rows per program.

    Unpacking and filling the pipeline count as 24 more rows.
    """
    size = work.kind, work.rows, work.outputs, work.inputs
    if gpu == TUNED_FOR and size in GEMM_TILES:
        return GEMM_TILES[size]
    if work.kind == "int4 fp8":  # operands in registers and the zero points of many groups would spill
        few = gpu.capability[0] == 9 and work.inputs <= 32 * ALIGN_K
        return FP8_ROWS if few else replace(FP8_ROWS, max_registers=None)

    def cost(tile: Tile) -> int:
        programs = -(-work.rows // (tile.block_m + tile.tail_m)) * -(-work.outputs // tile.block_n)
        return -(-programs // gpu.multiprocessors) * (tile.block_m + tile.tail_m + 24)

    return min(GEMM_CANDIDATES, key=cost)


def _stage_bytes(tile: Tile, work: Work, rows: int) -> int:
    """Return the bytes that an iteration of few rows loads."""
    return int(tile.block_k * (work.pairs * tile.block_n * work.weight_bytes + rows * work.row_bytes))


def _shallower(tile: Tile, gpu: Gpu, stage_bytes: int) -> Tile:
    """Reduce the stages to those that fit, of which one less is in shared memory."""
    return replace(tile, stages=min(tile.stages, max(2, gpu.shared // stage_bytes + 1)))


def _fit_few(tile: Tile, gpu: Gpu, work: Work) -> Tile:
    """Divide the weight; reduce first the number of stages, then ``block_k``."""
    outputs, inputs = work.outputs // work.pairs, work.inputs
    if work.kind in BITS:
        return _fit_packed(tile, gpu, work, outputs)
    blocks = inputs // divisor(inputs, tile.block_k)
    splits = max(count for count in range(1, tile.splits + 1) if blocks % count == 0)
    tile = replace(
        tile, block_n=divisor(outputs, tile.block_n), block_k=divisor(inputs // splits, tile.block_k), splits=splits
    )
    tile = _shallower(tile, gpu, _stage_bytes(tile, work, work.rows))
    while _stage_bytes(tile, work, work.rows) > gpu.shared and tile.block_k > 32:
        tile = replace(tile, block_k=tile.block_k // 2)
    return tile


def _fit_packed(tile: Tile, gpu: Gpu, work: Work, outputs: int) -> Tile:
    """Like :func:`_fit_few`, but ``block_k`` is chosen for the maximum rows of a program."""
    rows, least = work.rows, 16 // work.pairs  # the outputs (or pairs) of one matrix instruction
    tile = replace(tile, block_n=divisor(outputs, 2 * tile.block_n))
    while _stage_bytes(tile, work, PACKED_ROWS) > gpu.shared and tile.block_k > ALIGN_K:
        tile = replace(tile, block_k=tile.block_k // 2, warps=max(1, tile.warps // 2))
    # Smaller tiles for one row, which is cheap to load for each tile, and for many, whose sums fill registers.
    fewer = 4 if rows > 16 else 2 if rows == 1 or rows > 8 else 1
    tile = replace(tile, block_n=max(tile.block_n // fewer, min(tile.block_n, least)))
    return _shallower(tile, gpu, _stage_bytes(tile, work, rows))


def _fit_gemm(tile: Tile, gpu: Gpu, work: Work) -> Tile:
    bits = 4 if work.kind.startswith("int4") else 8
    groups = -(-work.inputs // ALIGN_K) * ALIGN_K // k_group(bits)
    return replace(tile, block_n=divisor(work.outputs, tile.block_n), k_groups=divisor(groups, tile.k_groups))


def _fit_attention(tile: Tile, gpu: Gpu, work: Work) -> Tile:
    """Reduce first the stages, then positions, then pairs.

    Queries, the weights of one block and the keys and values of all stages but one lie in shared memory.
    """
    pair = work.inputs * work.row_bytes

    def needed() -> int:
        keys = 2 * max(1, tile.stages - 1) * tile.block_n * pair
        return keys + tile.block_m * (pair + 2 * tile.block_n)

    while needed() > gpu.shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    while needed() > gpu.shared and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    while needed() > gpu.shared and tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2)
    return tile


_FIT: dict[str, Callable[[Tile, Gpu, Work], Tile]] = {
    "decode": _fit_few,
    "flow": _fit_few,
    "gemm": _fit_gemm,
    "attend": lambda tile, gpu, work: tile,
    "attend_flow": _fit_attention,
    "attend_prefix": _fit_attention,
    "attend_both_ways": _fit_attention,
}


def divisor(number: int, most: int) -> int:
    """Return the largest power of two that divides ``number`` and is at most ``most``."""
    return min(most, number & -number)


def precision(rows: Tensor) -> str:
    """Return Triton's ``input_precision`` for a product of ``rows``."""
    return "ieee" if rows.dtype == torch.float32 else "tf32"  # tf32 is Triton's default, unused for bfloat16
