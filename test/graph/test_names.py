import os
from typing import Any

import pytest
import yaml

from vla_ros.errors import ConfigError
from vla_ros.graph.names import check_absolute, check_node_name, expand_name, parse_ros_arguments, rcl_reach

from .parameter_cases import rclpy_answer, read_cases, write_files


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("/abs/name", "/abs/name"),
        ("rel", "/ns/rel"),
        ("rel/more", "/ns/rel/more"),
        ("~", "/ns/node"),
        ("~/own", "/ns/node/own"),
        ("{node}/x", "/ns/node/x"),
        ("/{ns}/x", None),
        ("{ns}/x", "/ns/x"),
    ],
)
def test_expansion(name, full):
    if full is None:
        with pytest.raises(ConfigError):
            expand_name(name, "node", "/ns")
    else:
        assert expand_name(name, "node", "/ns") == full


def test_expansion_in_the_root_namespace():
    assert expand_name("rel", "node", "/") == "/rel"
    assert expand_name("~/own", "node", "/") == "/node/own"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/a//b", "'//'"),
        ("/a/", "ends with"),
        ("/1a", "'1a'"),
        ("/a b", "'a b'"),
        ("/a/b-c", "'b-c'"),
        ("", "empty"),
        ("~own", "'~own'"),
        ("/", "ends with"),
    ],
)
def test_invalid_names_say_what_is_wrong(name, said):
    with pytest.raises(ConfigError, match=said):
        expand_name(name, "node", "/")


def test_node_names_and_namespaces():
    assert check_node_name("vla_policy2") == "vla_policy2"
    assert check_absolute("/", "namespace") == "/"
    for name in ("", "2a", "a/b", "a b", "~"):
        with pytest.raises(ConfigError, match="node name"):
            check_node_name(name)


def test_remaps_apply_in_order_and_to_expanded_names():
    arguments = parse_ros_arguments(
        ["prog", "--ros-args", "-r", "a:=/first", "--remap", "/a:=/second", "-r", "~/x:=y", "--", "-r", "q:=/no"]
    )
    assert arguments.resolve("a", "node", "/") == "/first"
    assert arguments.resolve("a", "node", "/ns") == "/first"
    assert arguments.resolve("/a", "node", "/ns") == "/second"
    assert arguments.resolve("~/x", "node", "/ns") == "/ns/y"
    assert arguments.resolve("/node/x", "node", "/") == "/y"
    assert arguments.resolve("q", "node", "/") == "/q"


def test_remaps_before_ros_args_are_ignored():
    assert parse_ros_arguments(["-r", "a:=/b"]).resolve("a", "node", "/") == "/a"


def test_remaps_for_one_node_and_one_kind():
    arguments = parse_ros_arguments(
        ["--ros-args", "-r", "left:image:=/left", "-r", "rosservice://enable:=/on", "-r", "left:__node:=renamed"]
    )
    assert arguments.resolve("image", "left", "/") == "/left"
    assert arguments.resolve("image", "right", "/") == "/image"
    assert arguments.resolve("enable", "left", "/") == "/enable"
    assert arguments.resolve("enable", "left", "/", "service") == "/on"
    assert (arguments.node_name("left"), arguments.node_name("right")) == ("renamed", "right")


def test_a_remap_of_the_namespace_names_the_node_by_its_new_name():
    rules = ["-r", "__node:=new", "-r", "old:__ns:=/old", "-r", "new:__ns:=/new"]
    assert parse_ros_arguments(["--ros-args", *rules]).full_name("old") == "/new/new"


def ours(words: list[str]) -> dict[str, Any] | None:
    """The node's full name and parameters by our rules, or None where they refuse the arguments."""
    try:
        arguments = parse_ros_arguments(words)
        node = arguments.full_name("vla_policy")
        return {"node": node, "values": arguments.values(node)}
    except ConfigError:
        return None


def test_parameters_are_those_that_rclpy_was_seen_to_give(tmp_path):
    for case in read_cases():
        assert ours(write_files(case, tmp_path)) == case["answer"], case


def written_by_launch(folder):
    """The arguments with which launch_ros passes a list: PyYAML tags the tuple, and rcl ignores the tag."""
    file = folder / "launch_params"
    file.write_text(yaml.dump({"/**": {"ros__parameters": {"robot.arms": ("left", "right")}}}))
    assert "!!python/tuple" in file.read_text()
    return ["--ros-args", "--params-file", str(file)]


def test_a_list_that_launch_wrote_is_read(tmp_path):
    assert ours(written_by_launch(tmp_path))["values"] == {"robot.arms": ["left", "right"]}


@pytest.mark.ros
def test_parameters_are_those_that_rclpy_gives_here(tmp_path):
    pytest.importorskip("rclpy", reason="no ROS 2 is sourced")
    assert ours(written_by_launch(tmp_path)) == rclpy_answer(written_by_launch(tmp_path))
    for case in read_cases():
        if os.environ.get("ROS_DISTRO") == "humble" and "!!str" in str(case["files"]):
            continue  # Humble's rcl ignores the tag
        words = write_files(case, tmp_path)
        assert ours(words) == rclpy_answer(words), case


@pytest.mark.parametrize(
    "args",
    [
        ["--params-file"],
        ["-r"],
        ["-r", "a"],
        ["-r", ":=b"],
        ["-r", "a:="],
        ["-r", "/robot_1/node:a:=b"],
        ["-r", "/*/a:=b"],
        ["-r", "__node:=a/b"],
        ["-r", "__ns:=a"],
        ["-p", "x"],
        ["-p", "x:="],
        ["-p", "/robot_1/node:x:=1"],
        ["-p", "x:=["],
        ["--pramas-file", "a.yaml"],
    ],
)
def test_malformed_arguments(args):
    with pytest.raises(ConfigError):
        parse_ros_arguments(["--ros-args", *args])


def test_flags_of_logging_and_security_are_ignored():
    words = ["--log-level", "debug", "--disable-rosout-logs", "-e", "/robot", "-p", "a:=1"]
    assert parse_ros_arguments(["--ros-args", *words]).values("/n") == {"a": 1}


@pytest.mark.parametrize(
    ("distro", "variables", "reach"),
    [
        ("humble", {}, "SUBNET (default)"),
        ("humble", {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, "SUBNET (Humble ignores"),
        ("humble", {"ROS_LOCALHOST_ONLY": "1"}, "LOCALHOST (ROS_LOCALHOST_ONLY)"),
        ("jazzy", {}, "SUBNET (default)"),
        ("jazzy", {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, "LOCALHOST"),
        (
            "jazzy",
            {"ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF", "ROS_LOCALHOST_ONLY": "1"},
            "LOCALHOST (ROS_LOCALHOST_ONLY)",
        ),
    ],
)
def test_a_range_that_humble_ignores_is_not_shown_as_in_force(distro: str, variables: Any, reach: str) -> None:
    assert rcl_reach({"ROS_DISTRO": distro} | variables).startswith(reach)
