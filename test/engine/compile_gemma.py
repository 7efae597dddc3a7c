"""Compile Gemma's kernels for sm_90a with the sizes of pi0.5 and say what they need; run by test_kernels.py."""

from __future__ import annotations

from compile_kernels import B, compile_kernel

from vla_ros.engine.kernels import flow, gemma
from vla_ros.engine.triton_gemma import FEW_ROWS, FEWEST_ROWS, MANY_ATTENTION, Tiles

WIDTH, MLP, HEADS, HEAD = 1024, 4096, 8, 256
TYPES = {
    **dict.fromkeys(("x", "weight", "out", "scaled", "query", "keys", "values", "cosine", "sine", "parts"), B),
    **dict.fromkeys(("hidden", "tokens", "branch", "both"), B),
    **dict.fromkeys(("squares", "spare", "now", "fixed", "norm", "partial", "sums", "bias", "actions"), "*fp32"),
    **dict.fromkeys(("previous", "weights", "limits", "scales"), "*fp32"),
    **dict.fromkeys(("given", "positions", "ends", "times", "counters"), "*i32"),
    **dict.fromkeys(("eps", "scale", "time", "delta", "factor"), "fp32"),
}
SIZES = {"ADAPTIVE": True, "TILES": 32, "BLOCK_M": 64, "N": WIDTH, "PRECISION": "tf32"}
ATTENDED = {"HEADS": HEADS, "KV_HEADS": 1, "HEAD": HEAD}


def compile_one(name: str, kernel, warps: int, stages: int = 3, **constants) -> None:
    every = {name: value for name, value in {**SIZES, **constants}.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in every else kind for name, kind in TYPES.items()}
    compile_kernel(f"gemma_{name}", kernel, types, every, warps, stages)


def compile_few(name: str, tiles: Tiles, rows: int) -> None:
    for role, kernel, outputs, inputs, constants in (
        ("qkv", flow.qkv_kernel, (HEADS + 2) * HEAD // 2, WIDTH, ATTENDED),
        ("o_proj", flow.add_kernel, WIDTH, HEADS * HEAD, {}),
        ("gate_up", flow.gate_up_kernel, MLP, WIDTH, {"N": MLP}),
        ("down_proj", flow.add_kernel, WIDTH, MLP, {}),
    ):
        tile = getattr(tiles, role).fit(outputs, inputs)
        blocks = {"BLOCK_M": rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "SPLITS": tile.splits}
        compile_one(f"{role}_{name}", kernel, tile.warps, tile.stages, K=inputs, **blocks, **constants)
    tile = tiles.attention
    blocks = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    compile_one(f"attend_{name}", flow.attend_chunk_kernel, tile.warps, tile.stages, **blocks, **ATTENDED)


def main() -> None:
    compile_few("few", FEW_ROWS, 64)
    compile_few("fewest", FEWEST_ROWS, 16)
    compile_one("merge", flow.merge_kernel, 1, CHUNKS=14, PADDED=16, HEAD=HEAD)
    tile = MANY_ATTENTION
    blocks = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    compile_one("attend_many", gemma.attend_kernel, tile.warps, tile.stages, **blocks, **ATTENDED)
    ends = {"A": 32, "H": 50, "BLOCK": WIDTH, "EMBED": True, "SCALED": True}
    compile_one("start", flow.start_kernel, 8, **ends)
    compile_one("advance", flow.advance_kernel, 8, **ends)
    rows = {"N": 2048, "BLOCK": 2048, "QUANTIZE": False, "ADAPTIVE": False, "BRANCH": True}
    compile_one("add_norm", gemma.add_norm_kernel, 8, **rows)
    compile_one("gelu", gemma.gelu_multiply_kernel, 4, **rows)


if __name__ == "__main__":
    main()
