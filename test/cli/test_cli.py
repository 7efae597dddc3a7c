import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from test.command import VLA_ROS, vla_ros
from vla_ros.cli import doctor
from vla_ros.cli import main as command_line
from vla_ros.cli.main import main
from vla_ros.errors import EXTRAS, install
from vla_ros.houses import WRONG, Finding, House, SubCommand

HEAVY = ("torch", "mujoco", "pinocchio", "cyclonedds", "transformers", "rclpy", "rosbags", "cv2")
BAG = str(Path(__file__).parents[1] / "data" / "bags" / "demo_jpeg")
REPLAY = ("replay", BAG, "--config", "demo", "-p", "policy.name:=hold", "--no-trials")
WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = sys.argv.pop(1).split(",")
sys.meta_path.insert(0, Hidden())
from vla_ros.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs a command as if the libraries named first were not installed."""


def without(libraries: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, libraries, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("library", "extra", "words"),
    [
        ("mcap", "replay", REPLAY),
        ("rosbags", "dds", REPLAY),
        ("mcap", "replay", ("record", "--repair", BAG)),
        ("mcap", "replay", ("export", BAG, "--output", "out", "--config", "demo")),
        ("pyarrow", "export", ("export", BAG, "--output", "out", "--config", "demo")),
        ("msgpack", "serve", ("eval", "table", "--policy", "hold")),
        ("msgpack", "serve", ("serve", "--policy", "hold")),
        ("uvicorn", "console", ("console", "--port", "0")),
        ("starlette", "console", ("console", "--port", "0")),
        ("safetensors", "openvla", ("convert", "demo", "--output", "out")),
        ("torch", "openvla", ("tune", "--checkpoint", "demo")),
        ("torch", "openvla", ("bench", "--checkpoint", "demo")),
        ("mujoco", "sim", ("demo", "--policy", "expert")),
    ],
)
def test_a_missing_library_is_named_with_its_extra(library: str, extra: str, words: tuple[str, ...]) -> None:
    for other in sorted(EXTRAS.keys() - {"ray"}):
        if importlib.util.find_spec(other) is None:
            pytest.skip(f"the command could name {other} first, which is not installed (extra '{EXTRAS[other]}')")
    done = without(library, *words)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert library in done.stderr.lower()
    assert install(extra) in done.stderr


@pytest.mark.parametrize("command", ["eval", "replay", "export", "record", "serve", "demo", "run", "console"])
def test_help_needs_no_extra(command: str) -> None:
    done = without(",".join(EXTRAS), command, "--help")
    assert done.returncode == 0, done.stderr


def test_a_module_that_no_extra_installs_keeps_its_traceback(monkeypatch) -> None:
    nowhere = {"replay": SubCommand("vla_ros_lab.replay.nowhere", "")}
    monkeypatch.setattr(command_line, "commands", lambda: nowhere)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        main(["replay"])


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
    done = subprocess.run([*VLA_ROS, "doctor", "--json"], capture_output=True, text=True, timeout=60, check=False)
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found}
    assert len(rows) == len(found), "nothing is reported twice"
    assert {"Python", "ROS 2", "torch", "GPU", "EGL", "memory", "socket buffer"} <= set(rows)
    wrong = [row for row in rows.values() if row["level"] == "wrong"]
    assert all(row["fix"] for row in wrong)
    assert done.returncode == (1 if wrong else 0)


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("note", 0), (WRONG, 1)])
def test_doctor_fails_if_something_is_wrong(monkeypatch, words: list[str], level: str, status: int) -> None:
    findings = [Finding("GPU", "none", "note"), Finding("ROS 2", "none", level)]
    monkeypatch.setattr(doctor, "houses", lambda: (House("", {}, lambda: findings),))
    assert main(words) == status


def test_doctor_does_not_wrap_commands(monkeypatch, capsys) -> None:
    fix = "pip install 'rosbags[all]>=0.11' " + "x" * 120
    house = House("", {}, lambda: [Finding("embedded DDS", "none", WRONG, fix)])
    monkeypatch.setattr(doctor, "houses", lambda: (house,))
    assert main(["doctor"]) == 1
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
    if arguments[0] == "replay":
        pytest.importorskip("mcap", reason="the library mcap is not installed (extra 'replay')")
    oft = Path(__file__).parents[1] / "data" / "oft" / "libero_l1"
    assert main([word.replace("OFT", str(oft)) for word in arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"vla-ros {arguments[0]}: {where}")
    assert said.count("\n") == 1
