"""The benchmark of handovers: what it calls late, and a few handovers in MuJoCo."""

import pytest

pytest.importorskip("mujoco", reason="the simulation needs MuJoCo (extra 'sim')")

from benchmarks.takeover import measure
from benchmarks.takeover_graph import figures
from tools.faults.records import Record

FRAME, JOINTS = Record("frame", 0.9, 11), Record("joints", 0.9, 12)
ASKED, ANSWERED = Record("ask", 1.0, name="correct"), Record("answer", 1.01, name="correct")
BACK, ENDED = Record("ask", 2.0, name="policy"), Record("answer", 2.01, name="policy")


def command(time: float, stamp: int, delay: float = 0.001) -> Record:
    return Record("command", time, stamp, delay=delay)


@pytest.mark.parametrize(
    ("commands", "late"),
    [
        ([command(0.95, 11), command(1.005, 11)], 0),
        ([command(0.95, 11), command(1.2, 11)], 0),  # a deceleration
        ([command(0.95, 11), command(1.5, 11)], 1),
        ([command(1.02, 11)], 1),  # the policy's, on a frame from before
        ([command(1.02, 11, 0.02)], 0),  # sent before the answer
        ([command(1.02, 12)], 0),  # a hold
        ([command(1.5, 15), command(2.005, 16)], 0),
        ([command(2.05, 16)], 1),  # the person's, after handing back
    ],
)
def test_what_is_late(commands: list[Record], late: int) -> None:
    found = figures([FRAME, JOINTS, ASKED, ANSWERED, BACK, ENDED, *commands])
    assert found["late"] == late
    assert (found["requests"], found["refused"], found["p99_ms"]) == (2, 0, 10.0)


def test_no_handover_jumps_and_none_is_late() -> None:
    cases = measure(10, 3)
    assert sum(found.commands["person"] for found in cases.values()) > 100
    for name, found in cases.items():
        assert (found.takeovers, found.releases) == (1, 1), name
        assert found.jump <= 1 + 1e-6, name
        assert found.acceleration <= 1 + 1e-6, name
        assert not found.late, name
