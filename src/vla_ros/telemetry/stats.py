"""Stage times and frame counts for diagnostics, the demo and bench.

Only the 4096 newest times of each stage are kept. The receiving and control threads write; readers copy under the
lock and compute without it.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_ros.control.outcome import ANSWERED, FrameOutcome
from vla_ros.telemetry.execution import REMEMBERED, ExecutionStats, Recent
from vla_ros.types import FloatArray


class Stats:
    """Thread-safe record of stage times and frame counts; ``execution`` has the figures of sent steps.

    Each frame counts once: ``received == used + sum(dropped) + (frames in progress)``.
    """

    def __init__(self) -> None:
        self.execution = ExecutionStats()
        self._lock = threading.Lock()
        self._stages: defaultdict[str, Recent] = defaultdict(lambda: Recent(REMEMBERED))
        self._dropped: Counter[str] = Counter()
        self._received = self._unstamped = self._used = self._commands = 0

    def record(self, stages_ms: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in stages_ms.items():
                self._stages[name].append(value)

    def received(self) -> None:
        with self._lock:
            self._received += 1

    def unstamped(self) -> None:
        """Count a frame without a stamp; its time of arrival is used instead."""
        with self._lock:
            self._unstamped += 1

    def on_outcome(self, outcome: FrameOutcome) -> None:
        with self._lock:
            if outcome.outcome in ANSWERED:
                self._used += 1
            else:
                self._dropped[outcome.outcome] += 1

    def commanded(self) -> None:
        with self._lock:
            self._commands += 1

    def frames(self) -> dict[str, Any]:
        """Return the counts ``received``, ``used``, ``dropped`` (by reason), ``commands`` and ``unstamped``."""
        with self._lock:
            return {
                "received": self._received,
                "used": self._used,
                "dropped": dict(self._dropped),
                "commands": self._commands,
                "unstamped": self._unstamped,
            }

    def samples_ms(self) -> dict[str, list[float]]:
        """Return each stage's recent times in milliseconds, oldest first, for histograms."""
        return {name: values.round(3).tolist() for name, values in self._copies().items()}

    def latency_ms(self) -> dict[str, dict[str, float]]:
        """Return ``p50``, ``p99`` (milliseconds) and ``count`` of each stage's recent times."""
        latency = {}
        for name, values in self._copies().items():
            p50, p99 = np.percentile(values, (50, 99)).tolist()
            latency[name] = {"p50": round(p50, 3), "p99": round(p99, 3), "count": len(values)}
        return latency

    def _copies(self) -> dict[str, FloatArray]:
        with self._lock:
            return {name: values.read() for name, values in self._stages.items()}

    def summary(self) -> dict[str, Any]:
        """Return what ``vla-ros run --stats`` writes: execution, latency, frames and latency samples."""
        return {
            "execution": self.execution.summary(),
            "latency_ms": self.latency_ms(),
            "frames": self.frames(),
            "latency_samples_ms": self.samples_ms(),
        }
