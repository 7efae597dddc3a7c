"""Compile every kernel with the sizes of OpenVLA-7B and pi0.5, and print what it needs.

    python compile_kernels.py [CAPABILITY]         90 (the default); for others, pi's kernels and attention

Run by test_kernels.py. Triton brings its own assembler, so no GPU is needed. Tiles are those that the engine
chooses for a GPU with the shared memory of that capability.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import astuple
from itertools import takewhile
from pathlib import Path

import triton
from hazards import hazards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vla_ros.engine.kernels import attention, flow, linear, lowbit, pointwise, resample
from vla_ros.engine.lowbit import BITS
from vla_ros.engine.tile_configs import (
    ATTENTION_CONFIG,
    BOTH_WAYS,
    BOTH_WAYS_WGMMA,
    FEWEST_FLOW_CONFIGS,
    FLOW_CONFIGS,
    FP8_ROWS,
    GEMM_CANDIDATES,
    GEMM_CONFIGS,
    MANY_ATTENTION,
    PACKED_ROWS,
    SKINNY_CONFIGS,
    FlowConfigs,
)

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 110: 227, 120: 99}[CAPABILITY] * 1024
"""Most bytes of shared memory per program (CUDA C++ Programming Guide, table of compute capabilities)."""
AVAILABLE = SHARED - 4096  # as vla_ros.engine.tile_configs.shared_memory

B, F, FP8 = "*bf16", "*fp32", "*fp8e4nv"
TYPES = {
    name: kind
    for kind, names in {
        B: "x weight norm hidden table out scaled query keys values cosine sine branch both qkv patches positions "
        "prefix tokens gain bias factor offset",
        F: "scales sums row_scale column_scale partial logits margins row_weights column_weights across down",
        "*i32": "words ends length split_counters",
        "*i64": "index rows columns above below left right",
        "*fp64": "squares next_squares",
        "*u8": "images luma chroma",
        "fp32": "eps unit time delta",
    }.items()
    for name in names.split()
}
"""Parameters to the types that most kernels give them; all others are constants or int32."""
CACHE = {"positions": "*i32", "scale": "fp32"}
WEIGHTS = {
    "dense": {"weight": B, "scale": B, "x": B, "scaled": B},
    "int8": {"weight": "*i32", "scale": F},
    "int4": {"weight": "*i32", "scale": "*i32"},
    "fp8": {"weight": FP8, "scale": F},
}
HIDDEN, HEADS = 4096, {"HEADS": 32, "KV_HEADS": 32, "HEAD": 128}
QWEN_HEADS = {"HEADS": 16, "KV_HEADS": 8, "HEAD": 128}  # GR00T's language model


def compile_kernel(name, kernel, types, warps=4, stages=3, registers=None, fuse=True, **constants) -> None:
    """Compile a kernel, whose parameters have the ``types``, else :data:`TYPES`, unless they are constants."""
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else {**TYPES, **types}.get(n, "i32") for n in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": fuse},
    )
    tools, ptx = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        made = source.with_suffix(".cubin")
        assemble = [
            tools / ("ptxas" if CAPABILITY < 100 else "ptxas-blackwell"),
            "-v",
            f"--gpu-name=sm_{CAPABILITY}{'a' if CAPABILITY >= 90 else ''}",
            source,
            "-o",
            made,
        ]
        said = subprocess.run(assemble, capture_output=True, text=True, check=True).stderr
        sass = ""
        if CAPABILITY == 90:
            dump = [tools / "cuobjdump", "-sass", made]
            sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    counted = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "cp.async": "cp.async.c"}
    used, spilled = (re.search(words, said)[1] for words in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    print(
        f"kernel {name}: registers {used} spills {spilled} shared {compiled.metadata.shared}",
        *(f"{word} {ptx.count(text)}" for word, text in counted.items()),
        f"serialized {said.count('wgmma.mma_async instructions are serialized')} hazards {len(hazards(sass))}",
        f"moves {moves(compiled.asm['ttgir'])}",
    )


def moves(ttgir: str) -> int:
    """Values that a kernel's loop moves between threads because two operations want them in different places."""
    lines = iter(ttgir.splitlines())
    loop = next((line for line in lines if "scf.for" in line), None)
    if loop is None:
        return 0
    end = loop[: len(loop) - len(loop.lstrip())] + "}"
    body = takewhile(lambda line: not line.startswith(end), lines)
    return sum("ttg.convert_layout" in line for line in body)


