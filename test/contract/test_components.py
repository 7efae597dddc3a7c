"""Components of states and actions, as text and back."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vla_ros.config import GripperConfig
from vla_ros.contract.components import Component, parse_components
from vla_ros.control.gripper import Gripper
from vla_ros.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("arm.joint_position", (Component("arm", "joint_position", "rad"),)),
        ("left.joint_position[ deg ]", (Component("left", "joint_position", "deg"),)),
        ("arm.joint_position[-100..100]", (Component("arm", "joint_position", "-100..100"),)),
        ("arm.joint_position(a, b)[deg]", (Component("arm", "joint_position", "deg", ("a", "b")),)),
        ("arm.gripper", (Component("arm", "gripper", "0..1"),)),
        (
            "arm.gripper[1..0]+topic.force[6]",
            (Component("arm", "gripper", "1..0"), Component("", "topic", "force", count=6)),
        ),
        ("unused[2] + topic.box", (Component("", "unused", count=2), Component("", "topic", "box"))),
        ("arm.tip_rotation[rot6d]", (Component("arm", "tip_rotation", "rot6d"),)),
    ],
)
def test_components_are_read_and_written(text: str, parts: tuple[Component, ...]) -> None:
    assert parse_components(text) == parts
    assert parse_components(" + ".join(map(str, parts))) == parts


@pytest.mark.parametrize(
    ("text", "action", "message"),
    [
        ("", False, "expected ARM.QUANTITY"),
        ("joint_position", False, "such as arm.joint_position"),
        ("arm.joint_positon", False, "did you mean 'joint_position'"),
        ("arm.tip_delta", False, "in a state"),
        ("arm.joint_effort", True, "in an action"),
        ("arm.tip_position[deg]", False, r"found \[deg\]"),
        ("arm.gripper[1..1]", True, "both ends"),
        ("arm.gripper[0..1e999]", True, "too large"),
        ("arm.joint_position(a)", True, "only a state's"),
        ("arm.tip_position(a)", False, "only a state's"),
        ("topic.force", True, "a topic cannot be an action"),
        ("topic.force[N]", False, "expected its size"),
        ("unused", True, "the number of unused"),
        ("unused[0]", True, "the number of unused"),
    ],
)
def test_errors_explain_a_wrong_component(text: str, action: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_components(text, action=action)


def test_sizes_follow_the_arm_or_the_form() -> None:
    parts = parse_components(
        "a.joint_position + a.joint_velocity(x, y) + a.fingers + a.gripper + a.tip_rotation[rot6d]"
    )
    assert [part.size(7, 2) for part in parts] == [7, 2, 2, 1, 6]


@given(low=st.floats(-1e300, 1e300), high=st.floats(-1e300, 1e300))
@example(low=0.0, high=1_000_000.0)
@example(low=0.0, high=0.00005)
@example(low=0.1234567, high=-1e22)
def test_a_range_keeps_its_numbers(low: float, high: float) -> None:
    assume(low != high)
    for form in (f"{low!r}..{high!r}", f"{low:+.17e} .. {high:+.17E}"):
        (part,) = parse_components(f"arm.gripper[{form}]", action=True)
        assert part.range == (low, high)
        assert parse_components(f"unused[1] + {part} + unused[2]")[1] == part


def test_a_gripper_of_a_million_counts_is_half_open_at_half_a_million() -> None:
    """Taken as metres, the fingers would open to the end of their range."""
    for form, half in (("0..1000000", 500_000.0), ("0..0.00005", 0.000025), ("0..1e6", 5e5)):
        (part,) = parse_components(f"arm.gripper[{form}]", action=True)
        config = GripperConfig(mode="continuous", open_position=0.04)
        assert Gripper(config, part).command(half, 0.02, 0.1) == (0.02, False)


def test_a_range_has_two_ends() -> None:
    assert [part.range for part in parse_components("a.gripper[1..-1] + a.gripper[m]")] == [(1.0, -1.0), None]
