"""ROS parameters from the tree of options: described, refused with the reason, applied all or none.

Regressions pinned: a misspelt limit that is silently no limit; an empty list taken for bytes; 5 refused where 5.0
is meant; half of an atomic change applied.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from lifecycle_msgs.msg import Transition
from rcl_interfaces.srv import (
    DescribeParameters,
    GetParameters,
    ListParameters,
    SetParameters,
    SetParametersAtomically,
)
from rclpy.parameter import Parameter

from vla_ros.config import Config
from vla_ros.config.loading import entries, flatten, to_yaml

pytestmark = pytest.mark.ros


def parameters(values: dict[str, Any]) -> list[Any]:
    return [Parameter(name, value=value).to_parameter_msg() for name, value in values.items()]


def put(robot: Any, name: str, value: Any) -> tuple[bool, str]:
    request = SetParameters.Request(parameters=parameters({name: value}))
    result = robot.call(SetParameters, "/vla_policy/set_parameters", request).results[0]
    return result.successful, result.reason


def put_all(robot: Any, values: dict[str, Any]) -> tuple[bool, str]:
    request = SetParametersAtomically.Request(parameters=parameters(values))
    result = robot.call(SetParametersAtomically, "/vla_policy/set_parameters_atomically", request).result
    return result.successful, result.reason


def get(robot: Any, *names: str) -> list[Any]:
    from rclpy.parameter import parameter_value_to_python

    answer = robot.ask(GetParameters, "/vla_policy/get_parameters", GetParameters.Request(names=names))
    return [parameter_value_to_python(value) for value in answer.values]


@pytest.mark.parametrize("words", [("-p", "no_value"), ("--params-file", "/nowhere.yaml")])
def test_arguments_that_ros_cannot_read_are_refused_in_one_line(program, words) -> None:
    node = program(sys.executable, "-m", "vla_ros.node.lifecycle_main", "--ros-args", *words)
    assert node.process.wait(20) == 1
    assert f"'{' '.join(words)}'" in node.output
    assert "Traceback" not in node.output


@pytest.mark.parametrize(
    ("files", "last"),
    [
        (["limits: {velocity_scale: 1}"], ["-p", "limits.velocity_scale:=0.1"]),
        (["limits: {velocity_scale: 0.9}", "limits: {velocity_scale: 0.8}"], ["-p", "limits.velocity_scale:=0.1"]),
        (["limits.velocity_scale: 1", "limits.velocity_scale: 0.1"], []),
    ],
)
def test_a_limit_that_is_given_last_is_not_lost(
    robot, program, tmp_path, files: list[str], last: list[str]
) -> None:
    """In each of these, rcl of Jazzy keeps a value that was given before."""
    words = []
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(f"/**:\n  ros__parameters:\n    {text}\n")
        words += ["--params-file", str(tmp_path / f"{number}.yaml")]
    program(
        *(sys.executable, "-m", "vla_ros.node.lifecycle_main", "--ros-args", *words, *last),
        *("-p", "autostart:=false"),
    )
    assert get(robot, "limits.velocity_scale") == [0.1]


def test_every_option_is_a_parameter_with_its_default_description_and_range(robot, policy) -> None:
    policy("autostart:=false", quick=())
    listed = robot.ask(ListParameters, "/vla_policy/list_parameters", ListParameters.Request()).result.names
    assert set(entries()) <= set(listed)
    for name, default in flatten(Config()).items():
        (value,) = get(robot, name)
        assert (list(value) if isinstance(default, list) else value) == default, name
    names = ["control.rate_hz", "timeouts.frozen_frames", "camera.topics", "limits.workspace_low"]
    request = DescribeParameters.Request(names=names)
    rate, frames, topics, box = robot.ask(
        DescribeParameters, "/vla_policy/describe_parameters", request
    ).descriptors
    assert rate.description.startswith("Maximum rate of steps")
    assert (rate.floating_point_range[0].from_value, rate.floating_point_range[0].to_value) == (-1.0, 1000.0)
    assert "may change while running" in rate.additional_constraints
    assert frames.integer_range[0].to_value == 10000
    assert "set it before configure" in topics.additional_constraints
    assert topics.type == Parameter.Type.STRING_ARRAY.value
    assert box.type == Parameter.Type.DOUBLE_ARRAY.value, "an empty list has a type all the same"


def test_live_options_change_and_what_is_wrong_is_refused_with_the_reason(robot, policy) -> None:
    policy()
    robot.drive()
    robot.wait(lambda: robot.actions, "an action")
    assert put(robot, "control.rate_hz", 7.5) == (True, "")
    assert put(robot, "control.rate_hz", 8) == (True, ""), "an integer where a number is meant"
    assert get(robot, "control.rate_hz") == [8]
    refused, reason = put(robot, "control.rate_hz", 5000.0)
    assert not refused
    assert "0" in reason
    assert "1000" in reason
    refused, reason = put(robot, "limits.on_violation", "clmap")
    assert not refused
    assert "expected one of clamp, stop; did you mean 'clamp'?" in reason
    refused, reason = put(robot, "robot.urdf", "/elsewhere")
    assert not refused
    assert reason.startswith("robot.urdf cannot change while the node is configured")
    assert get(robot, "control.rate_hz", "robot.urdf") == [8, "demo"]
    refused, reason = put(robot, "policy.name", "expert")
    assert not refused
    assert reason.startswith("policy.name determines which parameters exist")


def test_a_change_of_several_is_applied_all_or_none(robot, policy) -> None:
    policy("autostart:=false")
    assert robot.change(Transition.TRANSITION_CONFIGURE)
    box = {"limits.workspace_low": [0.1, -0.5, 0.0], "limits.workspace_high": [0.9, 0.5, 0.8]}
    assert put_all(robot, box) == (True, "")
    refused, reason = put_all(robot, {"control.rate_hz": 3.0, "gripper.threshold": 7.0})
    assert not refused
    assert "gripper.threshold" in reason
    assert get(robot, "control.rate_hz", "gripper.threshold") == [0.0, 0.5]


def test_a_box_is_switched_on_and_off_one_corner_at_a_time(robot, policy) -> None:
    policy("autostart:=false")
    assert robot.change(Transition.TRANSITION_CONFIGURE)
    low, high = "limits.workspace_low", "limits.workspace_high"
    for one, other in ((low, high), (high, low)):
        corners = {low: [0.1, -0.5, 0.0], high: [0.9, 0.5, 0.8]}
        assert put(robot, one, corners[one]) == (True, "")
        robot.wait(lambda: any("there is no box now" in line for line in robot.log), "half a box")
        assert put(robot, other, corners[other]) == (True, "")
        robot.wait(
            lambda: any("workspace box of 'arm': ((0.1" in line for line in robot.log), "the box is in force"
        )
        refused, reason = put(robot, low, [1.0, 0.0, 0.0])
        assert not refused
        assert "below that of limits.workspace_high" in reason
        assert put(robot, one, []) == (True, "")
        assert put(robot, other, []) == (True, "")
        robot.wait(lambda: any("workspace box of 'arm': none" in line for line in robot.log), "no box")
        robot.log.clear()
    put(robot, low, [0.1, -0.5, 0.0])
    assert robot.change(Transition.TRANSITION_CLEANUP)
    assert not robot.change(Transition.TRANSITION_CONFIGURE), "half a box at the start"


def test_an_instruction_parameter_reaches_the_policy(robot, policy) -> None:
    policy()
    robot.drive()
    robot.wait(lambda: robot.actions, "an action")
    assert put(robot, "policy.instruction", "pick up the cup") == (True, "")
    refused, reason = put(robot, "policy.instruction", 5)
    assert not refused
    assert reason


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("limits.max_joint_stp:=0.1", "did you mean 'limits.max_joint_step'?"),
        ("control.rate_hz:=fast", "control.rate_hz: "),
        ("control.output:=twist", "control.output: found 'twist' (str), expected one of joint_state"),
        ("policy.instructon:='pick'", "did you mean 'policy.instruction'?"),
        ("camera.keys:=[a, b]", "camera.keys: found 2 keys for 1 camera.topics"),
    ],
)
def test_a_mistake_at_start_ends_the_node_with_the_reason(policy, option: str, reason: str) -> None:
    node = policy(option, quick=("policy.name:=hold",))
    assert node.process.wait(60) == 1
    assert reason in node.output
    assert "Traceback" not in node.output


def test_options_of_another_policy_in_a_file_are_ignored_with_a_warning(policy) -> None:
    node = policy("policy.checkpoint:=/models/mine", "autostart:=false")
    node.wait_for("ignored policy.checkpoint: the policy 'hold' (policy.name) runs no checkpoint")


def test_what_vla_ros_config_prints_is_a_parameter_file(robot, program, tmp_path) -> None:
    import sys

    from vla_ros.config.loading import build

    wanted = build(
        {"policy.name": "hold", "robot.urdf": "demo", "control.rate_hz": 9, "limits.workspace_low": []}, Config()
    )
    file = tmp_path / "robot.yaml"
    file.write_text(to_yaml(wanted))
    words = ["--ros-args", "--params-file", str(file), "-p", "autostart:=false"]
    program(sys.executable, "-m", "vla_ros.node.lifecycle_main", *words)
    assert robot.change(Transition.TRANSITION_CONFIGURE)
    assert get(robot, "policy.name", "control.rate_hz", "camera.topics") == ["hold", 9.0, ["/camera/image_raw"]]


def test_arms_and_presets_are_parameters_and_fixed_once_the_node_runs(robot, program, tmp_path) -> None:
    import sys

    file = tmp_path / "robot.yaml"
    file.write_text(
        "/**: {ros__parameters: {preset: aloha, policy: {name: hold}, left: {urdf: demo, command: /mine},"
        " control: {rate_hz: 20}, camera: {topics: [/a, /b, /c]}, features: {images: []}}}"
    )
    words = ["--ros-args", "--params-file", str(file), "-p", "autostart:=false"]
    program(sys.executable, "-m", "vla_ros.node.lifecycle_main", *words)
    names = ("robot.arms", "left.urdf", "left.command", "right.command", "control.rate_hz", "control.execute_steps")
    assert get(robot, *names) == [["left", "right"], "demo", "/mine", "/right/joint_command", 20.0, 0]
    assert not get(robot, "features.images")[0], "an empty list in a file is empty, whatever the preset says"
    for name, value in (("robot.arms", ["one"]), ("preset", "droid")):
        ok, reason = put(robot, name, value)
        assert not ok
        assert "determines which parameters exist" in reason


def test_several_arms_are_declared_without_a_preset(robot, program) -> None:
    import sys

    file = str(Path(__file__).resolve().parents[2] / "config" / "demo_two_arms.yaml")
    words = ["--ros-args", "--params-file", file, "-p", "autostart:=false"]
    program(sys.executable, "-m", "vla_ros.node.lifecycle_main", *words)
    names = ("robot.arms", "left.command", "right.command", "left.urdf", "right.workspace_low")
    commands = ["/left_arm/joint_command", "/right_arm/joint_command"]
    assert get(robot, *names) == [["left", "right"], *commands, "demo_two_arms", [0.25, -0.29, 0.008]]
