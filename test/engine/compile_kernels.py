"""Compile some kernels of the published models for a GPU that is not here, and print what they need.

    python compile_kernels.py CAPABILITY...

Run by test_kernels.py. For Hopper, those are the products with packed weights, whose machine code is examined, and
Gemma's products; for others, the kernels nearest to the limits, each for one of two GPUs with the same limits.
Of several tiles, those with most shared memory or registers. ``benchmarks/gpus.py`` compiles all kernels.
"""

import re
import sys

from hazards import hazards

from benchmarks.kernels import compiled, launches, machine_code, moves
from vla_ros_models.engine.tile_configs import GPUS

COUNTED = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "cp.async": "cp.async.c"}
GEMMA = r"flow_(qkv|gate_up|add K 2048) .*BLOCK_M 64 |attend_prefix"
WANTED = {
    "9.0": {
        "OpenVLA and OFT, int8": r"gemm .*K 4096 .*(FRAGMENTS 8 |K_GROUPS 2 |SPLIT_K 4 ).*EVEN"
        r"|(add|qkv|gate_up) .*K 4096 .*BLOCK_M 1 ",
        "OpenVLA and OFT, 4 bits": r"gemm_fp8 K (4096 .*SPLIT_K 1|11008 .*SPLIT_K 2) EVEN"
        r"|(add|qkv|gate_up) .*K 4096 .*BLOCK_M 32 ",
        "pi0.5": GEMMA,
    },
    "8.9": {"pi0.5": GEMMA},
    "12.0": {
        "OpenVLA and OFT": r"attend_both_ways",
        "pi0.5": r"flow_gate_up .*BLOCK_M 64 |attend_chunk .*BLOCK_R 64 ",
        "SmolVLA": r"(start_mlp|flow_linear) .*BLOCK_M 64 |cross",
    },
}
"""Names of kernels by GPU and model."""


def main(name: str) -> None:
    gpu = GPUS[name]
    for model, wanted in WANTED[name].items():
        found = {launch.name: launch for launch in launches(gpu, model).values() if re.match(wanted, launch.name)}
        for launch in found.values():
            made = compiled(launch, gpu)
            wrong = hazards(machine_code(made)) if name == "9.0" else []
            print(
                f"{name} kernel {launch.name}: registers {made.registers} spills {made.spills}",
                f"shared {made.shared}",
                *(f"{word} {made.ptx.count(text)}" for word, text in COUNTED.items()),
                f"serialized {made.serialized} hazards {len(wrong)} moves {moves(made.ttgir)}",
                f"fits {made.fits(gpu)}",
                flush=True,
            )


if __name__ == "__main__":
    for capability in sys.argv[1:]:
        main(capability)
