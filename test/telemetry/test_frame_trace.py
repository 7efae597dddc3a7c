"""One line per frame; a disk that fails ends the recording and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_ros.errors import ConfigError
from vla_ros.telemetry.frame_trace import FrameTrace


def test_frames_are_written_in_order_with_all_that_is_known(tmp_path: Path) -> None:
    said: list[str] = []
    trace = FrameTrace(tmp_path / "trace.jsonl", said.append)
    trace.frame(7, "/camera", "command", {"received": 8, "sent": 9}, {"inference": 1.23456})
    trace.frame(10, "/camera", "frame_old", {"received": 11})
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


def test_a_full_disk_is_said_once_and_lines_are_counted_as_lost() -> None:
    said: list[str] = []
    trace = FrameTrace("/dev/full", said.append)
    trace.frame(1, "/camera", "command", {})
    trace.close()
    trace.frame(2, "/camera", "command", {})
    assert trace.lost == 2
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_file_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node.trace: .*nowhere"):
        FrameTrace(tmp_path / "nowhere" / "trace.jsonl", print)
