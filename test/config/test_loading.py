"""Options: accepted and refused values, error messages, and equal results from all sources."""

import argparse
import dataclasses
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import Config, PolicyConfig, build, entries, flatten, load, parse_assignment, read_file, to_yaml
from vla_ros.config.files import config_file
from vla_ros.config.show import add_config_arguments
from vla_ros.config.tree import LiveConfig
from vla_ros.errors import ConfigError
from vla_ros_models.openvla import OpenVLAOptions


def test_every_option_has_a_description_and_a_default_that_passes_its_own_check() -> None:
    for entry in entries().values():
        assert len(entry.option.description) > 8, entry.name
    assert build(flatten(Config())) == Config()


def test_the_printed_tree_is_a_parameter_file_that_gives_the_tree_back(tmp_path: Path) -> None:
    config = build(
        {"robot.urdf": "demo", "limits.workspace_low": [-0.5, -0.5, 0], "limits.workspace_high": [0.5, 0.5, 1.0]}
    )
    path = tmp_path / "robot.yaml"
    path.write_text(to_yaml(config))
    assert load([path]) == config


TWO = {
    "robot.arms": ["left", "right"],
    "robot.urdf": "demo",
    "left.command": "/l",
    "right.command": "/r",
    "right.workspace_low": [0.0, 0.0, 0.0],
    "right.workspace_high": [1.0, 1.0, 1.0],
    "right.joint_names": ["a"],
}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"policy.name": "wiggle", "policy.unnorm_key": "x"},
            "an option of the policies oft, openvla, and policy.name is 'wiggle'; set policy.name to one of them",
        ),
        ({"policy.chekpoint": "x"}, "policy.chekpoint: no such parameter; did you mean 'policy.checkpoint'?"),
        ({"rate_hz": 5.0}, "did you mean 'control.rate_hz'?"),
        ({"topics.status": "/s"}, "topics.status: removed; the topic is ~/status; to rename it: --ros-args -r"),
        ({"takeover.rate_hz": 30.0}, "takeover.rate_hz: removed; a person's steps have 50 Hz"),
        (
            {"control.rate_hz": "fast"},
            "control.rate_hz: found 'fast' (str), expected a number from 0 to 1000 (Hz), or -1",
        ),
        (
            {"policy.instruction": False},
            "policy.instruction: found False (bool), expected text; YAML does not read",
        ),
        ({"policy.instruction": "caf\udce9"}, r"policy.instruction: found 'caf\udce9', which is not valid Unicode"),
        ({"camera.topics": ["/\ud83d\ude00"]}, "which is not valid Unicode"),
        ({"control.rate_hz": True}, "control.rate_hz: found True (bool), expected a number"),
        ({"control.rate_hz": float("nan")}, "control.rate_hz: found nan"),
        ({"control.armed": 1}, "control.armed: found 1 (int), expected true or false"),
        ({"policy.device": "cuda"}, "policy.name is 'auto'; set policy.checkpoint, set policy.name to one of them"),
        ({"policy.server": "ws://gpu"}, "policy.name is 'auto'; set policy.name:=remote or leave it out"),
        (
            {"policy.name": "openvla", "policy.threads": 2.0},
            "policy.threads: found 2.0 (float), expected an integer",
        ),
        (
            {"camera.crop_area": 1.5},
            "camera.crop_area: found [1.5] (list), expected a number from 0 to 1; one for all",
        ),
        ({"camera.width": [1, 2]}, "camera.width: found 2 values, expected one for all cameras or one per camera"),
        ({"camera.orientation": ["rotate_18"]}, "did you mean 'rotate_180'?"),
        (
            {"camera.topics": "/camera"},
            "found '/camera' (str), expected a list, each item text; for a list of one item, write [/camera]",
        ),
        ({"limits.workspace_low": [0.0, 1.0]}, "of length 0 or 3"),
        ({"gripper.mode": "bianry"}, "did you mean 'binary'?"),
        ({"camera.topics": ["/a", "/b"]}, "camera.keys: found 1 keys for 2 camera.topics"),
        ({"limits.workspace_low": [0.0, 0.0, 0.0]}, "expected both corners of the box or neither"),
        ({"limits.workspace_high": [0.0, 0.0, 0.0]}, "limits.workspace_high: needs robot.urdf, which is not set"),
        ({"gripper.open_value": 0.0}, "the same as gripper.closed_value"),
        ({"robot.state_topics": ["objects"]}, "expected NAME=/topic"),
        ({"gripper.threshold": 0.3, "gripper.hysteresis": 0.4}, "never close"),
        ({"gripper.threshold": 1.0}, "never open"),
        (
            {"robot.gripper_joint_names": ["f"], "gripper.open_position": 0.0, "gripper.closed_position": 0.0},
            "the same as gripper.closed_position",
        ),
        ({"control.output": "twist_stamped", "control.rate_hz": 0.0}, "needs the length of a step"),
        ({"control.output": "twist_stamped", "robot.gripper_joint_names": ["f"]}, "cannot carry finger positions"),
        ({"topics.gripper": "/g"}, "no robot.gripper_joint_names; nothing would ever be sent to this topic"),
        ({"topics.gripper": "/g", "robot.gripper_joint_names": ["f"], "gripper.mode": "none"}, "gripper.mode none"),
        (
            {"topics.gripper": "/g", "topics.command": "/g", "robot.gripper_joint_names": ["f"]},
            "the same as topics.command",
        ),
        ({"camera.topics": ["/a", "/a"], "camera.keys": ["x", "y"]}, "camera.topics: found"),
        ({"camera.topics": ["/a", "/b"], "camera.keys": ["x", "x"]}, "camera.keys: found"),
        ({"robot.state_topics": ["x=/a", "x=/b"]}, "no repeated name"),
        ({"policy.instruction": "pick " * 200}, "found 1000 characters, expected at most 500"),
        ({"robot.arms": ["robot"]}, "robot.arms: found ['robot']"),
        ({"robot.arms": ["a", "a"]}, "different names"),
        ({"robot.arms": ["a b"]}, "each one word"),
        ({"left.urdf": "x"}, "'left' is not one of robot.arms, which are: none"),
        ({**TWO, "left.urfd": "x"}, "did you mean 'left.urdf'"),
        ({**TWO, "left.home": "x"}, "left.home: found 'x' (str), expected a list"),
        ({**TWO, "right.command": "/l"}, "right.command: found /l, the same as left.command"),
        (
            {**TWO, "right.gripper": "/l", "robot.gripper_joint_names": ["f"]},
            "right.gripper: found /l, the same as left.command",
        ),
        ({**TWO, "left.workspace_low": [0.0, 0.0, 0.0]}, "left.workspace_low and limits.workspace_high"),
        ({"robot.state_topics": ["force=/f:Wrench"]}, "JointState|Float64MultiArray|PoseStamped|WrenchStamped"),
        ({"preset": "libro"}, "preset: found 'libro'"),
        ({"preset": 3}, "preset: found 3 (int)"),
        (
            {"robot.joint_names": ["a", "a", "b"]},
            "robot.joint_names and robot.gripper_joint_names: found a more than",
        ),
        ({"robot.joint_names": ["a", "b"], "robot.gripper_joint_names": ["b"]}, "found b more than once"),
        ({"topics.command": "/joint_states"}, "the same as topics.joint_states"),
        ({"takeover.joy": "/joy", "takeover.buttons": ["deadman = 4", "resume = 4"]}, "with an index of its own"),
        ({"takeover.joy": "/joy", "takeover.buttons": ["stop = 4"]}, "takeover.buttons: found ['stop = 4']"),
        ({"takeover.buttons": ["pause = 4"]}, "takeover.joy: found no topic"),
        ({"takeover.input": "twist", "takeover.topic": "/t", "robot.urdf": "demo"}, "a button deadman"),
        ({"takeover.input": "leader"}, "takeover.leader: found no topic"),
        ({"takeover.allow_reach": True}, "a button reach that is held meanwhile"),
        ({"takeover.lost_distance": 0.05}, "expected more than takeover.tolerance"),
    ],
)
def test_errors_say_what_was_found_and_expected(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(values)
    assert expected in str(caught.value)


def test_an_unused_gripper_is_not_checked() -> None:
    build({"gripper.mode": "none", "gripper.threshold": 1.0, "gripper.open_value": 0.0})


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"policy.nam": "x", "control.rate_hz": -2.0, "gripper.threshold": 2.0})
    assert len(str(caught.value).splitlines()) == 3


