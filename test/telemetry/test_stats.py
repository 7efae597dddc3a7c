"""Counts add up, percentiles are right, and memory does not grow with time."""

from __future__ import annotations

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
    assert stats.samples_ms() == {"decode": [float(value) for value in range(20_000 - 4096, 20_000)]}
    assert Stats().summary() == {
        "execution": {"steps": 0, "chunks": 0, "skipped": 0},
        "latency_ms": {},
        "frames": {"received": 0, "used": 0, "dropped": {}, "commands": 0, "unstamped": 0},
        "latency_samples_ms": {},
    }
