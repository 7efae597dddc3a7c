"""Counts add up, percentiles are right, and memory does not grow with time."""

from __future__ import annotations

import threading
import time

from vla_ros.control.outcome import COMMANDED, REPLACED, FrameOutcome
from vla_ros.telemetry.stats import Stats


def test_each_frame_is_counted_under_its_outcome() -> None:
    stats = Stats()
    for _ in range(5):
        stats.received()
    stats.unstamped()
    stats.commanded()
    for outcome in (COMMANDED, *[REPLACED] * 3, "image_invalid"):
        stats.frame(FrameOutcome(1, "/camera", 2, outcome))
    assert stats.frames() == {
        "received": 5,
        "used": 1,
        "commands": 1,
        "dropped": {"replaced": 3, "image_invalid": 1},
        "unstamped": 1,
    }


def test_percentiles_cover_the_last_samples_only() -> None:
    stats = Stats()
    for value in range(20_000):
        stats.record({"decode": float(value)})
    decode = stats.latency_ms()["decode"]
    assert decode["count"] == 4096
    assert 17_900 < decode["p50"] < 18_000
    assert decode["p99"] > 19_900
    stats.clear()
    assert stats.summary() == {
        "latency_ms": {},
        "frames": {"received": 0, "used": 0, "dropped": {}, "commands": 0, "unstamped": 0},
        "latency_samples_ms": {},
    }


def test_samples_are_the_last_ones_oldest_first() -> None:
    stats = Stats()
    for value in range(5000):
        stats.record({"decode": value + 0.00049})
    assert stats.samples_ms() == {"decode": [float(value) for value in range(5000 - 4096, 5000)]}


class _TimedLock:
    """A lock that sums how long it was held, in CPU time of the thread that held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.held += time.thread_time() - self._began
        self._lock.release()


def test_reading_does_not_block_recording() -> None:
    """The lock is held while numbers are copied, not while some 60,000 of them are rounded and sorted."""
    stats = Stats()
    for _ in range(5000):
        stats.record({f"stage_{number}": 1.0 for number in range(14)})
    lock = stats._lock = _TimedLock()
    began = time.thread_time()
    for _ in range(5):
        stats.summary()
    assert lock.held < 0.4 * (time.thread_time() - began)
