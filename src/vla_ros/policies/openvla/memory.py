"""Estimates a checkpoint's memory, and suggests options if it does not fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from vla_ros.errors import OutOfMemoryError
from vla_ros.policies.openvla.architecture import Architecture
from vla_ros.policies.openvla.quantization import bytes_per_weight, is_quantizable

logger = logging.getLogger(__name__)

GB = 1e9
PROMPT_TOKENS = 128
"""Prompt length that the estimate assumes; usual prompts have 20 to 40 tokens."""


def choices(device: str) -> tuple[tuple[str, str], ...]:
    """Data type and quantisation, best first; 4 bits are the engine's on a GPU and bitsandbytes' elsewhere."""
    four = "int4" if device.startswith("cuda") else "nf4"
    return ("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", four)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model takes on its device.

    Attributes:
        weights: All weights that run.
        cache: Keys and values of one sequence.
        working: The largest moment of activations or of loading one tensor, and the libraries' own buffers.
    """

    weights: int
    cache: int
    working: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.cache + self.working

    def __str__(self) -> str:
        return (
            f"{self.total / GB:.2f} GB (weights {self.weights / GB:.2f}, cache {self.cache / GB:.2f}, "
            f"working {self.working / GB:.2f})"
        )


def plan_memory(
    shapes: Mapping[str, tuple[int, ...]], architecture: Architecture, dtype: str, quantize: str, device: str
) -> MemoryPlan:
    """Estimate before anything is loaded.

    Args:
        shapes: Checkpoint key to shape, of the weights that run.
        architecture: Sizes.
        dtype: ``float32`` or ``bfloat16``.
        quantize: ``none``, ``int8``, ``int4`` or ``nf4``.
        device: ``cpu`` or ``cuda...``.
    """
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


def available_memory(device: str) -> int | None:
    """Free bytes on ``device``; for a CPU also within this container's limit. None if unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    found = [value for value in (_meminfo(), _cgroup()) if value is not None]
    return min(found, default=None)


def check_memory(
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    dtype: str,
    quantize: str,
    device: str,
    available: Callable[[str], int | None] = available_memory,
) -> str:
    """Compare needed with available memory; return one line for the log.

    Raises:
        OutOfMemoryError: It does not fit; the text lists the options that would.
    """
    plan = plan_memory(shapes, architecture, dtype, quantize, device)
    free = available(device)
    if free is None:
        return f"needs {plan} on {device}; how much is free there is not known"
    if plan.total > free:
        raise OutOfMemoryError(
            f"the checkpoint needs {plan} on {device} with policy.dtype {dtype} and policy.quantization "
            f"{quantize}, but {free / GB:.2f} GB are free. {advise(shapes, architecture, device, available)}"
        )
    return f"needs {plan} on {device}, {free / GB:.2f} GB are free"


def advise(
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    device: str,
    available: Callable[[str], int | None] = available_memory,
) -> str:
    """The options that would fit into what is free now, as parameters to set."""
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


@contextmanager
def explain_out_of_memory(device: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn an allocator's error into :class:`OutOfMemoryError`, its summary into the log.

    Args:
        device: Where the model runs.
        advice: Asked only when it happens.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        logger.error("out of memory on %s: %s\n%s", device, error, allocator_summary(device))
        raise OutOfMemoryError(f"out of memory on {device}. {advice()}") from error


def allocator_summary(device: str) -> str:
    """Summarise memory use: the CUDA allocator's table, or the process's and the machine's figures."""
    if device.startswith("cuda"):
        return str(torch.cuda.memory_summary(torch.device(device), abbreviated=True))
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    process = ", ".join(" ".join(line.split()) for line in lines if line.startswith(("VmRSS", "VmHWM", "VmSize")))
    free = available_memory("cpu")
    return f"process: {process or 'unknown'}; free: {'unknown' if free is None else f'{free / GB:.2f} GB'}"


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return (
        isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))
        or "can't allocate memory" in text
        or "out of memory" in text
    )


def _meminfo() -> int | None:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _cgroup() -> int | None:
    """What the container's limit leaves (cgroup v2, then v1); page cache counts as free."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            limit = int((root / limit_name).read_text())
            used = int((root / used_name).read_text())
            stat = (root / limit_name).with_name("memory.stat").read_text().split()
        except (OSError, ValueError):
            continue
        cached = int(stat[stat.index(cache_name) + 1]) if cache_name in stat else 0
        return max(0, limit - used + cached)
    return None
