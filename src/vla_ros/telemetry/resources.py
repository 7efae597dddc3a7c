"""Resources of a process: memory, threads, file descriptors, GPU memory.

Read from ``/proc``; empty on systems without it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path


def process_resources(pid: int | str = "self") -> Mapping[str, int]:
    """Return a process's ``resident_bytes``, ``threads`` and ``descriptors``; empty if they cannot be read."""
    folder = Path("/proc") / str(pid)
    try:
        lines = (folder / "status").read_text(encoding="ascii", errors="replace").splitlines()
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return {}
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    resident, threads = fields.get("VmRSS"), fields.get("Threads")
    if not resident or not threads:  # a process that has ended and waits for its parent
        return {}
    return {"resident_bytes": 1024 * int(resident[0]), "threads": int(threads[0]), "descriptors": descriptors}


def gpu_memory() -> Mapping[str, int]:
    """Return this process's ``gpu_allocated_bytes`` and ``gpu_peak_bytes`` on all GPUs; empty if it uses none.

    It does not import torch: a process that has not loaded torch has no tensors.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    devices = range(cuda.device_count())
    return {
        "gpu_allocated_bytes": sum(int(cuda.memory_allocated(device)) for device in devices),
        "gpu_peak_bytes": sum(int(cuda.max_memory_allocated(device)) for device in devices),
    }
