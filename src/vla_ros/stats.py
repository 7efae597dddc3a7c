"""How long each stage takes and what became of every frame, for diagnostics, the demo and bench.

Times are kept for the last frames only: memory does not grow however long the node runs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

_REMEMBERED = 4096


class Stats:
    """Thread-safe record of stage times and frame counts.

    Frames are counted once each: ``received == used + sum(dropped) + (those still under way)``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._stages: dict[str, deque[float]] = {}
            self._dropped: Counter[str] = Counter()
            self._received = 0
            self._unstamped = 0
            self._used = 0
            self._commands = 0

    def record(self, stages_ms: Mapping[str, float]) -> None:
        """Store one time, in milliseconds, for each stage named."""
        with self._lock:
            for name, value in stages_ms.items():
                self._stages.setdefault(name, deque(maxlen=_REMEMBERED)).append(value)

    def received(self) -> None:
        """A frame came."""
        with self._lock:
            self._received += 1

    def unstamped(self) -> None:
        """A frame that came had no stamp; it counts as taken when it came."""
        with self._lock:
            self._unstamped += 1

    def used(self) -> None:
        """A frame was turned into an answer."""
        with self._lock:
            self._used += 1

    def commanded(self) -> None:
        """A command was sent."""
        with self._lock:
            self._commands += 1

    def dropped(self, reason: str, count: int = 1) -> None:
        """Frames were not used, for ``reason``."""
        if count:
            with self._lock:
                self._dropped[reason] += count

    def frames(self) -> dict[str, Any]:
        """``received``, ``used``, ``dropped`` (by reason), ``commands``, and ``unstamped`` of those received."""
        with self._lock:
            return {
                "received": self._received,
                "used": self._used,
                "dropped": dict(self._dropped),
                "commands": self._commands,
                "unstamped": self._unstamped,
            }

    def samples_ms(self) -> dict[str, list[float]]:
        """Stage to its last times in milliseconds, oldest first: for histograms."""
        with self._lock:
            return {name: [round(value, 3) for value in values] for name, values in self._stages.items()}

    def latency_ms(self) -> dict[str, dict[str, float]]:
        """Stage to ``p50``, ``p99`` and ``count`` over the last frames, milliseconds."""
        with self._lock:
            stages = {name: np.fromiter(values, float) for name, values in self._stages.items()}
        return {
            name: {
                "p50": round(float(np.percentile(values, 50)), 3),
                "p99": round(float(np.percentile(values, 99)), 3),
                "count": len(values),
            }
            for name, values in stages.items()
        }

    def summary(self) -> dict[str, Any]:
        """``latency_ms``, ``frames`` and ``latency_samples_ms``, as ``vla-ros run --stats`` writes them."""
        return {
            "latency_ms": self.latency_ms(),
            "frames": self.frames(),
            "latency_samples_ms": self.samples_ms(),
        }
