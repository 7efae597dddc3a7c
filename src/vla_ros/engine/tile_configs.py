"""Tile shapes, pipeline depths and the tuned configurations of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from vla_ros.engine.lowbit import ALIGN_K

SKINNY = 64
"""Maximum rows of a few-row product, which is bound by reading its weight and does not quantise its rows."""

PACKED_ROWS = 32
"""Maximum rows per program in a few-row product; further rows have their own programs."""


@dataclass(frozen=True)
class SkinnyConfig:
    """Tile and pipeline of a few-row product."""

    block_n: int = 16  # outputs per program (pairs for ``qkv`` and ``gate_up``); with packed weights, for one row
    # Inputs per iteration of the K loop. The warps split the inputs, and the warps' sums are added after the loop,
    # so ``block_k`` and ``warps`` determine the order of summation.
    block_k: int = 256
    warps: int = 4  # warps per program
    stages: int = 4  # pipeline stages: one iteration is multiplied while the others load
    splits: int = 1  # programs that share the inputs of one tile; the last to finish adds their sums

    def fit(self, n: int, k: int, stage_bytes: Callable[[SkinnyConfig], int], shared: int) -> SkinnyConfig:
        """Return the nearest configuration whose tile divides a weight [n, k] and fits into shared memory.

        The number of stages is reduced first, then ``block_k``. ``n`` counts pairs for ``qkv`` and ``gate_up``;
        ``stage_bytes`` returns the bytes that an iteration loads; a program may use ``shared`` bytes.
        """
        splits = divisor(k // divisor(k, 16), self.splits)
        block_k = divisor(k // splits, self.block_k)
        fitting = replace(self, block_n=divisor(n, self.block_n), block_k=block_k, splits=splits)
        fitting = fitting._shallower(stage_bytes, shared)
        while stage_bytes(fitting) > shared and fitting.block_k > 32:
            fitting = replace(fitting, block_k=fitting.block_k // 2)
        return fitting

    def fit_packed(
        self, n: int, stage_bytes: Callable[[SkinnyConfig, int], int], rows: int, shared: int, least: int = 16
    ) -> SkinnyConfig:
        """Like :meth:`fit`, for packed weights; ``stage_bytes`` also takes the number of rows.

        ``block_k`` determines the order of summation, which must not depend on the number of rows, or verifying
        several tokens would not be bit-identical to decoding them one by one. So ``block_k`` is chosen for the
        maximum rows of a program. ``least`` is the number of outputs (or pairs) of one matrix instruction.
        """
        fitting = replace(self, block_n=divisor(n, 2 * self.block_n))
        while stage_bytes(fitting, PACKED_ROWS) > shared and fitting.block_k > ALIGN_K:
            fitting = replace(fitting, block_k=fitting.block_k // 2, warps=max(1, fitting.warps // 2))
        # Smaller tiles for one row, which is cheap to load for each tile, and for many, whose sums fill registers.
        fewer = 4 if rows > 16 else 2 if rows == 1 or rows > 8 else 1
        fitting = replace(fitting, block_n=max(fitting.block_n // fewer, min(fitting.block_n, least)))
        return fitting._shallower(lambda config: stage_bytes(config, rows), shared)

    def _shallower(self, stage_bytes: Callable[[SkinnyConfig], int], shared: int) -> SkinnyConfig:
        fitting = self
        while (fitting.stages - 1) * stage_bytes(fitting) > shared and fitting.stages > 2:
            fitting = replace(fitting, stages=fitting.stages - 1)
        return fitting


SKINNY_CONFIGS: dict[tuple[str, str], SkinnyConfig] = {
    ("qkv", "dense"): SkinnyConfig(16, 128, 1, 4),
    ("o_proj", "dense"): SkinnyConfig(16, 512, 2, 3),
    ("gate_up", "dense"): SkinnyConfig(16, 128, 1, 3),
    ("down_proj", "dense"): SkinnyConfig(16, 256, 2, 6),
    ("lm_head", "dense"): SkinnyConfig(32, 128, 1, 3),
    ("qkv", "fp8"): SkinnyConfig(16, 256, 1, 4),
    ("o_proj", "fp8"): SkinnyConfig(16, 256, 2, 6),
    ("gate_up", "fp8"): SkinnyConfig(16, 256, 1, 4),
    ("down_proj", "fp8"): SkinnyConfig(16, 256, 2, 8),
    ("qkv", "int8"): SkinnyConfig(16, 256, 2, 4),
    ("o_proj", "int8"): SkinnyConfig(16, 512, 4, 4),
    ("gate_up", "int8"): SkinnyConfig(16, 256, 2, 4),
    ("down_proj", "int8"): SkinnyConfig(16, 512, 4, 4),
    ("qkv", "int4"): SkinnyConfig(16, 512, 4, 3),
    ("o_proj", "int4"): SkinnyConfig(16, 1024, 4, 3),
    ("gate_up", "int4"): SkinnyConfig(16, 512, 2, 3),
    ("down_proj", "int4"): SkinnyConfig(16, 1024, 4, 4),
}
"""Configurations by role and kind of weight, found on an H200 with ``benchmarks/tune_tiles.py``."""


@dataclass(frozen=True)
class AttentionConfig:
    """Tile and pipeline of attention."""

    block_c: int = 64  # cache positions per iteration, or per program if programs split the positions
    warps: int = 4  # warps per program
    stages: int = 1  # pipeline stages
    # Programs that share a head; program s processes blocks s, s + splits, ... This determines the order of
    # summation, so it must not depend on the number of rows.
    splits: int = 5
    block_r: int = 16  # (row, head) pairs per program

    def fit(self, pair_bytes: int, shared: int) -> AttentionConfig:
        """Return the nearest configuration that fits into ``shared`` bytes.

        ``pair_bytes`` is the size of one head's query, key or value. Queries, the weights of one block and the keys
        and values of all stages but one lie in shared memory. Stages are reduced first, then positions, then pairs.
        """
        fitting = self

        def needed() -> int:
            keys = 2 * max(1, fitting.stages - 1) * fitting.block_c * pair_bytes
            return keys + fitting.block_r * (pair_bytes + 2 * fitting.block_c)

        while needed() > shared and fitting.stages > 2:
            fitting = replace(fitting, stages=fitting.stages - 1)
        while needed() > shared and fitting.block_c > 16:
            fitting = replace(fitting, block_c=fitting.block_c // 2)
        while needed() > shared and fitting.block_r > 16:
            fitting = replace(fitting, block_r=fitting.block_r // 2)
        return fitting


ATTENTION_CONFIG = AttentionConfig()
"""Tuned on an H200."""

BOTH_WAYS_WGMMA = AttentionConfig(64, stages=3, block_r=64)
"""Attention of a bidirectional prompt, tuned on an H200."""
BOTH_WAYS = AttentionConfig(64, warps=8, stages=2, block_r=64)
"""The same without ``wgmma``, where four warps would spill registers."""


@dataclass(frozen=True)
class FlowConfigs:
    """Tile configurations of the products and the attention of one decoder layer over few rows."""

    qkv: SkinnyConfig
    o_proj: SkinnyConfig
    gate_up: SkinnyConfig
    down_proj: SkinnyConfig
    attention: AttentionConfig

    def of(self, role: str, n: int, k: int, rows: int, item: int, shared: int) -> SkinnyConfig:
        """Return the configuration for a weight [n, k] of ``item`` bytes a number, and ``rows`` padded rows."""
        pairs = 2 if role in ("qkv", "gate_up") else 1
        config: SkinnyConfig = getattr(self, role)
        return config.fit(n // pairs, k, lambda one: item * one.block_k * (pairs * one.block_n + rows), shared)


FLOW_CONFIGS = FlowConfigs(
    SkinnyConfig(16, 128, stages=6), SkinnyConfig(32, 128, splits=4), SkinnyConfig(32, 64, stages=6),
    SkinnyConfig(32, 128, splits=4), AttentionConfig(64, stages=3, block_r=64),
)  # fmt: skip
"""Tuned within ten flow steps of pi0.5 on an H200, with a horizon of 50."""
FEWEST_FLOW_CONFIGS = FlowConfigs(
    SkinnyConfig(16, 256, stages=3), SkinnyConfig(64, 128, stages=3, splits=8), SkinnyConfig(16, 128),
    SkinnyConfig(64, 128, splits=8), AttentionConfig(64, stages=3),
)  # fmt: skip
"""The same for up to 16 rows, tuned with a horizon of 10."""
MANY_ATTENTION = AttentionConfig(32, stages=3, block_r=64)
"""Attention of Gemma's prefix."""


@dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline of a many-row product with a packed weight."""

    block_n: int = 128  # outputs per program
    block_m: int = 128  # rows per program, a power of two
    tail_m: int = 16  # additional rows, 0 or a power of two of at least 16
    warps: int = 8  # warps per program
    stages: int = 2  # pipeline stages
    # Maximum registers per thread; None lets the compiler choose. 128 lets two programs of 8 warps run on one
    # multiprocessor.
    max_registers: int | None = None
    # Programs that split the inputs; each stores float32 sums, which another kernel adds in a fixed order.
    split_k: int = 1
    # K-groups (:mod:`vla_ros.engine.lowbit`) per iteration. With more of them, each takes fewer instructions, but
    # the program needs more shared memory.
    k_groups: int = 1


_THREE_STAGES = GemmConfig(64, 128, 16, 4, 3, 168)
_SPLIT_K = GemmConfig(128, 128, 16, 8, 4, 128, split_k=4)

GEMM_CONFIGS: dict[tuple[str, int, int, int], GemmConfig] = {
    ("int8", 288, 12288, 4096): _THREE_STAGES,
    ("int8", 288, 22016, 4096): GemmConfig(128, 64, 32, 8, 3, 128, k_groups=2),
    ("int8", 288, 4096, 4096): _SPLIT_K,
    ("int8", 288, 4096, 11008): _SPLIT_K,
    ("int4 fp8", 288, 4096, 4096): GemmConfig(64, 64, 32, 4, 4, split_k=2),
    ("int4 fp8", 288, 4096, 11008): GemmConfig(64, 64, 32, 4, 4, split_k=2),
}
"""The fastest configurations on an H200 (``benchmarks/tune_tiles.py``), for OpenVLA-7B with a typical prompt.

