import sys
from unittest import mock

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from launch import LaunchContext
from vla_ros.errors import ConfigError
from vla_ros.launching.arguments import POLICY, declare_arguments, node_name, node_options

pytestmark = pytest.mark.ros

FLEET = """
/left/vla_policy: {ros__parameters: {limits: {max_joint_step: 0.1}}}
/right/vla_policy: {ros__parameters: {limits: {max_joint_step: 0.2}}}
"""


def context(**given: str) -> LaunchContext:
    made = LaunchContext()
    made.launch_configurations.update({"name": "vla_policy", **given})
    return made


@pytest.mark.parametrize(
    ("namespace", "expected"), [("", "/vla_policy"), ("left", "/left/vla_policy"), ("/a/b/", "/a/b/vla_policy")]
)
def test_the_name_has_its_namespace(namespace, expected):
    assert node_name(context(namespace=namespace)) == expected


@pytest.fixture
def fleet(tmp_path) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return str(file)


@pytest.mark.parametrize(("namespace", "step"), [("left", 0.1), ("/right", 0.2)])
def test_a_file_for_several_robots_gives_each_its_own(fleet, namespace, step):
    assert node_options(context(config=fleet, namespace=namespace)).limits.max_joint_step == step


@pytest.mark.parametrize("text", ["pick up cup #2", "first: the cup", "yes", "", '"Würfel" \U0001f9ca'])
def test_an_instruction_is_passed_unchanged(text):
    given = node_options(context(policy="hold", instruction=text, camera_topics="[/a]", armed="true"))
    assert (given.policy.instruction, given.camera.topics, given.control.armed) == (text, ("/a",), True)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_every_quantization_can_be_launched(quantization):
    assert node_options(context(policy="openvla", quantization=quantization)).policy.quantization == quantization
    assert not next(argument for argument in POLICY if argument.name == "quantization").choices


def started(file: str, command: list[str], *arguments: str) -> None:
    """Run what the launch file declares, as `ros2 launch` does with these words."""
    made = LaunchContext(argv=arguments)
    made.extend_locals({"current_launch_file_path": file})
    with mock.patch.object(sys, "argv", ["ros2", "launch", *command, *arguments]):
        declare_arguments(POLICY)[0].visit(made)


def test_a_misspelt_argument_is_refused_with_the_nearest(tmp_path):
    file = tmp_path / "policy.launch.py"
    file.touch()
    for command in (["vla_ros", "policy.launch.py"], [str(file)]):
        started(str(file), command, "checkpoint:=demo", "launch-prefix:=gdb")
        with pytest.raises(RuntimeError, match=r"chekpoint:= is no argument of .*; did you mean 'checkpoint'"):
            started(str(file), command, "chekpoint:=demo")
    started(str(file), ["mine", "policy.launch.py"], "chekpoint:=demo")  # another file includes ours
    started(str(file), ["mine", "all.launch.py"], "chekpoint:=demo")


@pytest.mark.parametrize(("name", "known"), [("python", "/nowhere/bin/python"), ("VIRTUAL_ENV", "/nowhere")])
def test_an_interpreter_that_does_not_exist_is_refused(name, known):
    from vla_ros.launching.node import interpreter

    made = context(python=known) if name == "python" else context()
    with pytest.raises(RuntimeError, match=r"/nowhere.*found no such program"):
        interpreter(made, {name: known})


def test_a_missing_namespace_is_an_error_with_advice(fleet):
    with pytest.raises(ConfigError, match="namespace"):
        node_options(context(config=fleet))
