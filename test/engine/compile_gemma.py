"""Compile Gemma's kernels for sm_90a with the sizes of pi0.5 and say what they need; run by test_kernels.py."""

from __future__ import annotations

from compile_kernels import B, compile_kernel

from vla_ros.engine.kernels import gemma
from vla_ros.engine.triton_gemma import FEW_ATTENTION, FEW_ROWS, MANY_ATTENTION

WIDTH, MLP, HEADS, HEAD = 1024, 4096, 8, 256
NORMS = {"norm": "*fp32", "times": "*i32", "eps": "fp32"}
SUMS = {"squares": "*fp64", "next_squares": "*fp64", "counters": "*i32", "partial": "*fp32"}
ADAPTIVE = {"ADAPTIVE": True}


def few(role: str, kernel, types, inputs: int, outputs: int, **constants) -> None:
    config = FEW_ROWS[role].fit(outputs, inputs)
    types = {"x": B, "weight": B, "out": B, "scaled": B, "shift": "*fp32", **NORMS, **SUMS, **types}
    blocks = {"BLOCK_M": 64, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "K": inputs}
    every = {**blocks, "PRECISION": "tf32", **constants}
    compile_kernel(f"gemma_{role}", kernel, types, every, config.warps, config.stages)


def main() -> None:
    cache = {"positions": "*i32", "cosine": B, "sine": B, "query": B, "keys": B, "values": B}
    heads = {"HEADS": HEADS, "KV_HEADS": 1, "HEAD": HEAD}
    few("qkv", gemma.qkv_kernel, cache, WIDTH, 1280, SHIFTED=True, **heads)
    few("gate_up", gemma.gate_up_kernel, {}, WIDTH, MLP, N=MLP, SHIFTED=True)
    for role, inputs in (("o_proj", HEADS * HEAD), ("down_proj", MLP)):
        splits = FEW_ROWS[role].fit(WIDTH, inputs).splits
        few(role, gemma.add_kernel, {}, inputs, WIDTH, N=WIDTH, SPLITS=splits, **ADAPTIVE)
    for name, config in (("few", FEW_ATTENTION), ("many", MANY_ATTENTION)):
        types = {**cache, "ends": "*i32", "out": B, "mixes": B, **SUMS, "scale": "fp32"}
        blocks = {"BLOCK_R": config.rows, "BLOCK_C": config.columns, "SPLITS": config.splits}
        constants = {**heads, **blocks, "PRECISION": "tf32"}
        compile_kernel(f"gemma_attend_{name}", gemma.attend_kernel, types, constants, config.warps, config.stages)
    rows = {"N": WIDTH, "BLOCK": WIDTH, **ADAPTIVE}
    types = {**NORMS, **SUMS, "hidden": B, "scaled": B, "tokens": B, "branch": B, "out": B, "x": B, "both": B}
    wide = dict.fromkeys(("weight", "bias", "actions", "previous", "weights", "limits"), "*fp32")
    types |= {**wide, "given": "*i32", "scales": "*fp32", "time": "fp32", "delta": "fp32", "factor": "fp32"}
    compile_kernel("gemma_start", gemma.start_kernel, types, {**rows, "A": 32, "EMBED": True}, 8, 3)
    last = {"H": 50, "A": 32, "SCALED": True}
    compile_kernel("gemma_advance", gemma.advance_kernel, types, {**rows, **last}, 8, 3)
    many = {"N": 2048, "BLOCK": 2048, "ADAPTIVE": False, "BRANCH": True, "QUANTIZE": False}
    compile_kernel("gemma_add_norm", gemma.add_norm_kernel, types, many, 8, 3)
    compile_kernel("gemma_gelu", gemma.gelu_multiply_kernel, types, {"BLOCK": 2048, "QUANTIZE": False}, 4, 3)


if __name__ == "__main__":
    main()