def test_integers_are_numbers_and_lists_become_tuples() -> None:
    config = build({"control.rate_hz": 10, "camera.orientation": ["rotate_180"]})
    assert config.control.rate_hz == 10.0
    assert isinstance(config.control.rate_hz, float)
    assert config.camera.orientation == ("rotate_180",)


def test_later_files_and_then_assignments_win(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("/**:\n  ros__parameters:\n    control: {rate_hz: 3, armed: true}\n")
    second.write_text("vla_policy:\n  ros__parameters:\n    control.rate_hz: 4\n")
    assert load([first, second]).control.rate_hz == 4.0
    assert load([first, second], ["control.rate_hz:=7"]).control == dataclasses.replace(
        Config().control, rate_hz=7.0, armed=True
    )


def test_another_policy_drops_the_previous_policys_options(tmp_path: Path) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text("/**:\n  ros__parameters:\n    policy: {name: openvla, checkpoint: /my, instruction: wave}\n")
    assert load([path], ["policy.dtype:=float32"]).policy == OpenVLAOptions(
        "openvla", checkpoint="/my", instruction="wave", dtype="float32"
    )
    found = load([path], ["policy.name:=hold"]).policy
    assert found == PolicyConfig("hold", instruction="wave")
    with pytest.raises(
        ConfigError, match=r"policy\.dtype: an option of the policies groot, .*, and policy\.name is 'hold'"
    ):
        load([path], ["policy.name:=hold", "policy.dtype:=float32"])


def test_one_value_stands_for_all_cameras() -> None:
    two = {"camera.topics": ["/a", "/b"], "camera.keys": ["left", "right"]}
    both = build({**two, "camera.width": 800, "camera.crop_area": [0.9, 0], "camera.processor": "libero"}).camera
    left, right = both.each
    assert (left.topic, left.key, left.width, left.crop_area, left.processor) == ("/a", "left", 800, 0.9, "libero")
    assert (right.topic, right.key, right.width, right.crop_area, right.height) == ("/b", "right", 800, 0.0, 480)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", "expected '/**:' with 'ros__parameters:'"),
        ("/**:\n  parameters: {}\n", "lacks 'ros__parameters:'"),
        ("camera_driver:\n  ros__parameters: {fps: 30}\n", "found no parameters for '/vla_policy', only"),
        ("/**/:\n  ros__parameters: {fps: 30}\n", "'/**/' names no node"),
        ("ros__parameters: {fps: 30}\n", "'' names no node"),
        ("vla_policy:\n  ros__parameters: {}\n  rate: 1\n", "and nothing beside it"),
        ("a: [", "is not a YAML file (line 1"),
        ("/**:\n\tros__parameters: {}", "line 2, column 1: found character '\\t'"),
        ("/**:\n\tros__parameters: {}", "indent with spaces"),
        (
            "/**:\n  ros__parameters:\n    limits: {max_joint_step: 0.1}\n    limits: {joint_margin: 0.1}",
            "line 4, column 5: 'limits' appears here for the second time",
        ),
    ],
)
def test_invalid_parameter_files_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_parameters_of_ros_itself_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text("/**:\n  ros__parameters: {use_sim_time: true}\n")
    with pytest.raises(ConfigError, match=r"use_sim_time: belongs to the ROS node.*--ros-args -p use_sim_time:="):
        load([path])


