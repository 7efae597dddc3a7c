"""Names: validity, expansion and remaps, by the rules of design.ros2.org."""

from __future__ import annotations

import pytest

from vla_ros.errors import ConfigError
from vla_ros.graph.names import check_absolute, check_node_name, expand, parse_ros_arguments


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
            expand(name, "node", "/ns")
    else:
        assert expand(name, "node", "/ns") == full


def test_expansion_in_the_root_namespace():
    assert expand("rel", "node", "/") == "/rel"
    assert expand("~/own", "node", "/") == "/node/own"


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
        expand(name, "node", "/")


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


def test_node_and_namespace():
    arguments = parse_ros_arguments(["--ros-args", "-r", "__node:=x", "-r", "__ns:=/y", "-p", "use_sim_time:=true"])
    assert (arguments.node_name("vla"), arguments.namespace("/", "vla")) == ("x", "/y")
    assert arguments.flag("use_sim_time")
    assert not parse_ros_arguments([]).flag("use_sim_time")


def test_parameters_and_their_files():
    arguments = parse_ros_arguments(
        ["--ros-args", "--params-file", "a.yaml", "-p", "node:policy.name:=hold", "--params-file", "b.yaml"]
    )
    assert arguments.files == ("a.yaml", "b.yaml")
    assert arguments.parameters == {"policy.name": "hold"}


@pytest.mark.parametrize(
    "args",
    [["--params-file"], ["-r"], ["-r", "a"], ["-r", ":=b"], ["-r", "a:="], ["-p", "x"], ["-r", "__node:=a/b"]],
)
def test_malformed_arguments(args):
    with pytest.raises(ConfigError):
        parse_ros_arguments(["--ros-args", *args])
