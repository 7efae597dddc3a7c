"""The gripper's options against the URDF."""

from pathlib import Path
from typing import Any

import pytest

from vla_ros.config import Config, build
from vla_ros.contract.binding import bind, make_arms
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import ConfigError

BOTH = ["finger_left", "finger_right"]


def config(**values: Any) -> Config:
    demo = {"robot.urdf": "demo", "robot.gripper_joint_names": BOTH, "gripper.open_position": 0.04}
    return build(demo | values)


def fit(options: Config) -> None:
    action = parse_components("arm.joint_position + arm.gripper", action=True)
    bind(PolicySpec((ImageFeature("image"),), (), action, dimension=0), options, make_arms(options))


def arm_with(*joints: str) -> str:
    """A URDF: one arm joint, and what is given beyond it."""
    links = "".join(f'<link name="{name}"/>' for name in ("base", "hand", "left", "right", "head"))
    arm = (
        '<joint name="j1" type="revolute"><parent link="base"/><child link="hand"/><axis xyz="0 0 1"/>'
        '<limit lower="-1" upper="1" velocity="1" effort="1"/></joint>'
    )
    known = {"left", "right", "head"}
    text = "".join(joints)
    rest = "".join(
        f'<joint name="{name}_fixed" type="fixed"><parent link="base"/><child link="{name}"/></joint>'
        for name in sorted(known)
        if f'child link="{name}"' not in text
    )
    return f'<robot name="r">{links}{arm}{text}{rest}</robot>'


def finger(name: str, child: str, low: float, high: float, more: str = "", parent: str = "hand") -> str:
    return (
        f'<joint name="{name}" type="prismatic"><parent link="{parent}"/><child link="{child}"/><axis xyz="0 1 0"/>'
        f'<limit lower="{low}" upper="{high}" velocity="0.2" effort="1"/>{more}</joint>'
    )


@pytest.fixture
def described(tmp_path: Path):
    def described(*joints: str, **values: Any) -> Config:
        path = tmp_path / "arm.urdf"
        path.write_text(arm_with(*joints))
        own = {"robot.urdf": str(path), "robot.tip_frame": "hand", "robot.gripper_joint_names": ["finger"]}
        return config(**(own | values))

    return described


def test_what_the_urdf_describes_is_accepted() -> None:
    fit(config())
    fit(config(**{"gripper.open_position": 0.0, "gripper.closed_position": 0.04}))


@pytest.mark.parametrize("names", [["finger_left", "finger_rigth"], ["finger_rigth"], ["joint_8"]])
def test_a_misspelt_finger_is_refused(names: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=rf"robot.gripper_joint_names: found '{names[-1]}', which .* does not have"
    ):
        fit(config(**{"robot.gripper_joint_names": names}))


@pytest.mark.parametrize(
    ("leaf", "value"),
    [("open_position", 1.5), ("open_position", -0.04), ("closed_position", -0.001), ("closed_position", 4.0)],
)
def test_a_position_outside_the_limits_is_refused(leaf: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"gripper.{leaf}: found {value:g}, outside the limits of 'finger_left'"):
        fit(config(**{f"gripper.{leaf}": value}))
    fit(config(**{f"gripper.{leaf}": value, "gripper.mode": "none"}))


def test_an_urdf_that_ends_at_the_arm_says_nothing_of_fingers(described) -> None:
    fit(described())
    fit(described(finger("pan", "head", -1, 1, parent="base")))
    with pytest.raises(ConfigError, match=r"'finger', which .*; its joints beyond the arm are knuckle"):
        fit(described(finger("knuckle", "left", 0, 1)))


def test_a_finger_that_mimics_another_has_limits_of_its_own(described) -> None:
    mimic = finger("other", "right", -0.05, 0, '<mimic joint="finger" multiplier="-1"/>')
    both = {"robot.gripper_joint_names": ["finger", "other"]}
    fit(described(finger("finger", "left", 0, 0.05), mimic, **both))
    with pytest.raises(ConfigError, match="outside the limits of 'other'"):
        fit(described(finger("finger", "left", 0, 0.05), mimic, **{"robot.gripper_joint_names": ["other"]}))


def test_limits_of_no_width_say_nothing(described) -> None:
    fit(described(finger("finger", "left", 0, 0)))


def test_several_arms_are_named() -> None:
    values = {
        "robot.arms": ["left", "right"],
        "robot.urdf": "demo_two_arms",
        "left.gripper_joint_names": ["left_finger_left", "left_finger_right"],
        "right.gripper_joint_names": ["right_finger_left", "right_finger_rigth"],
        "left.tip_frame": "left_tool",
        "right.tip_frame": "right_tool",
        "left.base_frame": "left_base_link",
        "right.base_frame": "right_base_link",
        "right.command": "/right/command",
        "left.command": "/left/command",
        "gripper.open_position": 0.04,
    }
    options = build(values)
    parts = "left.joint_position + left.gripper + right.joint_position + right.gripper"
    spec = PolicySpec((ImageFeature("image"),), (), parse_components(parts, action=True), dimension=0)
    with pytest.raises(ConfigError, match=r"right.gripper_joint_names: found 'right_finger_rigth'"):
        bind(spec, options, make_arms(options))