def test_a_node_takes_the_sections_of_its_full_name_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    sections = {
        "/**": 1.0,
        "/left/vla_policy": 2.0,
        "/right/vla_policy": 3.0,
        "other": 4.0,
        "/*": 5.0,
        "/up/**": 6.0,
    }
    sections["/**/low"] = 7.0
    path.write_text(
        "".join(f"{key}:\n  ros__parameters: {{control: {{rate_hz: {rate}}}}}\n" for key, rate in sections.items())
    )
    nodes = {
        "/left/vla_policy": 2.0,
        "/right/vla_policy": 3.0,
        "/middle/vla_policy": 1.0,
        "/other": 5.0,
        "/up/x/y": 6.0,
    }
    nodes |= {"/up": 6.0, "/a/b/low": 7.0, "/low": 7.0, "/left/other": 1.0}
    assert {node: read_file(path, node)["control.rate_hz"] for node in nodes} == nodes
    with pytest.raises(
        ConfigError,
        match="/left/vla_policy, /right/vla_policy, /up/vla_policy, but this node's namespace is unknown",
    ):
        read_file(path)


def test_limits_of_one_robot_are_not_lost_beside_those_of_all(tmp_path: Path) -> None:
    path = tmp_path / "robots.yaml"
    slow = "ros__parameters: {limits: {velocity_scale: 0.1}}"
    for key in ("/robot_1/**", "/**/vla_policy", "/*/*"):
        path.write_text(f"/**:\n  ros__parameters: {{policy: {{instruction: go on}}}}\n{key}:\n  {slow}\n")
        assert load([path], node_name="/robot_1/vla_policy").limits.velocity_scale == 0.1
        assert load([path]).limits.velocity_scale == (1.0 if key == "/*/*" else 0.1)  # a file of one robot


