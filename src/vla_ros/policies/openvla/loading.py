"""Builds OpenVLA's network without weights, and checks a checkpoint's tensors against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from vla_ros.policies import quantization, weights
from vla_ros.policies.checkpoint_files import StoredTensor
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.weights import parameter_shapes

M = TypeVar("M", bound=OpenVLAModel)

# Stored in the published files although OpenVLA never uses them: norms and pooling after the last block, and rotary
# frequencies that older versions of transformers saved.
_NEVER_RUN = re.compile(
    r"vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head)\."
    r"|language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$"
)
_BLOCK = re.compile(r"vision_backbone\.(fused_)?featurizer\.blocks\.(\d+)\.")


def build_empty(architecture: Architecture, attention: str = "sdpa", quantize: str = "none") -> OpenVLAModel:
    """Return the network on ``meta``, ready for :func:`~vla_ros.policies.weights.fill`.

    ``quantize`` is the format of the decoder's linear layers: ``none``, ``int8`` or ``nf4``.
    """
    return empty(lambda: OpenVLAModel(architecture, attention), quantize)


def empty(make: Callable[[], M], quantize: str = "none") -> M:
    """Call ``make`` without allocating memory for weights; see :func:`build_empty`."""
    with torch.device("meta"):
        model = make()
        if quantize != "none":
            quantization.install(model.language_model.layers, quantize)
    return model.eval().requires_grad_(False)


def check_weights(model: OpenVLAModel, manifest: Mapping[str, StoredTensor], folder: Path) -> None:
    """Compare parameters with stored tensors; raises CheckpointError if any differ."""
    source = f"{folder}: weights do not fit config.json"
    weights.check_weights(
        parameter_shapes(model), manifest, partial(never_run, architecture=model.architecture), source
    )


def never_run(key: str, architecture: Architecture) -> bool:
    """Return True for stored tensors that OpenVLA does not use, such as the last block of a tower."""
    if _NEVER_RUN.match(key):
        return True
    block = _BLOCK.match(key)
    if block is None:
        return False
    tower = int(block.group(1) is not None)
    if tower >= len(architecture.towers):
        return False
    shape = architecture.towers[tower]
    return shape.used_blocks <= int(block.group(2)) < shape.blocks
