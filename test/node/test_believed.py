"""Joint states in which the arm is where it cannot be, limits that nothing states, and fingers with wrong names."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_ros.cli.main import main
from vla_ros.kinematics.urdf import resolve

FINGERS = ("finger_left", "finger_right")


@pytest.fixture
def unlimited(tmp_path: Path) -> Path:
    """The demo's arm, whose velocity limits are 0."""
    path = tmp_path / "arm.urdf"
    text, count = re.subn('velocity="[^"]+"', 'velocity="0"', resolve("demo").read_text())
    assert count == 9
    path.write_text(text)
    return path


def distance(robot: Any) -> float:
    """Largest distance of a command from the arm, which stands still, rad."""
    return max(float(np.abs(np.array(each.position[:7]) - robot.positions).max()) for each in robot.commands)


@pytest.mark.causes("joint_state_invalid")
@pytest.mark.parametrize("speeds", ["stated", "zero"])
def test_an_all_zero_joint_state_moves_no_arm_and_is_named(robot, inside, unlimited: Path, speeds: str) -> None:
    inside(f"robot.urdf:={unlimited if speeds == 'zero' else 'demo'}")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    for _ in range(8):
        before = len(robot.commands)
        robot.send_joints([0.0] * 7)
        robot.until(lambda before=before: len(robot.commands) > before + 2, robot.send_frame)
    assert distance(robot) < 0.3
    robot.until(lambda: "joint_state_invalid" in robot.reported, lambda: robot.send_joints([0.0] * 7))
    assert any("jumps to 0, from" in str(said) for _, said in robot.statuses)
    robot.commands.clear()
    robot.until(lambda: len(robot.commands) > 3 and not robot.status["holds"], robot.send_frame)
    assert distance(robot) < 0.3


@pytest.mark.causes("joint_state_invalid")
def test_an_arm_that_is_elsewhere_at_once_is_held_until_a_person_disarms(robot, inside) -> None:
    """A driver that publishes zeros for good: neither a step nor a hold may begin there while the node is armed."""
    node = inside()
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    home, robot.positions = np.array(robot.positions[:7]), [0.0] * len(robot.positions)
    robot.until(lambda: "joint_state_invalid" in robot.status["holds"], robot.send_frame)
    robot.commands.clear()
    began = time.monotonic()
    robot.until(lambda: time.monotonic() - began > 0.6, robot.send_frame)
    assert "disarm to use it where it is" in str(robot.status["holds"]["joint_state_invalid"])
    assert all(np.abs(np.array(each.position[:7]) - home).max() < 0.3 for each in robot.commands)
    node.safety.disarm()
    robot.until(lambda: not robot.status["holds"], robot.send_frame)
    node.safety.arm()
    robot.commands.clear()
    robot.until(lambda: len(robot.commands) > 3, robot.send_frame)
    assert distance(robot) < 0.3


@pytest.mark.causes("joint_state_invalid")
def test_a_restarted_driver_that_begins_with_zeros_moves_no_arm(robot, inside) -> None:
    inside()
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    profile, kind = robot.graph.qos("state_publisher"), robot.graph.message("sensor_msgs/msg/JointState")
    robot.node.destroy_publisher(robot.joint_publisher)
    robot.until(lambda: "joint_state_stale" in robot.status["holds"], lambda: robot.send_frame(joints=False))
    robot.commands.clear()
    robot.joint_publisher = robot.node.create_publisher(kind, "/joint_states", profile)
    robot.until(lambda: robot.joint_publisher.get_subscription_count() > 0)
    began = time.monotonic()
    robot.until(lambda: "joint_state_invalid" in robot.status["holds"], lambda: robot.send_joints([0.0] * 7))
    robot.until(lambda: time.monotonic() - began > 0.6, lambda: robot.send_joints([0.0] * 7))
    sent = len(robot.commands)
    robot.until(lambda: len(robot.commands) > sent + 3 and not robot.status["holds"], robot.send_frame)
    assert distance(robot) < 0.3


