import pytest

from vla_ros.control.outcome import COMMANDED, FrameOutcome
from vla_ros.errors import ConfigError
from vla_ros.telemetry.frame_trace import FrameTrace


def test_a_full_disk_is_reported_once_and_lost_lines_are_counted() -> None:
    said: list[str] = []
    trace = FrameTrace("/dev/full", said.append)
    trace.on_outcome(FrameOutcome(1, "/camera", 2, COMMANDED))
    trace.close()
    trace.on_outcome(FrameOutcome(2, "/camera", 3, COMMANDED))
    assert trace.lost == 2
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_file_that_cannot_be_opened_fails_at_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"node.trace: .*nowhere"):
        FrameTrace(tmp_path / "nowhere" / "trace.jsonl", print)
