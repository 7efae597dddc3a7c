"""Compare GR00T's passes with kernels in Triton's interpreter with torch's; run by test_kernels.py."""

import sys
from pathlib import Path

import torch
from interpret_kernels import prepare_interpreter, round_to_fp8

from vla_ros.engine.fused_ops import FusedOps
from vla_ros.policies.groot import GrootOptions
from vla_ros.policies.groot.inference import check_passes
from vla_ros.policies.groot.loading import load_network, read_checkpoint

DATA = Path(__file__).parents[1] / "data" / "groot"


def main(name: str) -> None:
    """Compare two observations of different lengths in the first layers of each transformer, DeepStack included."""
    prepare_interpreter()
    round_to_fp8()
    checkpoint = read_checkpoint(DATA / "two", GrootOptions(backbone=str(DATA / "backbone")))
    for kind in ("none", "fp8"):
        with torch.inference_mode():
            check_passes(FusedOps(), load_network(checkpoint, dtype=name, flow_steps=2, quantization=kind))
        print("equal", kind)


if __name__ == "__main__":
    main(sys.argv[1])