def test_limits_that_nothing_states_are_logged(robot, inside, unlimited: Path, caplog) -> None:
    inside(f"robot.urdf:={unlimited}")
    [said] = [
        each.getMessage()
        for each in caplog.records
        if "no velocity limit" in each.getMessage() and each.levelname == "WARNING"
    ]
    assert "joint_1, joint_2, joint_3, joint_4, joint_5, joint_6, joint_7: 12.57 rad/s" in said
    assert "limits.assumed_joint_velocity" in said


def test_the_dry_run_says_what_is_assumed(unlimited: Path, capsys) -> None:
    arm = ["run", "--dry-run", "-p", "policy.name:=wiggle", "-p", "gripper.mode:=none"]
    for options, said in (
        ((f"robot.urdf:={unlimited}",), True),
        ((f"robot.urdf:={unlimited}", "limits.max_joint_velocity:=1.0"), False),
        (("robot.urdf:=demo",), False),
        (("robot.joint_names:=[a, b]",), True),
    ):
        assert main([*arm, *(word for each in options for word in ("-p", each))]) == 0
        shown = capsys.readouterr().out
        assert ("no velocity limit is stated for" in shown) == said, options
        assert ("no joint has position limits" in shown) == ("joint_names" in options[0])


@pytest.mark.parametrize(
    "option",
    [
        "topics.command:=/arm/joint command",
        "topics.stop:=~/st-op",
        "camera.topics:=[/camera//image]",
        "robot.state_topics:=[force=/1wrench:WrenchStamped]",
        "collision.scene:=/scene/",
        "takeover.joy:='/joy!'",
    ],
)
def test_a_dry_run_refuses_a_name_that_the_graph_refuses(option: str, capsys) -> None:
    words = ["--config", "demo", "-p", "policy.name:=wiggle", "-p", option]
    if "takeover" in option:
        words += [
            "-p",
            "takeover.input:=twist",
            "-p",
            "takeover.topic:=/twist",
            "-p",
            "takeover.buttons:=[deadman = 0]",
        ]
    said = []
    for dry in (["--dry-run"], []):
        assert main(["run", *dry, *words]) == 1
        said.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert "is not valid" in said[0]
    assert said[0] == said[1]


@pytest.mark.causes("joint_state_invalid")
def test_a_finger_that_the_joint_states_nearly_have_holds(robot, inside, tmp_path: Path) -> None:
    """The URDF ends at the arm; the gripper's driver says what its joints are called."""
    path, text = tmp_path / "arm.urdf", resolve("demo").read_text()
    path.write_text(
        text.replace("finger_left", "x").replace("finger_right", "y").replace('type="prismatic"', 'type="fixed"')
    )
    robot.names, robot.positions = (*robot.names, *FINGERS), [*robot.positions, 0.04, 0.04]
    inside(f"robot.urdf:={path}", "robot.tip_frame:=tool", "robot.gripper_joint_names:=[finger_left, finger_rigth]")
    robot.until(
        lambda: robot.says("found no finger joint 'finger_rigth'; did you mean 'finger_right'?"), robot.send_frame
    )
    assert not any("finger_rigth" in each.name for each in robot.commands)


def test_joint_states_without_stamps_are_used_with_a_warning(robot, inside, caplog) -> None:
    inside()

    def send() -> None:
        robot.joint_publisher.publish(robot.joint_state(robot.names, robot.positions, stamp=0))
        robot.send_frame(joints=False)

    robot.until(lambda: len(robot.commands) > 5, send)
    said = [text for text in caplog.messages if "timeouts.joint_state_age cannot detect old ones" in text]
    assert len(said) == 1


def test_fingers_that_no_joint_state_has_are_logged(robot, inside, tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("vla_ros.node.receiver._FINGERS_DUE", 300_000_000)
    inside("robot.gripper_joint_names:=[finger_left, finger_right]")
    robot.until(
        lambda: "no joint state on /joint_states has finger_left, finger_right" in caplog.text, robot.send_frame
    )
    robot.until(lambda: len(robot.commands) > 3, robot.send_frame)
