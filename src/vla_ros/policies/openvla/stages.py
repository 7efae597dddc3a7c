"""Times the stages of an inference without synchronising between them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class StageTimer:
    """Marks the ends of stages: by the clock on a CPU, by events in the stream on a GPU.

    Call :meth:`mark` at the end of each stage, then bring a result to the host (which waits for the device),
    then :meth:`milliseconds`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """End the stage ``name`` here; the next one begins."""
        at: Any = time.perf_counter()
        if self._cuda:
            at = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            at.record()
        self._marks.append((name, at))

    def milliseconds(self) -> dict[str, float]:
        """Stage name to milliseconds, in order. The device must have finished."""
        return {
            name: start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            for (_, start), (name, end) in pairwise(self._marks)
        }
