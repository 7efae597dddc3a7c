"""Plans the memory of pi0 and pi0.5 before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from vla_ros.policies.devices import GB, MemoryPlan, available_memory, require_memory
from vla_ros.policies.pi.architecture import PROMPT_TOKENS, PiArchitecture
from vla_ros.policies.pi.loading import parameter_dtype
from vla_ros.policies.pi.names import Parts


def plan_memory(
    parts: Parts,
    architecture: PiArchitecture,
    dtype: str,
    device: str,
    cameras: int = 3,
    flow_steps: int = 10,
) -> MemoryPlan:
    """Estimate the bytes of a model that serves one robot.

    ``parts`` are from :func:`~vla_ros.policies.pi.loading.check_weights`; the constants of ``flow_steps`` are kept.
    """
    torch_dtype = getattr(torch, dtype)
    item = torch_dtype.itemsize
    weights = sum(
        prod(part.shape) * parameter_dtype(name, torch_dtype).itemsize
        for name, group in parts.items()
        for part in group
    )
    vision, prefix, expert = architecture.vision, architecture.prefix, architecture.expert
    weights += (flow_steps + 1) * (2 * expert.depth + 1) * 3 * expert.width * 4
    tokens = cameras * vision.patches + PROMPT_TOKENS[architecture.model]
    places = tokens + 1 + architecture.horizon
    cache = 2 * prefix.depth * prefix.kv_heads * prefix.head_dim * places * item
    towers = cameras * vision.patches * (8 * vision.width + 2 * vision.mlp_width) * item
    towers += cameras * 2 * vision.heads * vision.patches**2 * item
    prefill = tokens * (8 * prefix.width + 4 * prefix.mlp_width) * item + 2 * prefix.heads * tokens**2 * item
    working = max(towers, prefill)
    if device.startswith("cuda"):  # a stored tensor is converted on the host, so loading takes nothing here
        return MemoryPlan(weights, cache, working + 256_000_000)
    largest = max(prod(part.shape) for group in parts.values() for part in group)
    return MemoryPlan(weights, cache, max(working, largest * 4) + 32_000_000)


def check_memory(
    plan: Callable[[str], MemoryPlan],
    dtype: str,
    device: str,
    available: Callable[[str], int | None] = available_memory,
) -> str:
    """Describe required and free memory in one line; OutOfMemoryError says whether bfloat16 would fit.

    ``plan`` returns the memory needed with a data type.
    """

    def advice(free: int) -> str:
        small = plan("bfloat16")
        fits = dtype != "bfloat16" and small.total <= free
        return (
            f"policy.dtype:=bfloat16 fits ({small.total / GB:.2f} GB)"
            if fits
            else "Free memory or take a larger machine"
        )

    return require_memory(plan(dtype), f"in {dtype}", device, available(device), advice)
