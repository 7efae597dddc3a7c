"""Compile every kernel for sm_90a with the sizes of OpenVLA-7B and say what it needs; run by test_kernels.py.

Triton brings its own assembler, so no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vla_ros.engine.kernels import attention, linear, pointwise, quantized
from vla_ros.engine.triton_ops import LAUNCHES

B = "*bf16"
HIDDEN, HEADS, HEAD = 4096, 32, 128
WEIGHTS = {
    "dense": (B, B, B, 1),
    "int8": ("*i8", "*fp32", "*fp32", 1),
    "int4": ("*u8", B, "*u8", 128),
}


def compile_kernel(name: str, kernel, types, constants, warps: int, stages: int) -> None:
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, n in enumerate(kernel.arg_names)
        if signature[n].startswith("*")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [str(assembler), "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    ptx = compiled.asm["ptx"]
    counted = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "cp.async": "cp.async.c"}
    print(
        f"kernel {name}: registers {registers.group(1)} spills {spills.group(1)} shared {compiled.metadata.shared}",
        *(f"{word} {ptx.count(text)}" for word, text in counted.items()),
    )


def main() -> None:
    for kind, (weight, scale, zero, group) in WEIGHTS.items():
        types = {"x": B, "weight": weight, "scale": scale, "zero": zero, "out": B}
        common = {"GROUP": group, "KIND": kind, "ASM": True, "PRECISION": "tf32"}

        def skinny(role: str, kernel, inputs: int, types, kind=kind, common=common, **constants) -> None:
            launch = LAUNCHES[role, kind]
            blocks = {"BLOCK_M": 16, "BLOCK_N": launch.outputs, "BLOCK_K": launch.inputs, "K": inputs}
            compile_kernel(
                f"{role} {kind} {inputs}",
                kernel,
                types,
                {**common, **blocks, **constants},
                launch.warps,
                launch.stages,
            )

        for inputs in (HIDDEN, 11008):
            skinny("add", linear.linear_kernel, inputs, types, ADD=True)
        if kind == "dense":
            skinny("head", linear.linear_kernel, HIDDEN, {**types, "out": "*fp32"}, ADD=False)
        skinny("gate_up", linear.gate_up_kernel, HIDDEN, types)
        heads = {"HEADS": HEADS, "KV_HEADS": HEADS, "HEAD": HEAD}
        cache = {"positions": "*i32", "cosine": B, "sine": B, "query": B, "keys": B, "values": B}
        skinny("qkv", linear.qkv_kernel, HIDDEN, {**types, **cache}, **heads)
        if kind == "dense":
            continue
        blocks = {"BLOCK_N": 128, "BLOCK_K": 64, "K": HIDDEN}
        stages = 2 if kind == "int4" else 3
        compile_kernel(
            f"gemm {kind}",
            quantized.gemm_kernel,
            types,
            {**common, **blocks, "BLOCK_M": 128, "ADD": False},
            8,
            stages,
        )
        del common["PRECISION"]
        compile_kernel(
            f"dequantize {kind}", quantized.dequantize_kernel, types, {**common, **blocks, "BLOCK_N": 16}, 4, 3
        )
    cache = {"positions": "*i32", "query": B, "keys": B, "values": B, "out": B, "scale": "fp32"}
    sizes = {"HEADS": HEADS, "KV_HEADS": HEADS, "HEAD": HEAD}
    blocks = {"BLOCK_R": 16, "BLOCK_C": 64, "PRECISION": "tf32"}
    compile_kernel("attend", attention.attend_kernel, cache, {**sizes, **blocks}, 4, 3)
    types = {"logits": "*fp32", "tokens": "*i64", "margins": "*fp32"}
    compile_kernel("choose", attention.choose_kernel, types, {"BLOCK": 4096}, 8, 3)
    types = {"x": B, "gain": B, "out": B, "eps": "fp32"}
    compile_kernel("norm", pointwise.rms_norm_kernel, types, {"N": HIDDEN, "BLOCK": HIDDEN}, 8, 3)
    types = {"qkv": B, "cosine": B, "sine": B, **cache}
    compile_kernel("rotate", pointwise.rotate_kernel, types, {**sizes, "BLOCK_H": 128}, 8, 3)
    compile_kernel("silu", pointwise.silu_multiply_kernel, {"both": B, "out": B}, {"BLOCK": 2048}, 4, 3)


if __name__ == "__main__":
    main()