Keys are the kind of weight (``int4 fp8``: 4-bit weights and rows in FP8), rows, outputs and inputs."""

TUNED_FOR = 132
"""Multiprocessors of the GPUs for which :data:`GEMM_CONFIGS` is valid: H100 and H200 (SXM)."""

FP8_ROWS = GemmConfig(64, 64, 32, 4, 3, 128)
"""Default for 4-bit weights and rows in FP8; larger tiles wait longer for their own multiplications."""

GEMM_CANDIDATES = (
    GemmConfig(block_m=64, tail_m=32, stages=3, max_registers=128),
    GemmConfig(block_m=64, tail_m=16, stages=3, max_registers=128),
    GemmConfig(block_m=128, tail_m=16),
    GemmConfig(block_m=128, tail_m=32),
    GemmConfig(block_m=128, tail_m=64),
    GemmConfig(block_m=128, tail_m=0),
)
"""Candidates of :func:`choose_gemm` for sizes that were not measured."""


def choose_gemm(kind: str, rows: int, n: int, k: int, multiprocessors: int) -> GemmConfig:
    """Return the configuration for a product.

    For shapes not in :data:`GEMM_CONFIGS`, a cost model chooses: waves of programs over the multiprocessors, times
    rows per program. Unpacking and filling the pipeline count as 24 more rows.
    """
    if multiprocessors == TUNED_FOR and (kind, rows, n, k) in GEMM_CONFIGS:
        return GEMM_CONFIGS[kind, rows, n, k]
    if kind == "int4 fp8":
        return FP8_ROWS

    def cost(config: GemmConfig) -> int:
        programs = -(-rows // (config.block_m + config.tail_m)) * -(-n // config.block_n)
        return -(-programs // multiprocessors) * (config.block_m + config.tail_m + 24)

    return min(GEMM_CANDIDATES, key=cost)


def divisor(number: int, most: int) -> int:
    """Return the largest power of two that divides ``number`` and is at most ``most``."""
    return min(most, number & -number)


@cache
def shared_memory(device: torch.device) -> int:
    """Return a program's shared memory in bytes, less 4 KiB for reductions: 227 KiB on Hopper, 99 KiB on Ada."""
    if device.type != "cuda":
        return 200 * 1024
    properties = torch.cuda.get_device_properties(device)
    available: int = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    return available - 4096


@cache
def has_wgmma(device: torch.device) -> bool:
    """Return True on Hopper, where Triton uses ``wgmma``, which reads registers asynchronously."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def precision(rows: Tensor) -> str:
    """Return Triton's ``input_precision`` for a product of ``rows``."""
    return "ieee" if rows.dtype == torch.float32 else "tf32"  # tf32 is Triton's default, unused for bfloat16
