"""Compile every kernel for sm_90a with the sizes of OpenVLA-7B and say what it needs; run by test_kernels.py.

Triton brings its own assembler, so no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import astuple
from itertools import takewhile
from pathlib import Path

import triton
from hazards import hazards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vla_ros.engine.kernels import attention, jpeg, linear, lowbit, pointwise, resample, towers
from vla_ros.engine.lowbit import BITS
from vla_ros.engine.tile_configs import (
    ATTENTION_CONFIG,
    FP8_ROWS,
    GEMM_CANDIDATES,
    GEMM_CONFIGS,
    PACKED_ROWS,
    SKINNY_CONFIGS,
)

B = "*bf16"
HIDDEN, HEADS, HEAD = 4096, 32, 128
WEIGHTS = {
    "dense": (B, B),
    "int8": ("*i32", "*fp32"),
    "int4": ("*i32", "*i32"),
    "fp8": ("*fp8e4nv", "*fp32"),
}
"""Kind of weight to the types of its numbers and scales."""


def compile_kernel(
    name: str, kernel, types, constants, warps: int, stages: int, registers: int | None = None, fuse: bool = True
) -> None:
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, n in enumerate(kernel.arg_names)
        if signature[n].startswith("*")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": fuse},
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        made = source.with_suffix(".cubin")
        command = [tools / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", made]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run(
            [tools / "cuobjdump", "-sass", made], capture_output=True, text=True, check=True
        ).stdout
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    ptx = compiled.asm["ptx"]
    waits = said.count("wgmma.mma_async instructions are serialized")
    counted = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "cp.async": "cp.async.c"}
    print(
        f"kernel {name}: registers {registers.group(1)} spills {spills.group(1)} shared {compiled.metadata.shared}",
        *(f"{word} {ptx.count(text)}" for word, text in counted.items()),
        f"serialized {waits} hazards {len(hazards(sass))}",
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
    weight, scale = WEIGHTS[kind]
    sums = {"squares": "*fp64", "next_squares": "*fp64", "norm": B, "scaled": B, "eps": "fp32"}
    rows = B if kind == "dense" else "*fp16"
    sums["scaled"] = rows
    types = {"x": rows, "weight": weight, "scale": scale, "out": B, **sums}
    cache = {"positions": "*i32", "cosine": B, "sine": B, "query": B, "keys": B, "values": B}
    heads = {"HEADS": HEADS, "KV_HEADS": HEADS, "HEAD": HEAD}

    def skinny(role: str, kernel, inputs: int, types, rows: int = 1, **constants) -> None:
        config = SKINNY_CONFIGS[role, kind]
        if kind in BITS:
            pairs, item = 2 if role in ("qkv", "gate_up") else 1, {"int4": 1, "int8": 2}[kind]
            config = config.fit_packed(
                4096,
                lambda one, count: one.block_k * (item * pairs * one.block_n // 2 + 2 * count),
                rows,
                220_000,
                16 // pairs,
            )
        groups = min(config.warps, config.block_k // 16)
        blocks = {
            "GROUPS": groups,
            "BLOCK_M": rows,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "K": inputs,
        }
        common = {"KIND": kind, "MORE": rows == PACKED_ROWS, "ASM": True, "PRECISION": "tf32"}
        name, every = f"{role} {kind} {inputs} {rows}", {**common, **blocks, **constants}
        compile_kernel(name, kernel, types, every, config.warps, config.stages, fuse=False)

    for role, inputs in (("o_proj", HIDDEN), ("down_proj", 11008)):
        skinny(role, linear.add_kernel, inputs, types)
    if kind == "dense":
        skinny("lm_head", linear.lm_head_kernel, HIDDEN, {**types, "out": "*fp32"})
    for rows in (1, 8, 16, 32):
        skinny("gate_up", linear.gate_up_kernel, HIDDEN, {**types, "out": types["x"]}, rows)
        skinny("qkv", linear.qkv_kernel, HIDDEN, {**types, **cache}, rows, **heads)


def compile_many_rows(kind: str) -> None:
    words, scale = WEIGHTS[kind]
    types = {"x": B, "words": words, "scale": scale, "out": B}
    common = {"K": HIDDEN, "KIND": kind, "ASM": True}
    tuned = (config for key, config in GEMM_CONFIGS.items() if key[0] == kind)
    for config in dict.fromkeys((*GEMM_CANDIDATES, *tuned)):
        sizes = {
            "FRAGMENTS": config.block_n // 8,
            "K_GROUPS": config.k_groups,
            "BLOCK_M": config.block_m,
            "TAIL_M": config.tail_m,
        }
        every = {
            **common,
            **sizes,
            "SPLIT_K": config.split_k,
            "EVEN": 288 % (config.block_m + config.tail_m) == 0,
            "WGMMA": True,
            "ADD": False,
            "PRECISION": "tf32",
        }
        name = f"gemm {kind} {' '.join(map(str, astuple(config)))}"
        out = B if config.split_k == 1 else "*fp32"
        compile_kernel(
            name,
            lowbit.gemm_kernel,
            {**types, "out": out},
            every,
            config.warps,
            config.stages,
            config.max_registers,
        )
    if kind == "int4":
        compile_fp8_rows(types)


def compile_fp8_rows(types) -> None:
    types = {**types, "x": "*fp8e4nv", "row_scale": "*fp32", "sums": "*fp32", "grid": "*i32"}
    tuned = (config for key, config in GEMM_CONFIGS.items() if key[0] == "int4 fp8")
    for config in dict.fromkeys((FP8_ROWS, *tuned)):
        sizes = {"FRAGMENTS": config.block_n // 8, "BLOCK_M": config.block_m, "TAIL_M": config.tail_m}
        every = {**sizes, "K": HIDDEN, "ADD": False, "ASM": True, "EVEN": True, "ROOM": 32}
        every["SPLIT_K"] = config.split_k
        name = f"gemm int4 fp8 {' '.join(map(str, astuple(config)))}"
        out = {"out": B if config.split_k == 1 else "*fp32"}
        compile_kernel(
            name,
            lowbit.gemm_fp8_kernel,
            {**types, **out},
            every,
            config.warps,
            config.stages,
            config.max_registers,
        )


def compile_towers() -> None:
    """With the widths of both: DINOv2's has layer scale and five tokens before the patches, SigLIP's neither."""
    types = {"images": "*u8", "table": B, "out": B}
    sizes = {"SIDE": 16, "PATCH": 14, "TOWERS": 2, "WIDTH": 592, "BLOCK": 1024}
    compile_kernel("patchify", towers.patchify_kernel, types, sizes, 4, 3)
    names = (
        "patches",
        "positions",
        "prefix",
        "tokens",
        "branch",
        "scale",
        "gain",
        "bias",
        "factor",
        "offset",
        "out",
    )
    types = {**dict.fromkeys(names, B), "eps": "fp32"}
    for width, block, prefix in ((1024, 1024, 5), (1152, 2048, 0)):
        sizes, rows = {"N": width, "BLOCK": block}, {"ROWS": 256 + prefix, "PREFIX": prefix}
        scaled = {"SCALED": prefix > 0}
        for name, kernel, constants in (
            ("embed", towers.embed_kernel, rows),
            ("add norm", towers.add_norm_kernel, {**scaled, "FILM": prefix == 0}),
            ("add", towers.add_kernel, {**rows, **scaled}),
        ):
            compile_kernel(f"{name} {width}", kernel, types, {**sizes, **constants}, block // 256, 3, fuse=False)


def main() -> None:
    for kind in WEIGHTS:
        compile_few_rows(kind)
        if kind in BITS:
            compile_many_rows(kind)
    cache = {"positions": "*i32", "query": B, "keys": B, "values": B, "out": B, "scale": "fp32"}
    sizes = {"HEADS": HEADS, "KV_HEADS": HEADS, "HEAD": HEAD}
    cache |= {"partial": "*fp32", "split_counters": "*i32"}
    blocks = {
        "BLOCK_R": 16,
        "BLOCK_C": ATTENTION_CONFIG.block_c,
        "PRECISION": "tf32",
        "SPLITS": ATTENTION_CONFIG.splits,
    }
    every = {**sizes, **blocks}
    compile_kernel("attend", attention.attend_kernel, cache, every, ATTENTION_CONFIG.warps, ATTENTION_CONFIG.stages)
    both_ways = {**sizes, "BLOCK_R": 64, "BLOCK_C": 64, "PRECISION": "tf32"}
    compile_kernel(
        "attend both ways", attention.attend_both_ways_kernel, {**cache, "length": "*i32"}, both_ways, 4, 3
    )
    types = {"logits": "*fp32", "tokens": "*i64", "margins": "*fp32"}
    compile_kernel("choose", attention.choose_kernel, types, {"BLOCK": 8192}, 16, 3)
    for name, out, constants in (
        ("norm", B, {"PARTS": 0, "FP8": False, "GROUPED": False}),
        ("norm fp8", "*fp8e4nv", {"PARTS": 1, "FP8": True, "GROUPED": False}),
        ("norm fp8 int4", "*fp8e4nv", {"PARTS": 2, "FP8": True, "GROUPED": True}),
    ):
        types = {"x": B, "branch": B, "norm": B, "out": out, "scales": "*fp32", "sums": "*fp32", "eps": "fp32"}
        types |= {"row_scale": "*fp32", "column_scale": "*fp32"}
        compile_kernel(name, pointwise.rms_norm_kernel, types, {"N": HIDDEN, "BLOCK": HIDDEN, **constants}, 8, 3)
    types = {"table": B, "index": "*i64", "hidden": B, "norm": B, "scaled": B, "squares": "*fp64"}
    types["next_squares"] = "*fp64"
    compile_kernel("gather", pointwise.gather_kernel, types, {"N": HIDDEN, "BLOCK": HIDDEN}, 8, 3)
    types = {"qkv": B, "cosine": B, "sine": B, **cache, "row_scale": "*fp32", "column_scale": "*fp32"}
    compile_kernel("rotate", pointwise.rotate_kernel, types, {**sizes, "BLOCK_H": 32, "SCALED": True}, 4, 3)
    compile_towers()
    names = ("to_ycc", "offsets", "forward", "before", "factors", "after", "steps", "scales", "from_chroma")
    types = dict.fromkeys(names, "*i32") | dict.fromkeys(("images", "luma", "chroma", "out"), "*u8")
    compile_kernel("jpeg code", jpeg.code_kernel, types, {"ROWS": 16, "COLUMNS": 16}, 8, 3)
    compile_kernel("jpeg merge", jpeg.merge_kernel, types, {"ROWS": 16, "COLUMNS": 16, "BLOCK": 256}, 4, 3)
    images, at = {"images": "*u8", "out": "*u8"}, "*i64"
    weights = {"rows": at, "columns": at, "row_weights": "*fp32", "column_weights": "*fp32"}
    compile_kernel("lanczos", resample.float_resize_kernel, {**images, **weights}, {"BLOCK": 256}, 4, 3, fuse=False)
    shares = dict.fromkeys(("above", "below", "left", "right"), at) | {"across": "*fp32", "down": "*fp32"}
    types = {**images, **shares, "unit": "fp32"}
    compile_kernel("crop", resample.crop_kernel, types, {"BLOCK": 256}, 4, 3, fuse=False)
    types = {"both": B, "scales": "*fp32", "sums": "*fp32", "row_scale": "*fp32", "column_scale": "*fp32"}
    for name, out, flags in (
        ("silu", B, (False, False, False)),
        ("silu fp8", "*fp8e4nv", (True, True, False)),
        ("silu fp8 int4", "*fp8e4nv", (False, True, True)),
    ):
        every = {"BLOCK": 2048, **dict(zip(("SCALED", "FP8", "GROUPED"), flags, strict=True))}
        compile_kernel(name, pointwise.silu_multiply_kernel, {**types, "out": out}, every, 8 if flags[1] else 4, 3)


if __name__ == "__main__":
    main()
