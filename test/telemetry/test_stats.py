import numpy as np
import pytest

from vla_ros.control.clock import Now
from vla_ros.control.command import Command
from vla_ros.control.outcome import COMMANDED, REPLACED, FrameOutcome, StepResult
from vla_ros.telemetry.execution import ExecutionStats
from vla_ros.telemetry.stats import Stats
from vla_ros.types import ActionChunk


def test_each_frame_is_counted_under_its_outcome() -> None:
    stats = Stats()
    for _ in range(5):
        stats.received()
    stats.unstamped()
    stats.commanded()
    for outcome in (COMMANDED, *[REPLACED] * 3, "image_invalid"):
        stats.on_outcome(FrameOutcome(1, "/camera", 2, outcome))
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


PERIOD, JOINTS = 0.1, {"arm": 1}


def sent(stats: ExecutionStats, at: float, position: float, *, seam: int = -1, speed: float | None = None) -> None:
    """A step at ``at`` seconds, a finger that jumps beside the joint; ``seam`` is the index of a chunk's first."""
    velocities = None if speed is None else {"joint": speed}
    command = Command(("joint", "finger"), np.array([position, at * 99]), 0, velocities=velocities)
    chunk = ActionChunk(np.zeros((8, 1)), 0) if seam >= 0 else None
    step = StepResult(round((at - 0.05) * 1e9), max(seam, 0), np.zeros(1), (command,), chunk=chunk)
    stats.sent(step, JOINTS, Now(round(at * 1e9), round(at * 1e9)), PERIOD)


def test_gaps_ages_and_chunks_are_counted() -> None:
    stats = ExecutionStats()
    for at, seam in ((1.0, 0), (1.1, -1), (1.2, 3), (1.6, -1), (1.7, 2)):
        sent(stats, at, 0.0, seam=seam)
    found = stats.summary()
    assert (found["steps"], found["chunks"], found["skipped"]) == (5, 3, 5)
    assert found["stalled_share"] == pytest.approx(0.3 / 0.7, rel=1e-4)
    assert found["longest_gap_ms"] == pytest.approx(400)
    assert found["age_p50_ms"] == pytest.approx(50)


def test_commanded_velocities_are_used_directly() -> None:
    stats = ExecutionStats()
    for number in range(4):
        sent(stats, number * PERIOD, 0.0, speed=0.2 * number)
    assert stats.summary()["acceleration"] == pytest.approx(2.0)
