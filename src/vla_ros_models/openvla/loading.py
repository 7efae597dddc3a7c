"""Builds the network without weights, checks a checkpoint's tensors, estimates the memory, loads the weights."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from vla_ros.policies.base import Progress, no_progress
from vla_ros_models import weights
from vla_ros_models.checkpoint_files import Produce, StoredTensor
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.weights import DecoderWeights, assemble, fuse_layer
from vla_ros_models.memory import MemoryNeeds, cache_numbers, memory_needs, prefill_numbers, tower_numbers
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.network import OpenVLAModel
from vla_ros_models.splitting import Shard
from vla_ros_models.weights import Shapes, parameter_shapes, place

# Stored in the published files although OpenVLA never uses them: norms and pooling after the last block, and rotary
# frequencies that older versions of transformers saved.
_NEVER_RUN = re.compile(
    r"vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head)\."
    r"|language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$"
)
DECODER = "language_model."
"""The decoder's names begin with this."""
_LAYERS = f"{DECODER}model.layers."
_BLOCK = re.compile(r"vision_backbone\.(fused_)?featurizer\.blocks\.(\d+)\.")

M = TypeVar("M", bound=OpenVLAModel)

_PROMPT_TOKENS = 128
"""Prompt length that the estimate assumes; typical prompts have 20 to 40 tokens."""

OPENVLA_CHOICES = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))
"""Options to suggest if memory does not suffice."""

BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
"""Bytes per quantised weight. int4 has 4 bytes of scales per 128 weights, the others a negligible share."""


def build_empty(architecture: Architecture) -> OpenVLAModel:
    """Return the network on ``meta``, ready for :func:`~vla_ros_models.weights.fill`."""
    return weights.empty(lambda: OpenVLAModel(architecture))


def build_shard(make: Callable[[Architecture], M], architecture: Architecture, shard: Shard) -> M:
    """Return the shard of a network that ``make`` builds, on ``meta``."""

    def build() -> M:
        model, llm = make(replace(architecture, llm=shard.shape(architecture.llm))), architecture.llm
        if shard.count > 1:
            model.vision_backbone.keep(shard.has_tower)
            rows = llm.vocab_size // shard.count
            model.language_model.lm_head = nn.Linear(llm.hidden_size, rows, bias=False)
        return model

    return weights.empty(build)


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
    return key.startswith(_LAYERS) and key.endswith("_proj.weight")


def plan_memory(shapes: Shapes, architecture: Architecture, dtype: str, quantize: str, device: str) -> MemoryNeeds:
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
    return memory_needs(weights, cache_numbers(llm, tokens) * item, peak, device)


def fill_quantized(
    model: OpenVLAModel,
    produce: Produce,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    progress: Progress = no_progress,
    ranks: Ranks | None = None,
) -> DecoderWeights:
    """Load the weights of a network on ``meta``; quantise one decoder layer at a time to save memory.

    Returns the decoder; in ``model`` everything else is usable, in the data type ``dtype``.
    """
    names = [name for name, _ in model.named_parameters()]
    for name, tensor in produce([name for name in names if not name.startswith(_LAYERS)]):
        place(model, name, tensor, device, dtype)
    fused = []
    for index, layer in enumerate(model.language_model.layers):
        for name, tensor in produce([name for name in names if name.startswith(f"{_LAYERS}{index}.")]):
            place(model, name, tensor, device, dtype)
        fused.append(fuse_layer(layer, quantization, keep=False, ranks=ranks))
        progress((index + 1) / model.architecture.llm.layers, f"loading layer {index + 1}")
    model.to(device)
    return assemble(model.language_model, tuple(fused))