def test_scalars_are_what_ros_reads(tmp_path: Path) -> None:
    texts = {
        "1e-3": 1e-3,
        "5E2": 500.0,
        ".5": 0.5,
        "08": 8.0,
        "010": 8,
        "0x1F": 31,
        "1_000": "1_000",
        "1:30": "1:30",
    }
    texts |= {
        "y": True,
        "N": False,
        "oN": "oN",
        "off": False,
        "'y'": "y",
        "2026-11-23": "2026-11-23",
        "-.inf": -math.inf,
    }
    for text, value in texts.items():
        assert parse_assignment(f"a:={text}")[1] == value
        assert type(parse_assignment(f"a:={text}")[1]) is type(value)


@pytest.mark.parametrize("text", ["y", "1e-3", "inf", "on", "null", "", "a: b", "*a", "w\u00fcrfel", "1_000", "5"])
def test_text_is_written_so_that_ros_reads_text(text: str) -> None:
    written = to_yaml(build({"policy.instruction": text})).split("      instruction: ")[1].splitlines()[0]
    assert parse_assignment(f"a:={written}") == ("a", text)


def test_a_box_is_switched_on_moved_and_off_one_corner_at_a_time() -> None:
    low, high = "limits.workspace_low", "limits.workspace_high"
    config = build({"robot.urdf": "demo"})
    boxes = []
    for name, corner in (
        (low, [0.1, -0.5, 0.0]),
        (high, [0.9, 0.5, 0.8]),
        (low, [0.2, -0.5, 0.0]),
        (low, []),
        (high, [0.1, 0.1, 0.1]),
        (high, []),
    ):
        config = build({name: corner}, config, live=True)
        boxes.append(config.limits.box)
    first, second = ((0.1, -0.5, 0.0), (0.9, 0.5, 0.8)), ((0.2, -0.5, 0.0), (0.9, 0.5, 0.8))
    assert boxes == [None, first, second, None, None, None]
    config = build({low: [0.1, -0.5, 0.0], high: [0.9, 0.5, 0.8]}, config, live=True)
    with pytest.raises(ConfigError, match=r"below that of limits.workspace_high.*or first one to \[\]"):
        build({low: [1.0, 0.0, 0.0]}, config, live=True)


@pytest.mark.parametrize("output", ["twist_stamped", "joint_state"])
def test_a_box_without_a_urdf_is_refused_live_too(output: str) -> None:
    config = build({"control.output": output})
    with pytest.raises(ConfigError, match=r"limits.workspace_low: needs robot.urdf, which is not set"):
        build({"limits.workspace_low": [0.1, -0.5, 0.0]}, config, live=True)


def test_a_single_arm_is_called_arm_and_has_the_shared_options() -> None:
    config = build({"topics.command": "/c", "topics.gripper": "/g", "robot.gripper_joint_names": ["finger"]})
    (arm,) = config.arms
    assert (arm.name, arm.output, arm.command, arm.gripper_topic) == ("arm", "joint_state", "/c", "/g")
    assert (arm.robot, arm.gripper, arm.limits) == (config.robot, config.gripper, config.limits)


def test_sections_of_arms_default_to_the_shared_options() -> None:
    config = build(TWO)
    left, right = config.arms
    assert [left.name, right.name, left.command, right.command] == ["left", "right", "/l", "/r"]
    assert left.robot.urdf == right.robot.urdf == "demo"
    assert left.limits is config.limits
    assert right.limits.workspace_low == (0.0, 0.0, 0.0)
    changed = build({"control.output": "float64_multi_array", "right.output": "joint_state"}, config)
    assert [arm.output for arm in changed.arms] == ["float64_multi_array", "joint_state"]
    assert build({"robot.arms": ["right", "third"], "third.command": "/t"}, config).arms[0].command == "/r"


def test_the_sections_of_arms_are_printed_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    config = build(TWO)
    path.write_text(to_yaml(config))
    again = load([path])
    assert flatten(again) == flatten(config)
    assert again.arms == config.arms
    assert flatten(config)["left.command"] == "/l"


