"""``vla-ros middleware``."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_ros.cli.main import main


def test_it_prints_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["middleware", "fastdds", "--width", "1920", "--height", "1080", "--distro", "lyrical"]) == 0
    printed = capsys.readouterr().out
    assert "<segment_size>50331648</segment_size>" in printed
    assert "export FASTDDS_DEFAULT_PROFILES_FILE=" in printed


def test_the_frames_come_from_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["middleware", "iceoryx", "--distro", "jazzy", "-p", "camera.width:=800"]) == 0
    assert "1 camera of 800x480" in capsys.readouterr().out


def test_write_prints_the_file_to_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["middleware", "iceoryx", "--distro", "humble", "--write", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"source {tmp_path}/iceoryx.sh\n"
    assert {file.name for file in tmp_path.iterdir()} == {"iceoryx.sh", "iceoryx_0.10.xml", "roudi.toml"}


def test_check_returns_1_and_prints_one_line_if_not_in_force(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMENT_PREFIX_PATH", "")
    monkeypatch.delenv("RMW_IMPLEMENTATION", raising=False)
    assert main(["middleware", "fastdds", "--distro", "jazzy", "--check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "rmw_fastrtps_cpp is not installed" in printed
