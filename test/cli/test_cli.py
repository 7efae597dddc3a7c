import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from test.command import vla_ros
from vla_ros.cli import doctor
from vla_ros.cli.main import main

HEAVY = ("torch", "mujoco", "pinocchio", "cyclonedds", "transformers", "rclpy", "rosbags", "cv2")


def test_without_a_command_all_commands_are_listed() -> None:
    done = vla_ros()
    for name in ("run", "demo", "replay", "doctor", "config"):
        assert name in done.stdout


def test_an_unknown_command_is_wrong_usage() -> None:
    assert "rnu" in vla_ros("rnu", status=2).stderr


def test_an_interrupt_during_an_import_is_not_blamed_on_opengl(monkeypatch, capsys) -> None:
    """pybind11 turns the KeyboardInterrupt into an ImportError."""
    pytest.importorskip("mujoco")

    def interrupted(*_: int) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setitem(sys.modules, "mujoco.egl", SimpleNamespace(GLContext=interrupted))
    assert main(["demo", "--policy", "expert", "--simulated-time"]) == 130
    assert capsys.readouterr().err.endswith("vla-ros demo: interrupted\n")


def test_config_prints_all_options_and_takes_overrides() -> None:
    done = vla_ros("config", "-p", "control.rate_hz:=7")
    assert "rate_hz: 7.0" in done.stdout
    assert "checkpoint: ''" in done.stdout


def test_a_wrong_option_ends_with_one_line_and_status_1() -> None:
    done = vla_ros("config", "-p", "control.rate:=7", status=1)
    assert done.stderr == "vla-ros config: control.rate: no such parameter; did you mean 'control.rate_hz'?\n"


def test_doctor_reports_every_subject() -> None:
    rows = {row["name"]: row for row in json.loads(vla_ros("doctor", "--json").stdout)}
    assert {"Python", "ROS 2", "torch", "GPU", "EGL", "memory", "socket buffer"} <= set(rows)
    assert all(row["fix"] for row in rows.values() if row["level"] == "wrong")


def test_doctor_does_not_wrap_commands(monkeypatch, capsys) -> None:
    fix = "pip install 'vla_ros[dds]' " + "x" * 120
    monkeypatch.setattr(
        doctor, "examine", lambda: iter([doctor.Finding("embedded DDS", "none", doctor.WRONG, fix)])
    )
    assert main(["doctor"]) == 0
    assert fix in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"], ["doctor"], ["config"]])
def test_light_commands_import_no_heavy_libraries(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from vla_ros.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


HIDING = """
import sys
class Hiding:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        hidden = name.split('.')[0] in sys.argv[1].split(',')
        return None if hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding(each) for each in sys.meta_path]
from vla_ros.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("hidden", "words", "fix"),
    [
        ("mcap,av,pyarrow", ["replay", "BAG", "-p", "policy.name:=hold", "--no-trials"], "vla_ros[replay]"),
        ("av,pyarrow", ["export", "BAG", "--output", "new"], "vla_ros[export]"),
        ("mujoco", ["demo", "--episodes", "1", "--policy", "expert"], "vla_ros[sim]"),
        ("mujoco", ["eval", "table", "--policy", "hold", "--episodes", "1"], "vla_ros[sim]"),
        ("websockets,msgpack", ["serve", "--policy", "hold"], "vla_ros[serve]"),
        ("torch", ["infer", "--checkpoint", "demo", "--image", "none.png", "--instruction", "go"], "pip install"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(hidden: str, words: list[str], fix: str, tmp_path) -> None:
    words = [BAG if word == "BAG" else word for word in words]
    command = [sys.executable, "-c", HIDING, hidden, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert fix in done.stderr


BAG = str(Path(__file__).parents[1] / "data" / "bags" / "demo_jpeg")
HOLD = ["--config", "demo", "-p", "policy.name:=hold", "--topics", "truth=none"]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (
            ["replay", BAG, *HOLD, "--json", "/dev/null/r.json"],
            "--json /dev/null/r.json: cannot be written, there is no folder",
        ),
        (
            ["replay", BAG, *HOLD, "--report", "/dev/null/r"],
            "--report /dev/null/r: cannot be written, there is no folder",
        ),
        (
            ["convert", "OFT", "--output", "/dev/null/new"],
            "--output /dev/null/new: cannot be written, there is no folder",
        ),
    ],
)
def test_a_file_that_cannot_be_written_ends_with_one_line(arguments: list[str], where: str, capsys) -> None:
    oft = Path(__file__).parents[1] / "data" / "oft" / "libero_l1"
    assert main([word.replace("OFT", str(oft)) for word in arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"vla-ros {arguments[0]}: {where}")
    assert said.count("\n") == 1
