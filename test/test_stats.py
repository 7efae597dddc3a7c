"""Counts add up, percentiles are right, and memory does not grow with time."""

from __future__ import annotations

from vla_ros.stats import Stats


def test_frames_are_counted_by_what_became_of_them() -> None:
    stats = Stats()
    for _ in range(5):
        stats.received()
    stats.unstamped()
    stats.used()
    stats.commanded()
    stats.dropped("replaced", 3)
    stats.dropped("image_invalid")
    stats.dropped("never", 0)
    assert stats.frames() == {
        "received": 5,
        "used": 1,
        "commands": 1,
        "dropped": {"replaced": 3, "image_invalid": 1},
        "unstamped": 1,
    }


def test_percentiles_are_over_the_last_times_only() -> None:
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
