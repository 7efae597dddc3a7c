"""Builds OpenVLA's network without weights, checks a checkpoint's tensors against it, estimates its memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

from vla_ros.policies import quantization, weights
from vla_ros.policies.checkpoint_files import StoredTensor
from vla_ros.policies.memory import MemoryPlan, cache_numbers, estimate, prefill_numbers, tower_numbers
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.weights import Shapes, parameter_shapes

M = TypeVar("M", bound=OpenVLAModel)

# Stored in the published files although OpenVLA never uses them: norms and pooling after the last block, and rotary
# frequencies that older versions of transformers saved.
_NEVER_RUN = re.compile(
    r"vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head)\."
    r"|language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$"
)
_BLOCK = re.compile(r"vision_backbone\.(fused_)?featurizer\.blocks\.(\d+)\.")

_PROMPT_TOKENS = 128
"""Prompt length that the estimate assumes; typical prompts have 20 to 40 tokens."""

_DENSE = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"))
OPENVLA_CHOICES = {"cuda": (*_DENSE, ("bfloat16", "int4")), "cpu": (*_DENSE, ("bfloat16", "nf4"))}
"""Options to suggest; the 4-bit format is the engine's on a GPU and bitsandbytes' on a CPU."""

# Scales: int8 and fp8 have one float32 per output row (neglected, because a row has thousands of weights). int4 has
# 4 bytes per 128 weights, nf4 has 8 bits per 64 weights and a float32 per 256 of these scales.
BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per quantised weight, including its share of the scales."""


def build_empty(architecture: Architecture, quantize: str = "none") -> OpenVLAModel:
    """Return the network on ``meta``, ready for :func:`~vla_ros.policies.weights.fill`.

    ``quantize`` is the format of the decoder's linear layers: ``none``, ``int8`` or ``nf4``.
    """
    return empty(lambda: OpenVLAModel(architecture), quantize)


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


def is_quantizable(key: str) -> bool:
    """Return True for the weights that quantisation changes: linear layers inside the decoder's blocks."""
    return key.startswith("language_model.model.layers.") and key.endswith("_proj.weight")


def plan_memory(shapes: Shapes, architecture: Architecture, dtype: str, quantize: str, device: str) -> MemoryPlan:
    """Estimate the memory before loading; ``shapes`` are the shapes of the parameters."""
    item = 4 if dtype == "float32" else 2
    weights = sum(
        prod(shape) * (BYTES.get(quantize, item) if is_quantizable(key) else item) for key, shape in shapes.items()
    )
    llm, tokens = architecture.llm, architecture.patches + _PROMPT_TOKENS
    projector = architecture.patches * 8 * architecture.vision_width
    activations = max(prefill_numbers(llm, tokens), projector, *map(tower_numbers, architecture.towers))
    largest_tensor = max((prod(shape) for shape in shapes.values()), default=0)
    loading = largest_tensor * (4 + item)  # the stored and the converted tensor at the same time
    peak = max(activations * item + 8 * llm.vocab_size, loading)
    return estimate(weights, cache_numbers(llm, tokens) * item, peak, device)
