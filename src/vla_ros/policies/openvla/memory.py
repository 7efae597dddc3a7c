"""Estimates a checkpoint's memory, and suggests options if it does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import prod

from vla_ros.policies.devices import GB, MemoryPlan, available_memory, require_memory
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.quantization import bytes_per_weight, is_quantizable

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 128
"""Prompt length that the estimate assumes; usual prompts have 20 to 40 tokens."""


def choices(device: str) -> tuple[tuple[str, str], ...]:
    """Data type and quantisation, best first; 4 bits are the engine's on a GPU and bitsandbytes' elsewhere."""
    four = "int4" if device.startswith("cuda") else "nf4"
    return ("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", four)


def plan_memory(
    shapes: Mapping[str, tuple[int, ...]], architecture: Architecture, dtype: str, quantize: str, device: str
) -> MemoryPlan:
    """Estimate before anything is loaded; ``shapes`` is checkpoint key to shape, of the weights that run."""
    item = 4 if dtype == "float32" else 2
    weights = 0.0
    for key, shape in shapes.items():
        size = bytes_per_weight(quantize) if quantize != "none" and is_quantizable(key) else item
        weights += prod(shape) * size
    llm = architecture.llm
    tokens = architecture.patches + PROMPT_TOKENS
    cache = 2 * llm.layers * llm.kv_heads * llm.head_dim * tokens * item
    # One decoder layer at prefill, the projector's hidden layer, one tower's block: the largest counts.
    prefill = tokens * (6 * llm.hidden_size + 3 * llm.intermediate_size) + llm.heads * tokens**2
    projector = architecture.patches * 8 * architecture.vision_width
    towers = max(
        (tower.patches + tower.prefix_tokens) * (8 * tower.width + 2 * tower.mlp_width)
        + 2 * tower.heads * (tower.patches + tower.prefix_tokens) ** 2
        for tower in architecture.towers
    )
    activations = max(prefill, projector, towers) * item + 8 * llm.vocab_size
    largest_tensor = max((prod(shape) for shape in shapes.values()), default=0)
    loading = largest_tensor * (4 + item)  # the file's copy and the converted one, side by side
    libraries = 256_000_000 if device.startswith("cuda") else 32_000_000
    return MemoryPlan(int(weights), cache, max(activations, loading) + libraries)


def check_memory(
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    dtype: str,
    quantize: str,
    device: str,
    available: Callable[[str], int | None] = available_memory,
) -> str:
    """Compare needed with available memory; return one line for the log.

    Raises OutOfMemoryError, which lists the options that would fit.
    """
    plan = plan_memory(shapes, architecture, dtype, quantize, device)
    options = f"with policy.dtype {dtype} and policy.quantization {quantize}"
    return require_memory(
        plan, options, device, available(device), lambda free: advise(shapes, architecture, device, available)
    )


def advise(
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    device: str,
    available: Callable[[str], int | None] = available_memory,
) -> str:
    """Return the options that would fit into the free memory, as parameters to set."""
    fitting = []
    smallest: MemoryPlan | None = None
    for place in dict.fromkeys((device, "cpu")):
        free = available(place)
        for dtype, quantize in choices(place):
            plan = plan_memory(shapes, architecture, dtype, quantize, place)
            smallest = plan if smallest is None or plan.total < smallest.total else smallest
            if free is not None and plan.total <= free:
                where = "" if place == device else "policy.device:=cpu "
                fitting.append(
                    f"{where}policy.dtype:={dtype} policy.quantization:={quantize} ({plan.total / GB:.2f} GB)"
                )
    if fitting:
        return "What fits: " + "; ".join(fitting)
    assert smallest is not None
    return (
        f"Nothing fits here: the smallest choice (4 bits) needs {smallest.total / GB:.2f} GB. "
        "Stop other programs that hold memory, or take a larger machine"
    )
