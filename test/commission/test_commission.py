"""`vla-ros commission`: arms on a simulated clock, and in processes of their own with a person at a terminal."""

import os
import signal
import subprocess
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from test.command import vla_ros
from test.commission.conftest import SimulatedArm, configure
from vla_ros.config import load
from vla_ros.control.clock import SimulatedClock
from vla_ros.files import read_json_value
from vla_ros_lab.commission import rigs
from vla_ros_lab.commission.measure import TICK
from vla_ros_lab.commission.motion import commissioning_options
from vla_ros_lab.commission.session import SILENT, Commissioning

Run = Callable[..., Any]


# On a simulated clock, with the parts of the node


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_numbers_of_an_arm_that_lags_sags_sticks_and_brakes(simulate: Run) -> None:
    done = simulate({"delay": 0.2, "sag": 0.06, "stick": 0.02, "deceleration": 1.0, "noise": 0.001})
    joints, figures = done.figures["joints"], done.figures
    assert joints["joint_1"]["delay"] == pytest.approx(0.2, rel=0.1)
    assert joints["joint_2"]["offset"] == pytest.approx(-0.06, rel=0.1)
    assert joints["joint_3"]["stick"] == pytest.approx(0.02, rel=0.1)
    assert joints["joint_4"]["deceleration"] == pytest.approx(1.0, rel=0.1)
    assert all(each["gain"] == pytest.approx(1.0, abs=0.05) for each in joints.values())
    assert "joint_2: rests -0.06" in done.found
    assert "joint_3: sticks" in done.found
    robot, both = load([done.config]), load([done.config, done.options])
    assert both.limits.following_error >= 2 * (0.06 + 0.2 * 0.5)
    assert both.collision.deceleration == pytest.approx(0.5 * joints["joint_4"]["deceleration"], rel=0.01)
    assert both.timeouts.joint_state <= robot.timeouts.joint_state
    assert done.page.count("<svg") == 5, "four joints and a gripper"
    assert "limits.following_error" in done.page
    assert figures["grippers"]["arm"]["speed"] == pytest.approx(0.1, rel=0.1)


def test_a_healthy_arm_has_no_finding(simulate: Run) -> None:
    done = simulate({})
    assert done.found == "", "neither a surprise nor a finding"
    gripper = done.figures["grippers"]["arm"]
    assert (gripper["closed"], gripper["opened"]) == pytest.approx((0.0, 0.04), abs=1e-3)
    assert gripper["obeys"] is True
    assert max(done.figures["silence"].values()) < 1e-3


def test_an_inverted_gripper_a_noisy_encoder_and_late_clocks(simulate: Run) -> None:
    done = simulate({"clock": 0.3, "noise": 0.004, "inverted": True})
    assert done.figures["joint_states"]["/joint_states"]["age"] == pytest.approx(0.3, rel=0.1)
    assert all(each["noise"] == pytest.approx(0.004, rel=0.5) for each in done.figures["joints"].values())
    assert "/joint_states: stamps are 0.3 s behind this machine's clock" in done.found
    assert "joint_1: its encoder is noisy" in done.found
    assert "the gripper is inverted: 0.04 when told to close, 0 to open" in done.found


def test_a_gripper_whose_ends_are_exchanged_in_the_file(simulate: Run) -> None:
    done = simulate({}, answer=lambda question: "close" not in question)
    assert "the gripper opens when it is told to close" in done.found


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
def test_a_surprise_ends_everything(simulate: Run, faults: dict[str, Any], said: str) -> None:
    done = simulate(faults)
    assert said in done.figures["surprise"]
    assert said in done.page.replace("&#x27;", "'")
    assert done.session.safety.state.value == "stopped"
    assert not done.figures["options"], "no options from an arm that surprises"


@pytest.mark.parametrize("ends", [0.0, 0.4])
def test_whether_the_driver_ends_a_velocity(simulate: Run, ends: float) -> None:
    done = simulate({"velocity": True, "ends": ends})
    after = done.figures["velocity_ends_after_s"]["arm"]
    assert after == (pytest.approx(ends, rel=0.1) if ends else None)
    assert ("its driver does not end a velocity" in done.found) is not bool(ends)
    assert load([done.config, done.options]).guard.process is not bool(ends)


