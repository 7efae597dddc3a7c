"""Runs an engine's stages: directly on the host, or as graphs on a CUDA stream; packs what they transfer."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 256  # bytes; kernels are compiled for the alignment of the device's allocations

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of an array."""


class TransferBuffer:
    """Arrays on a device, and the same arrays on the host, which one copy transfers together.

    ``tensors`` (int64, int32 or float32) are views of ``buffer``, uint8 [N], and ``arrays`` those of ``host``,
    which is page-locked if the device is a GPU. The copies do not wait and may be captured. Every copy costs the
    host about ten microseconds, whatever its size; a captured one costs it nothing.
    """

    def __init__(self, device: torch.device, *fields: Field) -> None:
        spans: list[tuple[slice, Field]] = []
        end = 0
        for shape, dtype in fields:
            size = prod(shape) * dtype.itemsize
            spans.append((slice(end, end + size), (shape, dtype)))
            end += -(-size // _ALIGNED) * _ALIGNED
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.tensors, on_host = (
            [part[span].view(dtype).view(shape) for span, (shape, dtype) in spans]
            for part in (self.buffer, self.host)
        )
        self._bytes = self.host.numpy()
        self.arrays: list[NDArray[Any]] = [one.numpy() for one in on_host]

    def cleared(self) -> Sequence[NDArray[Any]]:
        """Return the arrays on the host, filled with zeros; the last transfer must have ended."""
        self._bytes.fill(0)
        return self.arrays

    def load(self) -> None:
        """Copy to the device."""
        self.buffer.copy_(self.host, non_blocking=True)

    def store(self) -> None:
        """Copy to the host, which must wait before it reads :attr:`arrays`."""
        self.host.copy_(self.buffer, non_blocking=True)


_CHUNK = 2**20  # bytes; one chunk is transferred while the host copies the next

_PAUSE = 1e-5  # s between two looks at an event, of which the kernel makes 60 to 70 microseconds

_MARKS = 32  # events, used in turn; an inference makes at most nine marks

Stage = Callable[[], None]
"""A stage over fixed buffers, without arguments or result."""


class Runner:
    """Runs stages directly, for CPUs and tests; :class:`CudaRunner` overrides this for GPUs."""

    graphs = False
    """True if :meth:`capture` makes stages faster."""
    watch: Callable[[], None] | None = None
    """Called while the host waits for the device, which may wait for a lost GPU; it may raise."""

    def stream(self) -> AbstractContextManager[Any]:
        """Run the enclosed code on the engine's stream."""
        return nullcontext()

    def upload(self, target: Tensor, source: NDArray[Any]) -> None:
        """Copy ``source`` to a device buffer without waiting; ``source`` may be changed immediately."""
        np.copyto(target.numpy(), source)  # not through a tensor: torch warns about read-only arrays

    def page_locked(self, size: int) -> NDArray[np.uint8] | None:
        """Return ``size`` bytes of the host from which :meth:`upload` transfers without a copy, or None."""
        return None

    def forget(self, target: Tensor) -> None:
        """Free the staging buffer for uploads to ``target``."""

    def wait(self) -> None:
        """Wait for all earlier work."""

    def download(self, tensor: Tensor) -> NDArray[Any]:
        """Copy to the host and wait for this copy only."""
        copy: NDArray[Any] = tensor.numpy().copy()
        return copy

    def capture(self, stage: Stage) -> Stage:
        """Capture the stage as one launch; this runs it a few times."""
        return stage

    def beside(self) -> AbstractContextManager[Any]:
        """Run the enclosed code after all earlier work, in parallel with later work up to :meth:`join`."""
        return nullcontext()

    def join(self) -> None:
        """Make later work wait for all parallel work."""

    def mark(self) -> Any:
        """Record a point in time on the device."""
        return time.perf_counter()

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks in milliseconds; wait for the later one."""
        return float(end - start) * 1e3

    def close(self) -> None:
        """Release all resources."""


class CudaRunner(Runner):
    """Runs stages on a high-priority stream, with pinned staging buffers and graphs that share a memory pool.

    Only one thread may use it, except :meth:`capture`, which a second thread may call at the same time. Without
    ``graphs`` stages run launch by launch.

    Captures run while other graphs are replayed, so the two must not share memory. cuBLAS keeps a workspace per
    stream, and torch reuses about thirty streams in turn: with a new stream for every capture, a warm-up would
    eventually overwrite the workspace of an earlier graph during its replay. Hence there are two fixed streams: one
    only for warm-up, the other only for capture. Captured graphs are replayed one after the other.
    """

    def __init__(self, device: torch.device, graphs: bool = True) -> None:
        self.device, self.graphs = device, graphs
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        # torch's streams do not wait for each other, and weights are loaded on another stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._on_stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        self._warming = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recording = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._beside: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        self._capturing = threading.Lock()
        self._pool = torch.cuda.graph_pool_handle()
        self._pinned: dict[tuple[int, str], Tensor] = {}
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_MARKS)]  # type: ignore[no-untyped-call]
        self._marks = itertools.cycle(events)

    def stream(self) -> AbstractContextManager[Any]:
        return self._on_stream

    def upload(self, target: Tensor, source: NDArray[Any]) -> None:
        """See :class:`Runner`.

        From page-locked memory the device reads by itself; ``source`` may then change only after the next
        :meth:`wait`. Otherwise each target has its own pinned buffer, which is reused only after the next
        :meth:`wait` or download. Large arrays are copied in chunks, so that one chunk is transferred while the host
        copies the next.
        """
        if source.flags.writeable and source.flags.c_contiguous:  # torch warns about read-only arrays
            given = torch.from_numpy(source)
            if given.is_pinned() and given.dtype == target.dtype and given.shape == target.shape:
                target.copy_(given, non_blocking=True)
                return
        staging = self._staging(target, "up")
        host = staging.numpy()
        alike = source.flags.c_contiguous and source.dtype == host.dtype and source.size == host.size
        if staging.nbytes <= _CHUNK or not alike:
            np.copyto(host, source)
            target.copy_(staging, non_blocking=True)
            return
        there, pinned, host, source = target.view(-1), staging.view(-1), host.reshape(-1), source.reshape(-1)
        items = _CHUNK // staging.itemsize
        for start in range(0, source.size, items):
            chunk = slice(start, start + items)
            np.copyto(host[chunk], source[chunk])
            there[chunk].copy_(pinned[chunk], non_blocking=True)

    def download(self, tensor: Tensor) -> NDArray[Any]:
        host = self._staging(tensor, "down")
        host.copy_(tensor, non_blocking=True)
        self.wait()
        copy: NDArray[Any] = host.numpy().copy()
        return copy

    def page_locked(self, size: int) -> NDArray[np.uint8] | None:
        with suppress(RuntimeError):  # the host has no more such memory: frames are then copied for each upload
            memory: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return memory
        return None

    def wait(self) -> None:
        self._done.record(self._stream)
        self._wait(self._done)

    def forget(self, target: Tensor) -> None:
        self._pinned.pop((target.data_ptr(), "up"), None)

    def capture(self, stage: Stage) -> Stage:
        """See :class:`Runner`. Only one capture runs at a time; a second thread waits."""
        if not self.graphs:
            return stage
        with self._capturing:
            self._warm(stage)
            return self._record(stage)

    def _warm(self, stage: Stage) -> None:
        self._warming.wait_stream(torch.cuda.current_stream(self.device))  # which initialised the buffers
        with torch.cuda.stream(self._warming):
            for _ in range(3):
                stage()
        if self.watch is None:
            self._warming.synchronize()
        else:
            self._wait(self._warming.record_event())

    def _record(self, stage: Stage) -> Stage:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which waits for the whole device and empties the allocator's cache, and so would
        # delay the inference thread. With thread_local, that thread may allocate without breaking the capture.
        with torch.cuda.stream(self._recording):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                stage()
            except BaseException:
                with suppress(RuntimeError):  # it only says that the capture is invalid; raise the cause instead
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def beside(self) -> AbstractContextManager[Any]:
        """See :class:`Runner`. Each stream with parallel work has one side stream."""
        current = torch.cuda.current_stream(self.device)
        if current not in self._beside:
            self._beside[current] = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._beside[current].wait_stream(current)
        context: AbstractContextManager[Any] = torch.cuda.stream(self._beside[current])
        return context

    def join(self) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._beside[current])

    def mark(self) -> torch.cuda.Event:
        event = next(self._marks)
        event.record(self._stream)
        return event

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        self._wait(end)
        return float(start.elapsed_time(end))

    def close(self) -> None:
        self._pinned.clear()

    def _wait(self, event: torch.cuda.Event) -> None:
        if self.watch is None:
            event.synchronize()
        while self.watch is not None and not event.query():  # type: ignore[no-untyped-call]
            self.watch()
            time.sleep(_PAUSE)

    def _staging(self, tensor: Tensor, direction: str) -> Tensor:
        key = (tensor.data_ptr(), direction)
        staging = self._pinned.get(key)
        if staging is None or staging.shape != tensor.shape or staging.dtype != tensor.dtype:
            staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[key] = staging
        return staging


def make_runner(device: torch.device, graphs: bool = True) -> Runner:
    return CudaRunner(device, graphs) if device.type == "cuda" else Runner()
