"""Compares the memory a model needs with the free memory; explains out-of-memory errors."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vla_ros.errors import OutOfMemoryError
from vla_ros_models.engine import fp8
from vla_ros_models.engine.shapes import DecoderShape, TowerShape

logger = logging.getLogger(__name__)

GB = 1e9


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory that a model needs on its device, in bytes."""

    weights: int
    cache: int  # keys and values of one sequence
    working: int  # larger peak of running and of loading a tensor, plus the libraries' buffers

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working

    def __str__(self) -> str:
        return (
            f"{_gb(self.total)} (weights {self.weights / GB:.2f}, cache {self.cache / GB:.2f}, "
            f"working {self.working / GB:.2f})"
        )


def memory_needs(weights: float, cache: int, peak: int, device: str) -> MemoryNeeds:
    """Return the needs in bytes; libraries' own are added to ``peak``, the larger of running and loading."""
    return MemoryNeeds(int(weights), cache, peak + (256_000_000 if device.startswith("cuda") else 32_000_000))


def cache_numbers(shape: DecoderShape, tokens: int) -> int:
    """Return how many keys and values a sequence of ``tokens`` has."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens


def prefill_numbers(shape: DecoderShape, tokens: int) -> int:
    """Return how many activations a decoder layer holds at once while it runs ``tokens``."""
    rows = tokens * (8 * shape.hidden_size + 4 * shape.intermediate_size)
    return rows + 2 * shape.heads * tokens**2


def tower_numbers(shape: TowerShape, images: int = 1) -> int:
    """Return how many activations a vision tower's block holds at once."""
    tokens = shape.patches + shape.prefix_tokens
    return images * (tokens * (8 * shape.width + 2 * shape.mlp_width) + 2 * shape.heads * tokens**2)


def available_memory(device: str) -> int | None:
    """Return the free bytes on ``device``, on a CPU within the container's limit; None if unknown."""
    found = [value for value in (_meminfo(), _cgroup()) if value is not None]
    if device.startswith("cuda"):
        where, share = torch.device(device), getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        free, total = torch.cuda.mem_get_info(where)
        limit = int(share(where) * total) - torch.cuda.memory_allocated(where)
        # On unified memory, the driver does not count what the host would give up, such as files that were read.
        found = [*found, limit] if is_unified(device) else [free, limit]
    return min(found, default=None)


def is_unified(device: str) -> bool:
    """Return True if a GPU shares its memory with the host, as on a Jetson."""
    return device.startswith("cuda") and bool(torch.cuda.get_device_properties(device).is_integrated)


@dataclass(frozen=True)
class MemoryCheck:
    """Checks a model's memory before loading, and suggests options when memory runs out."""

    plan: Callable[[str, str, str], MemoryNeeds]  # takes a data type, a quantisation and a device
    choices: tuple[tuple[str, str], ...]  # pairs of data type and quantisation to suggest, best first
    device: str  # where the model runs
    available: Callable[[str], int | None] = available_memory
    unified: Callable[[str], bool] = is_unified

    def require(self, dtype: str, quantization: str) -> str:
        """Describe required and free memory in one line.

        If it does not suffice, raises OutOfMemoryError with the options that would fit.
        """
        plan, free = self.plan(dtype, quantization, self.device), self.available(self.device)
        if free is None:
            return f"needs {plan} on {self.device}; the free memory is unknown"
        if plan.total > free:
            raise OutOfMemoryError(
                f"the checkpoint needs {plan} on {self.device} with policy.dtype {dtype} and policy.quantization "
                f"{quantization}, but {_gb(free)} are free. {self.advise()}"
            )
        return f"needs {plan} on {self.device}, {_gb(free)} are free"

    def table(self, dtype: str, quantization: str) -> str:
        """Describe what each format needs, and whether it fits, before anything is loaded."""
        free, shared = self.available(self.device), ", shared with the host" if self.unified(self.device) else ""
        lines = [f"memory of {self.device}: {_gb(free)} free{shared}"]
        for one in dict.fromkeys([(dtype, quantization), *self._formats(self.device)]):
            plan = self.plan(*one, self.device)
            fits = "" if free is None else ", fits" if plan.total <= free else ", does not fit"
            chosen = " (chosen)" if one == (dtype, quantization) else ""
            lines.append(f"  policy.dtype:={one[0]} policy.quantization:={one[1]}{chosen}: {plan}{fits}")
        return "\n".join(lines)

    def _formats(self, place: str) -> list[tuple[str, str]]:
        """Return the choices that a device can run."""
        return [one for one in self.choices if one[1] != "fp8" or fp8.runs_on(torch.device(place))]

    def advise(self) -> str:
        """Describe the options with which the model would fit into the free memory."""
        fitting, sizes = [], []
        others = () if self.unified(self.device) else ("cpu",)  # the same memory
        for place in dict.fromkeys((self.device, *others)):
            where, free = "" if place == self.device else "policy.device:=cpu ", self.available(place)
            for dtype, kind in self._formats(place):
                sizes.append(total := self.plan(dtype, kind, place).total)
                if free is not None and total <= free:
                    fitting.append(f"{where}policy.dtype:={dtype} policy.quantization:={kind} ({_gb(total)})")
        if fitting:
            return "Options that fit: " + "; ".join(fitting)
        return (
            f"No options fit: the smallest choice needs {_gb(min(sizes))}. Stop other programs that use "
            "memory, or use a larger machine"
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an allocator's error into OutOfMemoryError with advice; logs the memory use."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            logger.error("out of memory on %s: %s\n%s", self.device, error, allocator_summary(self.device))
            raise OutOfMemoryError(f"out of memory on {self.device}. {self.advise()}") from error


def allocator_summary(device: str) -> str:
    """Summarise memory use: the CUDA allocator's table, or the process and the free memory."""
    if device.startswith("cuda"):
        return str(torch.cuda.memory_summary(torch.device(device), abbreviated=True))
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    process = ", ".join(" ".join(line.split()) for line in lines if line.startswith(("VmRSS", "VmHWM", "VmSize")))
    return f"process: {process or 'unknown'}; free: {_gb(available_memory('cpu'))}"


def _gb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GB:.2f} GB"


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return (
        isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))
        or "can't allocate memory" in text
        or "out of memory" in text
    )


def _meminfo() -> int | None:
    path = Path("/proc/meminfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _cgroup() -> int | None:
    """Return the bytes left in the container's limit (cgroup v2 or v1), page cache included."""
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
