"""The processes over which a decoder is split, one per GPU: what they add up, and how rank 0 leads the others.

All ranks run the same stages over their own shards. Rank 0 has the inputs and says which stage is next
(:meth:`Ranks.tell`); the others obey (:meth:`Ranks.orders`). A stage of several ranks begins with a collective, so
that it may be launched on the others before rank 0 has its inputs ready.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore

_JOINING, _LOOKS = timedelta(seconds=60), timedelta(seconds=0.2)

NCCL_SETTINGS: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",  # would listen on a port
    # Graphs are launched on one stream, one after the other.
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
    "NCCL_GRAPH_REGISTER": "0",  # the messages are small, and buffers are freed with their graphs
    # The processes are watched by this package; torch's watchdog would end the whole node.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Settings of NCCL, unless the environment has others."""


class Ranks:
    """A group of one: adds up nothing and leads nobody. :class:`GroupOfRanks` overrides this for several."""

    rank, count = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a contiguous tensor of all ranks in place; return it."""
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks; changes ``tensor``."""
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the last axes of all ranks in their order: [B, R, count * N] of [B, R, N]."""
        return tensor

    def copy(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite a contiguous tensor with that of rank ``source``."""

    def tell(self, order: str) -> None:
        """Send an order to all other ranks, as rank 0."""

    def orders(self) -> Iterator[str]:
        """Yield rank 0's orders until it ends."""
        return iter(())

    def running(self, loading: bool = False) -> AbstractContextManager[None]:
        """Limit the duration of the enclosed work, longer while ``loading``; raises DeviceLostError."""
        return nullcontext()

    def check(self) -> None:
        """Raise DeviceLostError if a rank was lost."""

    def close(self) -> None:
        """End all other ranks."""


class GroupOfRanks(Ranks):
    """Several ranks: over NCCL on GPUs, over gloo on CPUs. ``folder`` is where they meet.

    The constructor waits for all of them.
    """

    def __init__(self, rank: int, count: int, device: torch.device, folder: Path) -> None:
        self.rank, self.count, self.device = rank, count, device
        store: Any = FileStore(str(folder / "store"), count)
        store.set_timeout(_JOINING)
        make = _nccl if device.type == "cuda" else _gloo
        self.group: Any = make(store, rank, count, device)  # torch types these classes incompletely
        self.sum(torch.zeros(1, device=device))  # connects
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _KEPT.append(self.group)
        for shape, dtype in (((1, 4096), torch.float32), ((288, 4096), torch.bfloat16)):
            found = self.sum(torch.full(shape, rank + 1.0, dtype=dtype, device=device))
            if not bool((found == count * (count + 1) / 2).all()):
                raise RuntimeError(f"policy.gpus: the ranks' sum of {dtype} is wrong; check nvidia-smi topo -m")

    def sum(self, tensor: Tensor) -> Tensor:
        self._wait(self.group.allreduce([tensor], _now(dist.AllreduceOptions())))
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        options = _now(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(self.group.allreduce([tensor], options))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        batch, rows, width = tensor.shape
        parts = tensor.new_empty(self.count * batch, rows, width)
        self._wait(self.group._allgather_base(parts, tensor.contiguous(), _now(AllgatherOptions())))
        return (
            parts.view(self.count, batch, rows, width).permute(1, 2, 0, 3).reshape(batch, rows, self.count * width)
        )

    def copy(self, tensor: Tensor, source: int = 0) -> None:
        options = _now(dist.BroadcastOptions())
        options.rootRank = source
        self._wait(self.group.broadcast([tensor.view(torch.uint8)], options))

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective; over gloo, which may miss that a rank has ended, also for the watcher."""
        while work is not None and self.device.type != "cuda" and not work.is_completed():
            with suppress(RuntimeError):  # of the time, or of the collective, raised below
                work.wait(_LOOKS)
            self.check()
        if work is not None:
            work.wait()

    def abort(self) -> None:
        """End all collectives that wait for a lost rank."""
        if self.device.type == "cuda":
            self.group.abort()


_KEPT: list[Any] = []
"""All groups: destructors of torch's would wait for other ranks, which may have ended."""


def _now(options: Any) -> Any:
    """Let a collective run on the current stream, not on a stream of its own."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _nccl(store: Any, rank: int, count: int, device: torch.device) -> Any:
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # the processes' watcher has its own
    return dist.ProcessGroupNCCL(store, rank, count, options)


def _gloo(store: Any, rank: int, count: int, device: torch.device) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(days=1)
    return gloo(store, rank, count, options)
