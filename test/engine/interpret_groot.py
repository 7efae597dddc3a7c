"""Compare GR00T's passes with kernels in Triton's interpreter with torch's."""

from dataclasses import replace

import torch

from benchmarks.models.groot import published, random_tensors
from vla_ros_models.engine.fused_ops import FusedOps
from vla_ros_models.groot.building import build_model, with_few_rows
from vla_ros_models.groot.inference import check_passes


def main(name: str) -> None:
    """Compare two observations of different lengths in the first layers of each transformer, DeepStack included.

    The head's width is no power of two, as the published one.
    """
    sizes = published(True, 5)
    blocks = {"hidden_size": 96, "heads": 2, "kv_heads": 2, "head_dim": 48, "intermediate_size": 192, "layers": 3}
    sizes = replace(sizes, head=replace(sizes.head, **blocks))
    kind = "none" if name == "float32" else "fp8"  # of the language model only
    tensors = random_tensors(sizes, torch.device("cpu"), getattr(torch, name))
    model = with_few_rows(build_model(sizes, tensors, 2, kind))
    assert model.few is not None
    check_passes(FusedOps(), model)
    print("equal GR00T", kind)
