"""`vla-ros commission` against arms in processes of their own, with a person at a terminal."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from test.command import VLA_ROS, vla_ros
from vla_ros.config import load
from vla_ros.files import read_json_value

Run = Callable[..., Any]
HOST = 0.02  # s by which a busy host may delay a message


def test_the_numbers_of_an_arm_that_lags_sags_sticks_and_brakes(commission: Run) -> None:
    done = commission({"delay": 0.2, "sag": 0.06, "stick": 0.02, "deceleration": 1.0, "noise": 0.001}, times=True)
    assert done.status == 0, done.said
    joints = done.figures["joints"]
    assert joints["joint_1"]["delay"] == pytest.approx(0.2, abs=0.02 + HOST)
    assert joints["joint_2"]["offset"] == pytest.approx(-0.06, rel=0.1)
    assert joints["joint_3"]["stick"] == pytest.approx(0.02, rel=0.1)
    assert joints["joint_4"]["deceleration"] == pytest.approx(1.0, rel=0.3), "commands of a busy host are uneven"
    assert all(each["gain"] == pytest.approx(1.0, abs=0.1) for each in joints.values())
    assert "joint_2: rests -0.0" in done.found
    assert "joint_3: sticks" in done.found
    robot = load([done.options("robot.yaml")])
    both = load([done.options("robot.yaml"), done.options()])
    assert both.limits.following_error >= 2 * (0.06 + 0.2 * 0.5)
    assert both.collision.deceleration <= 0.5 * joints["joint_4"]["deceleration"] * 1.01
    assert both.timeouts.joint_state <= robot.timeouts.joint_state
    page = (done.folder / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5, "four joints and a gripper"
    assert "limits.following_error" in page


def test_messages_clocks_encoders_and_an_inverted_gripper(commission: Run) -> None:
    faults = {"rate": 20.0, "jitter": 0.3, "clock": 0.3, "camera_clock": -0.2, "noise": 0.004, "inverted": True}
    done = commission(faults)
    assert done.status == 0, done.said
    states, camera = done.figures["joint_states"]["/joint_states"], done.figures["cameras"]["/camera/image_raw"]
    assert states["rate_hz"] == pytest.approx(20, rel=0.1)
    assert states["age"] == pytest.approx(0.3, abs=0.03)
    assert camera["age"] == pytest.approx(-0.2, abs=0.03)
    assert all(each["noise"] == pytest.approx(0.004, rel=0.5) for each in done.figures["joints"].values())
    for text in ("joint states come at ", "s behind this machine's clock", "s ahead of this machine's clock"):
        assert text in done.found
    assert "joint_1: its encoder is noisy" in done.found
    assert "the gripper is inverted" in done.found


def test_a_healthy_arm_has_no_finding(commission: Run) -> None:
    done = commission({}, times=True)
    assert done.status == 0, done.said
    late = [each for each in done.figures["findings"] if each["what"] == "/joint_states"]
    assert done.figures["findings"] == late, "a busy host may delay messages"
    assert done.figures["grippers"]["arm"]["opened"] == pytest.approx(0.04, abs=1e-3)
    assert done.figures["grippers"]["arm"]["closed"] == pytest.approx(0.0, abs=1e-3)
    assert done.figures["grippers"]["arm"]["speed"] == pytest.approx(0.1, rel=0.2)
    assert max(done.figures["silence"].values()) < 1e-3


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"reversed": "joint_2"}, "the wrong way; commands and joint states have different signs"),
        ({"degrees": True}, "in degrees it would be 1.500 rad"),
        ({"swapped": True}, "is robot.joint_names in the controller's order"),
        ({"blocked": "joint_3"}, "joint_3 did not move when commanded"),
        ({"limp": 0.6}, "though no command came: its driver does not hold it"),
    ],
    ids=["sign", "degrees", "order", "brake", "limp"],
)
def test_a_surprise_ends_everything(commission: Run, faults: dict[str, Any], said: str) -> None:
    done = commission(faults)
    assert done.status == 1, done.said
    assert said in done.figures["surprise"]
    assert said in (done.folder / "page.html").read_text(encoding="utf-8").replace("&#x27;", "'")
    assert not done.options().exists(), "no options from an arm that surprises"


@pytest.mark.parametrize("ends", [0.0, 0.4])
def test_whether_the_driver_ends_a_velocity(commission: Run, ends: float) -> None:
    done = commission({"velocity": True, "ends": ends}, times=True)
    assert done.status == 0, done.said
    after = done.figures["velocity_ends_after_s"]["arm"]
    if ends:
        assert after == pytest.approx(ends, rel=0.1, abs=HOST)
    else:
        assert after is None
        assert "its driver does not end a velocity" in done.found
    assert load([done.options("robot.yaml"), done.options()]).guard.process is not bool(ends)


def test_a_no_ends_everything(commission: Run) -> None:
    done = commission({}, answer=lambda question: "n" if "joint_1" in question else "y")
    assert done.status == 1
    assert done.figures["surprise"] == "a person says: joint_1 is another joint or sign"
    assert not done.options().exists()


def test_enter_stops_a_motion(commission: Run) -> None:
    def press(terminal: int, process: subprocess.Popen[Any], said: str) -> None:
        if "joint_1:" in said and "Did" not in said:
            os.write(terminal, b"\n")

    done = commission({}, act=press)
    assert done.status == 1
    assert done.figures["surprise"] == "a person pressed Enter"


def test_ctrl_c_leaves_a_held_arm_and_no_file(commission: Run) -> None:
    sent: list[None] = []

    def interrupt(terminal: int, process: subprocess.Popen[Any], said: str) -> None:
        if "joint_2:" in said and not sent:
            sent.append(process.send_signal(signal.SIGINT))

    done = commission({}, act=interrupt)
    assert done.status == 130, done.said
    assert "the arm holds, and nothing was written" in done.said
    assert {path.name for path in done.folder.iterdir()} == {"robot.yaml", "four.urdf"}


def test_without_a_person_only_the_simulated_arm_moves(tmp_path: Path) -> None:
    done = vla_ros("commission", "--config", "ur5e", "--yes", status=1)
    assert "--yes: moves an arm that nobody watches" in done.stderr
    done = vla_ros("commission", "--config", "demo", "--config", "ur5e", "--yes", status=1)
    assert "--yes: moves an arm that nobody watches" in done.stderr
    done = vla_ros("commission", "--config", "ur5e", status=1, stdin=subprocess.DEVNULL)
    assert "this command needs a terminal" in done.stderr


def test_the_simulated_arm(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    file = tmp_path / "found.json"
    words = ("commission", "--config", "demo", "--yes", "--json", str(file))
    done = subprocess.run([*VLA_ROS, *words], capture_output=True, text=True, timeout=200, check=False)
    if "the node held the arm" in done.stderr:
        pytest.skip("this host was too busy")
    assert done.returncode == 0, done.stderr
    found = read_json_value(file)
    assert found["surprise"] == ""
    assert len(found["joints"]) == 7
    assert found["grippers"]["arm"]["opened"] == pytest.approx(0.04, abs=2e-3)
