"""The trace has one line per frame; a failing disk ends the recording and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_ros.control.outcome import COMMANDED, FrameOutcome
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError
from vla_ros.telemetry.frame_trace import FrameTrace


def test_outcomes_are_written_in_order(tmp_path: Path) -> None:
    said: list[str] = []
    trace = FrameTrace(tmp_path / "trace.jsonl", said.append)
    trace.frame(FrameOutcome(7, "/camera", 8, COMMANDED, ended=9, stages_ms={"inference": 1.23456}))
    trace.frame(FrameOutcome(10, "/camera", 11, "frame_old", Reason.FRAME_OLD, "0.9 s old"))
    trace.close()
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert lines == [
        {
            "stamp": 7,
            "camera": "/camera",
            "outcome": "command",
            "times": {"received": 8, "sent": 9},
            "stages_ms": {"inference": 1.235},
        },
        {"stamp": 10, "camera": "/camera", "outcome": "frame_old", "times": {"received": 11}, "stages_ms": {}},
    ]
    assert (said, trace.lost) == ([], 0)


def test_a_full_disk_is_reported_once_and_lost_lines_are_counted() -> None:
    said: list[str] = []
    trace = FrameTrace("/dev/full", said.append)
    trace.frame(FrameOutcome(1, "/camera", 2, COMMANDED))
    trace.close()
    trace.frame(FrameOutcome(2, "/camera", 3, COMMANDED))
    assert trace.lost == 2
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_file_that_cannot_be_opened_fails_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node.trace: .*nowhere"):
        FrameTrace(tmp_path / "nowhere" / "trace.jsonl", print)
