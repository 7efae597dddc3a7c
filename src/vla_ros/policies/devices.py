"""Chooses a device, measures its free memory, and explains out-of-memory errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vla_ros.errors import ConfigError, OutOfMemoryError

logger = logging.getLogger(__name__)

GB = 1e9


def choose_device(text: str) -> torch.device:
    """Return ``policy.device`` as a torch device of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda:0" if count else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"policy.device: '{text}'; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= count:
        raise ConfigError(
            f"policy.device: '{text}' is not available; torch {torch.__version__} sees {count} CUDA devices"
        )
    return torch.device("cuda", device.index or 0)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a model needs on its device, in bytes."""

    weights: int  # all weights that run
    cache: int  # keys and values of one sequence
    working: int  # the largest moment of activations or of loading one tensor, and the libraries' own buffers

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.weights + self.cache + self.working

    def __str__(self) -> str:
        return (
            f"{self.total / GB:.2f} GB (weights {self.weights / GB:.2f}, cache {self.cache / GB:.2f}, "
            f"working {self.working / GB:.2f})"
        )


def available_memory(device: str) -> int | None:
    """Return the free bytes on ``device`` (on a CPU, also within the container's limit), or None if unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    found = [value for value in (_meminfo(), _cgroup()) if value is not None]
    return min(found, default=None)


def require_memory(
    plan: MemoryPlan, options: str, device: str, free: int | None, advice: Callable[[int], str]
) -> str:
    """Describe required and free memory in one line; OutOfMemoryError ends with ``advice(free)``.

    ``options`` says with which the plan was made.
    """
    if free is None:
        return f"needs {plan} on {device}; how much is free there is not known"
    if plan.total > free:
        raise OutOfMemoryError(
            f"the checkpoint needs {plan} on {device} {options}, but {free / GB:.2f} GB are free. {advice(free)}"
        )
    return f"needs {plan} on {device}, {free / GB:.2f} GB are free"


@contextmanager
def explain_out_of_memory(device: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn an allocator's error into :class:`OutOfMemoryError` with ``advice()``, its summary into the log."""
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
    """Return the bytes left within the container's limit (cgroup v2, then v1); page cache counts as free."""
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
