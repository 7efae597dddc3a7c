"""`vla-ros init`: the configuration of an arm from its URDF and the graph, and what it refuses to guess."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.command import vla_ros
from tools import forks
from tools.robots import descriptions as robots
from vla_ros.cli.init import find_arms
from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.kinematics.urdf import DEMO, read_urdf, resolve
from vla_ros_lab.eval.command import free_domain

Links = dict[str, tuple[str, str, str]]
"""By joint: type, parent and child."""


def description(joints: Links, limits: dict[str, tuple[float, float]] | None = None, mimics: str = "") -> str:
    links = dict.fromkeys(link for _, *ends in joints.values() for link in ends)
    lines = [f'<link name="{link}"/>' for link in links]
    for name, (kind, parent, child) in joints.items():
        low, high = (limits or {}).get(name, (-2.0, 2.0))
        mimic = f'<mimic joint="{mimics}"/>' if mimics and name.endswith("_follows") else ""
        lines.append(
            f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
            f'<axis xyz="0 0 1"/><limit lower="{low}" upper="{high}" velocity="2" effort="1"/>{mimic}</joint>'
        )
    return f'<robot name="test">{"".join(lines)}</robot>'


def chain(prefix: str, count: int, root: str = "base_link") -> Links:
    links = [root, *(f"{prefix}link_{number}" for number in range(count))]
    return {f"{prefix}joint_{n}": ("revolute", links[n], links[n + 1]) for n in range(count)}


def written(tmp_path: Path, text: str, *words: str) -> Config:
    """Write the URDF and the configuration, which must pass the dry run; return its options."""
    file, output = tmp_path / "arm.urdf", tmp_path / "arm.yaml"
    file.write_text(text)
    vla_ros("init", str(file), "--output", str(output), "--backend", "none", *words)
    done = vla_ros("run", "--config", str(output), "--dry-run")
    assert "policy: hold" in done.stdout
    return load([output])


def test_an_arm_with_a_gripper_that_mimics(tmp_path: Path) -> None:
    joints = chain("", 6) | {
        "mount": ("fixed", "link_5", "flange"),
        "tool": ("fixed", "flange", "tool0"),
        "left_knuckle": ("revolute", "flange", "left_pad"),
        "right_knuckle_follows": ("revolute", "flange", "right_pad"),
    }
    config = written(tmp_path, description(joints, {"left_knuckle": (0.0, 0.8)}, "left_knuckle"))
    [arm] = config.arms
    assert arm.robot.joint_names == tuple(chain("", 6))
    assert (arm.robot.base_frame, arm.robot.tip_frame) == ("base_link", "tool0")
    assert arm.robot.gripper_joint_names == ("left_knuckle",)
    assert {arm.gripper.open_position, arm.gripper.closed_position} == {0.0, 0.8}
    text = (tmp_path / "arm.yaml").read_text(encoding="utf-8")
    assert "tip_frame: tool0  # GUESS: of tool0, link_5, flange" in text


def test_two_arms_on_a_torso_have_their_names_and_topics(tmp_path: Path) -> None:
    joints = chain("", 1) | chain("left_", 6, "link_0") | chain("right_", 6, "link_0")
    joints |= {"head_pan": ("revolute", "link_0", "head")}
    config = written(tmp_path, description(joints))
    assert config.robot.arms == ("left", "right")
    assert [arm.robot.joint_names[0] for arm in config.arms] == ["left_joint_0", "right_joint_0"]
    assert all(arm.robot.base_frame == "link_0" for arm in config.arms)
    assert len({arm.command for arm in config.arms}) == 2


def test_which_of_two_chains_is_the_arm_is_refused_with_the_candidates(tmp_path: Path) -> None:
    file = tmp_path / "arm.urdf"
    file.write_text(description(chain("a_", 6) | chain("b_", 6)))
    words = ("init", str(file), "--output", str(tmp_path / "arm.yaml"), "--backend", "none")
    done = vla_ros(*words, status=1)
    assert "--tip: " in done.stderr
    assert "expected one of a_link_5, b_link_5" in done.stderr
    assert not (tmp_path / "arm.yaml").exists()
    vla_ros(*words, "--tip", "b_link_5")
    assert load([tmp_path / "arm.yaml"]).robot.joint_names == tuple(chain("b_", 6))
    done = vla_ros(*words, "--tip", "c_link", status=1)
    assert "--tip: found 'c_link'" in done.stderr


def test_the_simulated_arm_is_described_as_in_its_configuration(tmp_path: Path) -> None:
    config, shipped = written(tmp_path, resolve(DEMO).read_text(encoding="utf-8")), load([config_file("demo")])
    for option in ("joint_names", "tip_frame", "base_frame"):
        assert getattr(config.robot, option) == getattr(shipped.robot, option)
    assert set(config.robot.gripper_joint_names) == set(shipped.robot.gripper_joint_names)
    assert (config.gripper.open_position, config.gripper.closed_position) == (0.04, 0.0)


@pytest.mark.parametrize("name", ["ur5e", "fr3", "xarm7", "so101"])
def test_joints_base_and_fingers_are_those_of_the_shipped_configurations(tmp_path: Path, name: str) -> None:
    file = tmp_path / "arm.urdf"
    file.write_text(robots.urdf(name))
    [arm], [shipped] = find_arms(read_urdf(str(file))), load([config_file(name)]).arms
    assert arm.joints == shipped.robot.joint_names
    assert arm.base == shipped.robot.base_frame
    assert shipped.robot.tip_frame in (arm.tip, "link_tcp"), "xArm without its gripper has no link_tcp"
    assert arm.fingers[0].name == shipped.robot.gripper_joint_names[0]


def test_a_person_at_a_terminal_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "arm.urdf"
    file.write_text(description(chain("a_", 6) | chain("b_", 6)))
    answers = iter(["3", "no", "2"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    [arm] = find_arms(read_urdf(str(file)))
    assert arm.joints == tuple(chain("b_", 6))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The arm of the commissioning tests, in a process of its own on a graph of its own."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(free_domain()))
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    arm = Path(__file__).parents[1] / "commission" / "arm.py"
    faults = {"joints": [f"joint_{n}" for n in range(1, 8)], "home": [0.0, 0.44, 0.0, 1.83, 0.0, 0.87, 0.0]}
    faults |= json.loads(os.environ.get("FAULTS_OF_INIT", "{}"))
    process = forks.Fork(forks.script, [str(arm), json.dumps(faults)], None, 2)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.stdout.readline() == "ready\n"
    yield
    process.send_signal(signal.SIGINT)
    process.wait(20)
    process.stdout.close()


def test_topics_are_read_from_the_graph_and_units_are_never_guessed(tmp_path: Path, driver: None) -> None:
    output = tmp_path / "arm.yaml"
    words = ("init", str(resolve(DEMO)), "--output", str(output), "--backend", "dds")
    done = vla_ros(*words, status=1)
    assert "/arm/joint_command takes sensor_msgs/msg/JointState, whose unit is not in the message" in done.stderr
    assert "expected one of joint_state, joint_velocity_state" in done.stderr
    vla_ros(*words, "--control-output", "joint_state")
    config = load([output])
    assert (config.topics.command, config.topics.joint_states) == ("/arm/joint_command", "/joint_states")
    assert config.control.output == "joint_state"
    assert config.camera.topics == ("/camera/image_raw",)
    assert (config.camera.width, config.camera.height) == ((64,), (48,))
    vla_ros("run", "--config", str(output), "--dry-run")


def test_joint_states_in_degrees_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> None:
    monkeypatch.setenv("FAULTS_OF_INIT", '{"degrees": true}')
    request.getfixturevalue("driver")
    words = ("init", str(resolve(DEMO)), "--output", str(tmp_path / "arm.yaml"), "--backend", "dds")
    done = vla_ros(*words, "--control-output", "joint_state", status=1)
    assert "/joint_states: joint_2 is at 25.210 (0.440 if that is in degrees)" in done.stderr
    assert not (tmp_path / "arm.yaml").exists()
