"""Estimates the memory that OpenVLA's network needs."""

from __future__ import annotations

from math import prod

from vla_ros.policies.memory import MemoryPlan
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.weights import Shapes

PROMPT_TOKENS = 128
"""Prompt length that the estimate assumes; typical prompts have 20 to 40 tokens."""

_DENSE = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"))
CHOICES = {"cuda": (*_DENSE, ("bfloat16", "int4")), "cpu": (*_DENSE, ("bfloat16", "nf4"))}
"""Options to suggest; the 4-bit format is the engine's on a GPU and bitsandbytes' on a CPU."""

# Scales: int8 and fp8 have one float32 per output row (neglected, because a row has thousands of weights). int4 has
# 4 bytes per 128 weights, nf4 has 8 bits per 64 weights and a float32 per 256 of these scales.
BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per quantised weight, including its share of the scales."""


def is_quantizable(key: str) -> bool:
    """Return True for the weights that quantisation changes: linear layers inside the decoder's blocks."""
    return key.startswith("language_model.model.layers.") and key.endswith("_proj.weight")


def plan_memory(shapes: Shapes, architecture: Architecture, dtype: str, quantize: str, device: str) -> MemoryPlan:
    """Estimate the memory before loading; ``shapes`` are the shapes of the parameters."""
    item = 4 if dtype == "float32" else 2
    weights = sum(
        prod(shape) * (BYTES.get(quantize, item) if is_quantizable(key) else item) for key, shape in shapes.items()
    )
    llm = architecture.llm
    tokens = architecture.patches + PROMPT_TOKENS
    cache = 2 * llm.layers * llm.kv_heads * llm.head_dim * tokens * item
    # The peak: a decoder layer in prefill, the projector's hidden layer, or a tower's block.
    prefill = tokens * (6 * llm.hidden_size + 3 * llm.intermediate_size) + llm.heads * tokens**2
    projector = architecture.patches * 8 * architecture.vision_width
    towers = max(
        (tower.patches + tower.prefix_tokens) * (8 * tower.width + 2 * tower.mlp_width)
        + 2 * tower.heads * (tower.patches + tower.prefix_tokens) ** 2
        for tower in architecture.towers
    )
    activations = max(prefill, projector, towers) * item + 8 * llm.vocab_size
    largest_tensor = max((prod(shape) for shape in shapes.values()), default=0)
    loading = largest_tensor * (4 + item)  # the stored and the converted tensor at the same time
    libraries = 256_000_000 if device.startswith("cuda") else 32_000_000
    return MemoryPlan(int(weights), cache, max(activations, loading) + libraries)
