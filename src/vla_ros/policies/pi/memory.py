"""Estimates the memory of pi0 and pi0.5."""

from __future__ import annotations

from math import prod

import torch

from vla_ros.policies.memory import MemoryPlan
from vla_ros.policies.pi.architecture import PROMPT_TOKENS, PiArchitecture
from vla_ros.policies.pi.loading import parameter_dtype
from vla_ros.policies.pi.names import Parts

_ALL = (("float32", "none"), ("bfloat16", "none"))
CHOICES = {"cuda": _ALL, "cpu": _ALL}


def plan_memory(
    parts: Parts,
    architecture: PiArchitecture,
    dtype: str,
    quantization: str,
    device: str,
    cameras: int = 3,
    flow_steps: int = 10,
) -> MemoryPlan:
    """Estimate the memory of a model for one robot, before loading.

    ``parts`` are from :func:`~vla_ros.policies.pi.names.parameter_parts`. ``quantization`` has no effect: the dense
    weights are loaded first and determine the peak.
    """
    torch_dtype = getattr(torch, dtype)
    item = torch_dtype.itemsize
    weights = sum(
        prod(part.shape) * parameter_dtype(name, torch_dtype).itemsize
        for name, group in parts.items()
        for part in group
    )
    vision, prefix, expert = architecture.vision, architecture.prefix, architecture.expert
    weights += (flow_steps + 1) * (2 * expert.layers + 1) * 3 * expert.hidden_size * 4
    tokens = cameras * vision.patches + PROMPT_TOKENS[architecture.model]
    places = tokens + 1 + architecture.horizon
    cache = 2 * prefix.layers * prefix.kv_heads * prefix.head_dim * places * item
    towers = cameras * vision.patches * (8 * vision.width + 2 * vision.mlp_width) * item
    towers += cameras * 2 * vision.heads * vision.patches**2 * item
    prefill = (
        tokens * (8 * prefix.hidden_size + 4 * prefix.intermediate_size) * item
        + 2 * prefix.heads * tokens**2 * item
    )
    working = max(towers, prefill)
    if device.startswith("cuda"):  # the host converts stored tensors, so loading needs no more
        return MemoryPlan(weights, cache, working + 256_000_000)
    largest = max(prod(part.shape) for group in parts.values() for part in group)
    return MemoryPlan(weights, cache, max(working, largest * 4) + 32_000_000)
