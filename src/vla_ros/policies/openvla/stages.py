"""Times the stages of an inference without synchronising between them."""

from __future__ import annotations

import time

import torch


class StageTimer:
    """Marks the ends of stages: by the clock on a CPU, by events in the stream on a GPU.

    Call :meth:`mark` at the end of each stage, then bring a result to the host (which waits for the device),
    then :meth:`milliseconds`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._names: list[str] = []
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._record()

    def mark(self, name: str) -> None:
        """End the stage ``name`` here; the next one begins."""
        self._names.append(name)
        self._record()

    def milliseconds(self) -> dict[str, float]:
        """Stage name to milliseconds, in order. The device must have finished."""
        if self._cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            return {name: start.elapsed_time(end) for name, (start, end) in zip(self._names, pairs, strict=True)}
        spans = zip(self._times, self._times[1:], strict=False)
        return {name: (end - start) * 1e3 for name, (start, end) in zip(self._names, spans, strict=True)}

    def _record(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())