def compile_few_rows(kind: str) -> None:
    types = {"x": "*fp16", "scaled": "*fp16", **WEIGHTS[kind]}

    def skinny(role: str, kernel, inputs: int, types, rows: int = 1) -> None:
        config = SKINNY_CONFIGS[role, kind]
        if kind in BITS:
            pairs, item = 2 if role in ("qkv", "gate_up") else 1, {"int4": 1, "int8": 2}[kind]
            config = config.fit_packed(
                4096,
                lambda one, count: one.block_k * (item * pairs * one.block_n // 2 + 2 * count),
                rows,
                AVAILABLE,
                16 // pairs,
            )
        compile_kernel(
            f"{role} {kind} {inputs} {rows}", kernel, types, config.warps, config.stages, fuse=False, KIND=kind,
            MORE=rows == PACKED_ROWS, ASM=True, PRECISION="tf32", GROUPS=min(config.warps, config.block_k // 16),
            BLOCK_M=rows, BLOCK_N=config.block_n, BLOCK_K=config.block_k, K=inputs, **HEADS,
        )  # fmt: skip

    for role, inputs in (("o_proj", HIDDEN), ("down_proj", 11008)):
        skinny(role, linear.add_kernel, inputs, types)
    if kind == "dense":
        skinny("lm_head", linear.lm_head_kernel, HIDDEN, {**types, "out": F})
    for rows in (1, 8, 16, 32):
        skinny("gate_up", linear.gate_up_kernel, HIDDEN, {**types, "out": types["x"]}, rows)
        skinny("qkv", linear.qkv_kernel, HIDDEN, {**types, "positions": "*i32"}, rows)


def compile_many_rows(kind: str, kernel, types, configs) -> None:
    tuned = (config for key, config in GEMM_CONFIGS.items() if key[0] == kind)
    for config in dict.fromkeys((*configs, *tuned)):
        compile_kernel(
            f"gemm {kind} {' '.join(map(str, astuple(config)))}", kernel,
            {**types, "out": B if config.split_k == 1 else F}, config.warps, config.stages, config.max_registers,
            K=HIDDEN, KIND=kind, ASM=True, WGMMA=True, ADD=False, PRECISION="tf32", ROOM=32,
            FRAGMENTS=config.block_n // 8, K_GROUPS=config.k_groups, BLOCK_M=config.block_m, TAIL_M=config.tail_m,
            SPLIT_K=config.split_k, EVEN=288 % (config.block_m + config.tail_m) == 0,
        )  # fmt: skip


def compile_towers() -> None:
    """With the widths of both: DINOv2's has layer scale and five tokens before the patches, SigLIP's neither."""
    compile_kernel("patchify", pointwise.patchify_kernel, {}, SIDE=16, PATCH=14, TOWERS=2, WIDTH=592, BLOCK=1024)
    for width, block, prefix in ((1024, 1024, 5), (1152, 2048, 0)):
        for name in ("embed", "tower_add_norm", "tower_add"):
            compile_kernel(
                f"{name} {width}", getattr(pointwise, f"{name}_kernel"), {"scale": B}, block // 256, fuse=False,
                N=width, BLOCK=block, ROWS=256 + prefix, PREFIX=prefix, SCALED=prefix > 0, FILM=prefix == 0,
            )  # fmt: skip


def compile_between_products() -> None:
    config = ATTENTION_CONFIG
    compile_kernel(
        "attend", attention.attend_kernel, CACHE, config.warps, config.stages, BLOCK_R=16, BLOCK_C=config.block_c,
        SPLITS=config.splits, PRECISION="tf32", **HEADS,
    )  # fmt: skip
    compile_both_ways()
    compile_kernel("choose", attention.choose_kernel, {"tokens": "*i64"}, 16, BLOCK=8192)
    rows = {"N": HIDDEN, "BLOCK": HIDDEN}
    for name, out, parts, grouped in (
        ("norm", B, 0, False),
        ("norm fp8", FP8, 1, False),
        ("norm fp8 int4", FP8, 2, True),
    ):
        compile_kernel(
            name, pointwise.rms_norm_kernel, {"out": out}, 8, PARTS=parts, FP8=out == FP8, GROUPED=grouped, **rows
        )
    compile_kernel("gather", pointwise.gather_kernel, {}, 8, **rows)
    plain = {"query_norm": None, "key_norm": None, "eps": 0.0}
    compile_kernel("rotate", pointwise.rotate_kernel, CACHE, BLOCK_H=32, SCALED=True, **plain, **HEADS)
    norms = {**CACHE, "query_norm": B, "key_norm": B}
    compile_kernel("rotate normed", pointwise.rotate_kernel, norms, BLOCK_H=32, BY_ROW=True, **QWEN_HEADS)
    for name, out, scaled, grouped in (
        ("silu", B, False, False),
        ("silu fp8", FP8, True, False),
        ("silu fp8 int4", FP8, False, True),
    ):
        flags = {"SCALED": scaled, "FP8": out == FP8, "GROUPED": grouped, "BLOCK": 2048}
        compile_kernel(name, pointwise.silu_multiply_kernel, {"out": out}, 8 if out == FP8 else 4, **flags)


def compile_both_ways() -> None:
    config = BOTH_WAYS_WGMMA if CAPABILITY == 90 else BOTH_WAYS
    blocks = {"BLOCK_R": config.block_r, "BLOCK_C": config.block_c, "PRECISION": "tf32", **HEADS}
    kernel = attention.attend_both_ways_kernel
    compile_kernel("attend both ways", kernel, CACHE, config.warps, config.stages, **blocks)


def compile_images() -> None:
    names = ("to_ycc", "offsets", "forward", "before", "factors", "after", "steps", "scales", "from_chroma")
    tables = {**dict.fromkeys(names, "*i32"), "out": "*u8"}
    compile_kernel("jpeg code", resample.code_kernel, tables, 8, ROWS=16, COLUMNS=16)
    compile_kernel("jpeg merge", resample.merge_kernel, tables, ROWS=16, COLUMNS=16, BLOCK=256)
    compile_kernel("lanczos", resample.float_resize_kernel, {"out": "*u8"}, fuse=False, BLOCK=256)
    compile_kernel("crop", resample.crop_kernel, {"out": "*u8"}, fuse=False, BLOCK=256)


WIDTH, MLP, PI_HEADS = 1024, 4096, {"HEADS": 8, "KV_HEADS": 1, "HEAD": 256}
PI = {
    **CACHE,
    **dict.fromkeys(("given", "times", "counters"), "*i32"),
    **dict.fromkeys(("squares", "spare", "now", "fixed", "norm", "bias", "actions"), F),
    **dict.fromkeys(("previous", "weights", "limits"), F),
    "parts": B,
    "factor": "fp32",
}


def compile_gemma(name: str, kernel, warps: int, stages: int = 3, **constants) -> None:
    sizes = {"ADAPTIVE": True, "TILES": 32, "BLOCK_M": 64, "N": WIDTH, "PRECISION": "tf32", **PI_HEADS, **constants}
    compile_kernel(f"gemma_{name}", kernel, PI, warps, stages, **sizes)


def compile_gemma_few(name: str, tiles: FlowConfigs, rows: int) -> None:
    for role, kernel, outputs, inputs in (
        ("qkv", flow.flow_qkv_kernel, (8 + 2) * 256, WIDTH),
        ("o_proj", flow.flow_add_kernel, WIDTH, 8 * 256),
        ("gate_up", flow.flow_gate_up_kernel, 2 * MLP, WIDTH),
        ("down_proj", flow.flow_add_kernel, WIDTH, MLP),
    ):
        tile = tiles.of(role, outputs, inputs, rows, 2, AVAILABLE)
        compile_gemma(
            f"{role}_{name}", kernel, tile.warps, tile.stages, K=inputs, N=MLP if role == "gate_up" else WIDTH,
            BLOCK_M=rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=tile.splits,
        )  # fmt: skip
    tile = tiles.attention.fit(512, AVAILABLE)
    blocks = {"BLOCK_R": tile.block_r, "BLOCK_C": tile.block_c}
    compile_gemma(f"attend_{name}", flow.attend_chunk_kernel, tile.warps, tile.stages, **blocks)


def compile_pi() -> None:
    compile_gemma_few("few", FLOW_CONFIGS, 64)
    compile_gemma_few("fewest", FEWEST_FLOW_CONFIGS, 16)
    compile_gemma("merge", flow.flow_merge_kernel, 1, CHUNKS=14, PADDED=16)
    tile = MANY_ATTENTION.fit(512, AVAILABLE)
    blocks = {"BLOCK_R": tile.block_r, "BLOCK_C": tile.block_c}
    compile_gemma("attend_many", attention.attend_prefix_kernel, tile.warps, tile.stages, **blocks)
    ends = {"A": 32, "H": 50, "BLOCK": WIDTH, "EMBED": True, "SCALED": True}
    compile_gemma("start", flow.start_kernel, 8, **ends)
    compile_gemma("advance", flow.advance_kernel, 8, **ends)
    rows = {"N": 2048, "BLOCK": 2048, "QUANTIZE": False, "ADAPTIVE": False, "BRANCH": True}
    compile_gemma("add_norm", pointwise.add_norm_kernel, 8, **rows)
    compile_gemma("gelu", pointwise.gelu_multiply_kernel, 4, **rows)


def main() -> None:
    compile_pi()
    if CAPABILITY != 90:
        compile_both_ways()
        return
    for kind in WEIGHTS:
        compile_few_rows(kind)
    for kind in BITS:
        compile_many_rows(kind, lowbit.gemm_kernel, {"scale": WEIGHTS[kind]["scale"]}, GEMM_CANDIDATES)
    compile_many_rows("int4 fp8", lowbit.gemm_fp8_kernel, {"x": FP8, "grid": "*i32"}, (FP8_ROWS,))
    compile_between_products()
    compile_towers()
    compile_images()


if __name__ == "__main__":
    main()