def test_arms_on_separate_topics_may_share_joint_names() -> None:
    config = build({**TWO, "left.joint_names": ["a"], "left.joint_states": "/left/joint_states"})
    assert [arm.joint_states for arm in config.arms] == ["/left/joint_states", "/joint_states"]


def test_state_topics_have_a_type() -> None:
    config = build({"robot.state_topics": ["objects=/o", "force=/f:WrenchStamped"]})
    assert [(topic.name, topic.topic, topic.type) for topic in config.robot.parsed_state_topics] == [
        ("objects", "/o", "JointState"),
        ("force", "/f", "WrenchStamped"),
    ]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        read_file(Path("nowhere.yaml"))


def test_files_are_found_by_path_or_by_name_in_the_package(tmp_path: Path) -> None:
    own = tmp_path / "robot.yaml"
    own.write_text("/**:\n  ros__parameters: {control: {rate_hz: 2.0}}\n")
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    files = parser.parse_args(["--config", "demo", "--config", str(own)]).config
    assert load(files).robot.urdf == "demo"
    assert load(files).control.rate_hz == 2.0
    with pytest.raises(ConfigError, match=r"config 'dmo': no such file; expected a file or one of aloha, demo, "):
        parser.parse_args(["--config", "dmo"])
    with pytest.raises(ConfigError, match=r"config '.*': a folder; expected a file"):
        parser.parse_args(["--config", str(own.parent)])


@pytest.mark.parametrize("name", ["ur5e", "config/robots/ur5e.yaml"])
def test_a_robots_file_is_found_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load([config_file(name)]).robot.tip_frame == "tool0"


def test_assignments_are_yaml() -> None:
    assert parse_assignment("camera.topics:=[/a, /b]") == ("camera.topics", ["/a", "/b"])
    assert parse_assignment("policy.instruction:=pick up the cube") == ("policy.instruction", "pick up the cube")
    assert parse_assignment("policy.instruction:=") == ("policy.instruction", "")
    with pytest.raises(ConfigError, match="expected name:=value"):
        parse_assignment("camera.topics=/a")
    with pytest.raises(ConfigError, match="not YAML"):
        parse_assignment("camera.topics:=[")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.integers(), max_size=4)
)


@given(st.dictionaries(st.sampled_from(sorted(entries())), JUNK, max_size=4))
def test_any_value_is_either_taken_within_its_range_or_refused(values: dict[str, object]) -> None:
    try:
        config = build(values)
    except ConfigError:
        return
    for name, value in flatten(config).items():
        option = entries()[name].option
        for item in value if isinstance(value, list) else [value]:
            assert option.low is None or item >= option.low or item == option.unset
            assert option.high is None or item <= option.high
            assert not option.choices or item in option.choices


def test_shipped_parameter_files_are_valid() -> None:
    folder = Path(__file__).parents[2] / "config"
    for path in sorted(folder.glob("*.yaml")):
        if "/**" in yaml.safe_load(path.read_text()):
            robot = folder / "robots" / f"{path.stem.removeprefix('leader_')}.yaml"  # what a leader's file follows
            load([robot, path] if robot.exists() else [path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/**: {ros__parameters: &p {policy: *p}}", r"'\*p' is an alias, which ROS 2 does not read"),
        (f"/**: {{ros__parameters: {'{a: ' * 20}1{'}' * 20}}}", "has too many levels"),
        ("[" * 5000 + "]" * 5000, "is not a YAML file"),
        (
            "/**: {ros__parameters: {policy: {name: " + "x" * 900_000 + "}}}",
            r"policy.name: found 'x+.* \[\.\.\.\] ",
        ),
        ("# " + "x" * (1 << 20), "cannot be read .larger than 1 MiB"),
    ],
)
def test_hostile_files_are_refused_at_once(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([path])
    assert re.search(message, str(caught.value))
    assert len(str(caught.value)) < 5000


def test_the_documented_options_without_a_gripper_load() -> None:
    page = (Path(__file__).parents[2] / "docs" / "robots" / "ur5e.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| no gripper |"))
    options = shlex.split(row.split("`")[1])
    config = load([config_file("ur5e")], [text for text in options if text != "-p"])
    assert config.robot.gripper_joint_names == ()
    assert config.topics.gripper == ""


def test_options_that_are_given_up_replace_none_that_came_meanwhile() -> None:
    refused, kept, newest = Config(), Config(), Config()
    live = LiveConfig(refused)
    live.give_up(refused, kept)
    assert live.current is kept
    live.current = newest
    live.give_up(refused, kept)
    assert live.current is newest
