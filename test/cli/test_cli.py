"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vla_ros.cli import doctor
from vla_ros.cli.main import main

HEAVY = ("torch", "mujoco", "pinocchio", "cyclonedds", "transformers", "rclpy")


def vla_ros(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vla_ros.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_command_all_commands_are_listed() -> None:
    answer = vla_ros()
    assert answer.returncode == 0
    for name in ("run", "demo", "replay", "doctor", "config"):
        assert name in answer.stdout


def test_an_unknown_command_is_wrong_usage() -> None:
    answer = vla_ros("rnu")
    assert answer.returncode == 2
    assert "rnu" in answer.stderr


def test_config_prints_all_options_and_takes_overrides() -> None:
    answer = vla_ros("config", "-p", "control.rate_hz:=7")
    assert answer.returncode == 0
    assert "rate_hz: 7.0" in answer.stdout
    assert "checkpoint: ''" in answer.stdout


def test_a_wrong_option_ends_with_one_line_and_status_1() -> None:
    answer = vla_ros("config", "-p", "control.rate:=7")
    assert answer.returncode == 1
    assert answer.stderr == "vla-ros config: control.rate: no such parameter; did you mean 'control.rate_hz'?\n"


def test_doctor_names_what_it_found() -> None:
    answer = vla_ros("doctor", "--json")
    assert answer.returncode == 0
    rows = {row["name"]: row for row in json.loads(answer.stdout)}
    assert {"Python", "ROS 2", "torch", "GPU", "EGL", "memory", "socket buffer"} <= set(rows)
    assert all(row["fix"] for row in rows.values() if row["level"] == "wrong")


def test_doctor_prints_commands_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fix = "pip install 'vla_ros[dds]' " + "x" * 120
    monkeypatch.setattr(
        doctor, "examine", lambda: iter([doctor.Finding("embedded DDS", "none", doctor.WRONG, fix)])
    )
    assert main(["doctor"]) == 0
    assert fix in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["config"]])
def test_light_commands_load_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys\n"
        "from vla_ros.cli.main import main\n"
        f"try: main({words!r})\n"
        "except SystemExit: pass\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
