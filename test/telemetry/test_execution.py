"""What is recorded of the steps that were sent, from steps whose accelerations and gaps are known."""

from __future__ import annotations

import numpy as np
import pytest

from vla_ros.control.clock import Now
from vla_ros.control.command import Command
from vla_ros.control.outcome import StepResult
from vla_ros.telemetry.execution import ExecutionStats
from vla_ros.types import ActionChunk

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
