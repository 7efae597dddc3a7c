"""What ``vla-ros run`` refuses, ``vla-ros run --dry-run`` refuses with the same text."""

import subprocess
import sys

import pytest

from test.command import vla_ros
from vla_ros.errors import did_you_mean

LEADER = (
    "takeover.input:=leader",
    "takeover.leader:=/leader",
    "takeover.joy:=/joy",
    "takeover.buttons:=[deadman=0]",
)
WIGGLE = ("--config", "demo", "-p", "policy.name:=wiggle", "-p", "node.backend:=dds")


def words(*options: str) -> list[str]:
    return [*WIGGLE, *(word for option in options for word in ("-p", option))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("robot.home:=[0.0, 25.0, 0.0, 90.0, 0.0, 50.0, 0.0]",), "found 25 for 'joint_2', expected -1.9 to 1.9"),
        (("topics.command:=/arm/joint command",), "'joint command' must consist of letters"),
        ((*LEADER, "takeover.joints:=[jiont_1 = leader_1]"), "takeover.joints: found jiont_1, expected each joint"),
        (("record.what:=all", "record.folder:=/dev/null/bags"), "/dev/null is no folder"),
        (("node.trace:=/nowhere/trace.jsonl",), "/nowhere"),
        (("control.rate_hz:=-5.0",), "expected a number from 0 to 1000 (Hz), or -1"),
        (("robot.tip_frame:=tool0",), "did you mean 'tool'?"),
        (("robot.tip_frame:=base_lnik",), "did you mean 'base_link'?"),
        (("robot.base_frame:=hand_link",), "it has ['base_link', 'link_1'"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(options: tuple[str, ...], expected: str) -> None:
    pytest.importorskip("cyclonedds", reason="cyclonedds is not installed (extra 'dds')")
    shown = vla_ros("run", *words(*options), "--dry-run", status=1).stderr
    assert expected in shown
    assert expected in vla_ros("run", *words(*options), status=1).stderr


@pytest.mark.parametrize(("library", "options"), [("mcap", ("record.what:=all",)), ("cyclonedds", ())])
def test_a_missing_library_is_refused_before_anything_starts(library: str, options: tuple[str, ...]) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None\nfrom vla_ros.cli.main import main\n"
    hidden += "sys.exit(main(sys.argv[1:]))"
    for more in ([], ["--dry-run"]):
        command = [sys.executable, "-c", hidden, "run", *words(*options), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"'{library}>=" in done.stderr, "the command that installs it"
        assert "is ready" not in done.stderr


def test_it_shows_who_takes_over_and_which_cameras_are_not_used() -> None:
    pytest.importorskip("cyclonedds", reason="cyclonedds is not installed (extra 'dds')")
    cameras = ("camera.topics:=[/front, /wrist]", "camera.keys:=[image, wrist]")
    expert = ["--config", "demo", "-p", "policy.name:=hold"]
    leader = (*LEADER, "takeover.gripper:=finger_left = 0.0..0.04")
    shown = vla_ros("run", *expert, *words(*leader, *cameras)[6:], "--dry-run").stdout
    assert "gripper by finger_left, closed at 0, open at 0.04" in shown
    assert "takeover: /leader (leader) moves 'arm': joint_1 = 1 * joint_1 +0, joint_2" in shown
    assert "takeover: buttons of /joy: deadman=0" in shown
    assert "nothing to take over with" in vla_ros("run", *WIGGLE, "--dry-run").stdout


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("tool0", ["world", "tool"], "tool"),
        ("tool0", ["world", "link_7"], ""),
        ("base_link", ["hand_link", "wrist_3_link", "link_7"], ""),
        ("finger_rigth", ["finger_left", "finger_right"], "finger_right"),
        ("joint_1", ["joint_2", "joint_3"], ""),
        ("control.rate", ["control.rate_hz", "control.armed"], "control.rate_hz"),
    ],
)
def test_hints_name_what_was_meant_only(name: str, known: list[str], meant: str) -> None:
    assert did_you_mean(name, known) == (f"; did you mean '{meant}'?" if meant else "")