def test_a_velocity_lasts_a_second_only_while_the_node_is_silent(tmp_path: Path) -> None:
    """Otherwise as the file says: two periods of its 10 Hz. It lasted a second during every motion."""
    faults, clock, lasts = {"velocity": True, "ends": 0.4}, SimulatedClock(1_000_000_000), list[float]()
    _, ours = commissioning_options([configure(tmp_path, faults)], [])
    session = Commissioning(ours, clock, None, 0.2, 0.15)

    def look() -> None:
        [options, _] = session.configure.args  # type: ignore[attr-defined]
        lasts.append(options.current.timeouts.velocity)

    rigs.simulated(session, ours, SimulatedArm(clock, faults), clock, look)
    look()
    assert [value for value, _ in groupby(lasts)] == [0.2, 1.0, 0.2]
    assert SILENT < lasts.count(1.0) * TICK < SILENT + 4.0, "creeping, then silent"


def test_the_tip_of_an_arm_that_takes_twists(simulate: Run) -> None:
    done = simulate({"twist": True, "delay": 0.2, "ends": 0.6})
    joints = done.figures["joints"]
    assert [*joints] == ["tip x", "tip y", "tip z", "tip about x", "tip about y", "tip about z"]
    for each in joints.values():
        assert each["delay"] == pytest.approx(0.2, rel=0.1)
        assert each["gain"] == pytest.approx(1.0, rel=0.05)
    assert done.figures["velocity_ends_after_s"]["arm"] == pytest.approx(0.4, rel=0.1)


def test_a_no_ends_everything(simulate: Run) -> None:
    done = simulate({}, answer=lambda question: "joint_1" not in question)
    assert done.figures["surprise"] == "a person says: joint_1 is another joint or sign"
    assert not done.figures["options"]


def test_the_simulated_arm() -> None:
    pytest.importorskip("mujoco")
    vla_ros("commission", "--config", "demo", "--yes", "--json", "found.json")
    found = read_json_value(Path("found.json"))
    assert found["surprise"] == ""
    assert len(found["joints"]) == 7
    assert found["grippers"]["arm"]["opened"] == pytest.approx(0.04, abs=2e-3)


# On the graph, with a driver in a process of its own


def test_over_the_graph(commission: Run) -> None:
    done = commission({"delay": 0.2, "sag": 0.06, "rate": 25.0, "jitter": 0.3, "clock": 0.3, "camera_clock": -0.2})
    assert done.status == 0, done.said
    joints, states = done.figures["joints"], done.figures["joint_states"]["/joint_states"]
    assert joints["joint_1"]["delay"] == pytest.approx(0.2, rel=0.1, abs=0.04), "a busy host delays messages"
    assert joints["joint_2"]["offset"] == pytest.approx(-0.06, rel=0.1)
    assert states["rate_hz"] == pytest.approx(25, rel=0.1)
    assert done.figures["cameras"]["/camera/image_raw"]["age"] == pytest.approx(-0.2, abs=0.04)
    assert states["age"] == pytest.approx(0.3, abs=0.04)
    for text in (
        "joint states come at ",
        "s behind this machine's clock",
        "s ahead of this machine's clock",
        "joint_2: rests -0.0",
    ):
        assert text in done.found
    load([done.options("robot.yaml"), done.options()])
    assert "<svg" in (done.folder / "page.html").read_text(encoding="utf-8")


def test_enter_stops_a_motion(commission: Run) -> None:
    def press(terminal: int, process: subprocess.Popen[Any], said: str) -> None:
        if "joint_1:" in said and "Did" not in said:
            os.write(terminal, b"\n")

    done = commission({}, act=press)
    assert done.status == 1
    assert done.figures["surprise"] == "a person pressed Enter"
    assert not done.options().exists()


def test_ctrl_c_leaves_a_held_arm_and_no_file(commission: Run) -> None:
    sent: list[None] = []

    def interrupt(terminal: int, process: subprocess.Popen[Any], said: str) -> None:
        if "joint_1:" in said and not sent:
            sent.append(process.send_signal(signal.SIGINT))

    done = commission({}, act=interrupt)
    assert done.status == 130, done.said
    assert "the arm holds, and nothing was written" in done.said
    assert {path.name for path in done.folder.iterdir()} == {"robot.yaml", "four.urdf"}


def test_without_a_person_only_the_simulated_arm_moves() -> None:
    done = vla_ros("commission", "--config", "ur5e", "--yes", status=1)
    assert "--yes: moves an arm that nobody watches" in done.stderr
    done = vla_ros("commission", "--config", "ur5e", status=1)
    assert "this command needs a terminal" in done.stderr
