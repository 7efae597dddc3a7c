"""State vectors: every quantity and form, and missing, stale and invalid measurements."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vla_ros.config import build
from vla_ros.contract.binding import make_arms
from vla_ros.contract.components import ROTATION_SIZES, parse_components
from vla_ros.contract.spec import StateFeature
from vla_ros.contract.state import Arm, Measured, StateError, StateReader, bind_state
from vla_ros.kinematics.rotations import write_rotation
from vla_ros.types import FloatArray, JointState

NAMES = tuple(f"joint_{number}" for number in range(1, 8))
FINGERS = ("finger_left", "finger_right")
Q = np.array([0.1, 0.438, -0.2, 1.834, 0.3, 0.8696, -0.1])
STAMP = 5_000_000_000
# The driver's order is not the robot's.
JOINTS = JointState(
    (*FINGERS, *NAMES[::-1]),
    np.array([0.01, 0.03, *Q[::-1]]),
    STAMP,
    np.array([0.0, 0.0, *(0.1 * Q[::-1])]),
    np.array([1.0, 1.0, *(10 * Q[::-1])]),
)
FORCE = JointState((), np.arange(6.0), STAMP)


@pytest.fixture(scope="module")
def arms() -> dict[str, Arm]:
    return make_arms(build({"robot.urdf": "demo", "robot.gripper_joint_names": list(FINGERS)}))


def reader(arms: dict[str, Arm], text: str, size: int = 0) -> StateReader:
    return bind_state(StateFeature("s", parse_components(text), size), arms, {"force": "/ft"})


def read(arms: dict[str, Arm], text: str, joints: JointState | None = JOINTS, **more: Any) -> FloatArray:
    return reader(arms, text).read(Measured(joints, {"force": FORCE}), STAMP, 1.0)


def test_every_quantity_and_form(arms: dict[str, Arm]) -> None:
    geometry = arms["arm"].kinematics
    assert geometry is not None
    pose = geometry.forward(Q)
    low, high = geometry.position_low, geometry.position_high
    expected = {
        "arm.joint_position": Q,
        "arm.joint_position(joint_3, joint_1)": Q[[2, 0]],
        "arm.joint_position(finger_right)": [0.03],
        "arm.joint_position[deg]": np.degrees(Q),
        "arm.joint_position[-100..100]": -100 + 200 * (Q - low) / (high - low),
        "arm.joint_velocity": 0.1 * Q,
        "arm.joint_velocity[deg/s]": np.degrees(0.1 * Q),
        "arm.joint_velocity[1]": 0.1 * Q / geometry.velocity_limits,
        "arm.joint_effort": 10 * Q,
        "arm.gripper": [0.5],  # the mean of the fingers: 0.02 of 0.04
        "arm.gripper[1..0]": [0.5],
        "arm.gripper[0..100]": [50.0],
        "arm.gripper[m]": [0.02],
        "arm.fingers": [0.01, 0.03],
        "arm.tip_position": pose.position,
        "topic.force": np.arange(6.0),
        "unused[2]": [0.0, 0.0],
    }
    for form in ROTATION_SIZES:
        expected[f"arm.tip_rotation[{form}]"] = write_rotation(pose.rotation, form)
    for text, numbers in expected.items():
        np.testing.assert_allclose(read(arms, text), numbers, atol=1e-12, err_msg=text)
    whole = read(arms, " + ".join(expected))
    np.testing.assert_allclose(whole, np.concatenate([np.asarray(numbers) for numbers in expected.values()]))
    assert whole.dtype == np.float64


@pytest.mark.parametrize(("left", "expected"), [(0.08, [100.0]), (-0.08, [0.0])])
def test_a_gripper_opening_is_clipped_if_the_component_says_so(
    arms: dict[str, Arm], left: float, expected: list[float]
) -> None:
    joints = replace(JOINTS, positions=np.array([left, left, *Q[::-1]]))
    assert read(arms, "arm.gripper[0..100 clipped]", joints).tolist() == expected
    assert read(arms, "arm.gripper[0..100]", joints).tolist() == [np.sign(left) * 200]


@pytest.mark.parametrize(
    ("text", "joints", "message"),
    [
        ("arm.gripper", None, r"state 's': arm.gripper\[0..1\]: no usable joint state within timeouts.joint_state"),
        ("arm.gripper", replace(JOINTS, stamp=STAMP - 1_200_000_000), "1.2 s older than the frame, allowed 1 s"),
        ("arm.fingers", JointState(NAMES, Q, STAMP), "joint state lacks .'finger_left'"),
        ("arm.joint_velocity", JointState(NAMES, Q, STAMP), "7 joints and 0 velocities"),
        (
            "topic.force + arm.joint_position",
            JointState(NAMES, Q * np.nan, STAMP),
            "joint_position.rad.: number 0 is nan",
        ),
        ("arm.tip_position", JointState(NAMES, Q * np.inf, STAMP), "joint 'joint_1' is not a number"),
        ("topic.force[7]", JOINTS, "found 6 numbers, expected 7"),
    ],
)
def test_missing_stale_and_invalid_components_are_named(
    arms: dict[str, Arm], text: str, joints: JointState | None, message: str
) -> None:
    with pytest.raises(StateError, match=message):
        read(arms, text, joints)


def test_joints_of_the_same_name_belong_to_their_arm() -> None:
    both = {
        f"{arm}.{topic}": f"/{arm}_{topic}" for arm in ("left", "right") for topic in ("joint_states", "command")
    }
    arms = make_arms(build({"robot.urdf": "demo", "robot.arms": ["left", "right"], **both}))
    made = reader(arms, "right.joint_position(joint_1) + left.joint_position(joint_1)")
    measured = {name: JointState(NAMES, np.full(7, q), STAMP) for name, q in (("left", 0.1), ("right", 0.2))}
    assert made.read(Measured(arms=measured), STAMP, 1.0).tolist() == [0.2, 0.1]
    with pytest.raises(StateError, match=r"left.joint_position.* no usable joint state"):
        made.read(Measured(arms={"right": measured["right"]}), STAMP, 1.0)


def test_stale_missing_and_mis_sized_topics_are_named(arms: dict[str, Arm]) -> None:
    force = reader(arms, "topic.force", size=7)
    with pytest.raises(StateError, match=r"topic\.force: no message yet"):
        force.read(Measured(JOINTS), STAMP, 1.0)
    with pytest.raises(StateError, match="found 6 numbers, the policy expects 7"):
        force.read(Measured(JOINTS, {"force": FORCE}), STAMP, 1.0)
    with pytest.raises(StateError, match=r"topic\.force: 2 s older"):
        force.read(Measured(JOINTS, {"force": FORCE}), STAMP + 2_000_000_000, 1.0)
    assert len(reader(arms, "topic.force").read(Measured(None, {"force": FORCE}), STAMP + 2_000_000_000, 0.0)) == 6
