import math

import numpy as np
import pytest
from demo_arm import ARM, DT, STAMP, action, configure, control, spec_of, state

from vla_ros.config import build
from vla_ros.contract.components import ROTATION_SIZES
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.arm import ArmController
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import RobotController, make_kinematics
from vla_ros.errors import ConfigError
from vla_ros.types import ActionChunk, JointState


@pytest.mark.parametrize("shape", [(6,), (8,), (1, 7), ()])
def test_an_action_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Refused, match="expected 7 finite numbers"):
        RobotController(configure(), PolicySpec(), {"arm": ARM}).command(np.zeros(shape), state(), STAMP, DT)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((0, 7)), r"shape \[0, 7\], expected \[1 to 4, 7\]"),
        (np.zeros((5, 7)), r"shape \[5, 7\]"),
        (np.zeros((4, 6)), r"shape \[4, 6\]"),
        (np.zeros(7), r"shape \[7\]"),
        (np.array([[0.0] * 7, [0, 0, math.nan, 0, 0, 0, 0]]), "number 2 of step 1 is nan"),
        (np.full((1, 7), math.inf), "number 0 of step 0 is inf"),
    ],
)
def test_a_chunk_is_checked_before_its_first_step(actions: np.ndarray, message: str) -> None:
    controller = RobotController(configure(), PolicySpec(horizon=4), {"arm": ARM})
    controller.check(ActionChunk(np.zeros((4, 7)), 0))
    with pytest.raises(Refused, match=message) as refused:
        controller.check(ActionChunk(actions, 0))
    assert refused.value.reason is Reason.ACTION_INVALID


def test_a_joint_state_that_cannot_be_used_is_refused() -> None:
    controller, good = control(), state()
    nan = good.positions.copy()
    nan[3] = math.nan
    outside = good.positions.copy()
    outside[3] = -0.2
    cases: list[tuple[JointState | None, Reason, str]] = [
        (None, Reason.JOINT_STATE_STALE, "no usable joint state"),
        (JointState(("x",), np.zeros(1), 0), Reason.JOINT_STATE_INVALID, "joint_1"),
        (JointState(good.names, good.positions[:3], 0), Reason.JOINT_STATE_INVALID, "9 names and 3 positions"),
        (JointState((*good.names, "joint_1"), np.zeros(10), 0), Reason.JOINT_STATE_INVALID, "joint_1'] twice"),
        (JointState(good.names, nan, 0), Reason.JOINT_STATE_INVALID, "joint 'joint_4' is nan"),
        (JointState(good.names, outside, 0), Reason.JOINT_STATE_INVALID, "joint 'joint_4' is at -0.2, its URDF"),
    ]
    for joints, reason, message in cases:
        with pytest.raises(Refused, match=message) as refused:
            controller.command(action(0.01), joints, STAMP, DT)
        assert refused.value.reason is reason
    for joints, reason, message in cases[:5]:
        with pytest.raises(Refused, match=message) as refused:
            controller.hold(joints)
        assert refused.value.reason is reason


@pytest.mark.parametrize("dt", [0.0, -0.1, math.nan, math.inf])
def test_a_step_without_duration_is_a_clock_jump(dt: float) -> None:
    with pytest.raises(Refused) as refused:
        RobotController(configure(), PolicySpec(), {"arm": ARM}).command(action(), state(), STAMP, dt)
    assert refused.value.reason is Reason.CLOCK_JUMP


@pytest.mark.parametrize("form", ["quaternion_xyzw", "quaternion_wxyz", "rot6d", "rot6d_columns"])
def test_a_rotation_without_a_direction_is_refused(form: str) -> None:
    spec = spec_of(f"arm.tip_position + arm.tip_rotation[{form}]", 3 + ROTATION_SIZES[form])
    parallel = np.ones(ROTATION_SIZES[form]) if form.startswith("rot6d") else np.zeros(4)
    for rotation in (np.zeros(ROTATION_SIZES[form]), parallel):
        with pytest.raises(Refused, match=rf"tip_rotation\[{form}\].*no direction") as refused:
            control(spec.columns()).command(np.concatenate([np.zeros(3), rotation]), state(), STAMP, DT)
        assert refused.value.reason is Reason.ACTION_INVALID


JOINT_SPEC = spec_of("arm.joint_position + arm.gripper", 8)


@pytest.mark.parametrize(
    ("values", "spec", "message"),
    [
        ({}, PolicySpec(), r"robot.urdf: not set, but the policy returns arm.tip_delta; set it, or set"),
        ({}, PolicySpec(dimension=8), r"8 numbers, found arm.tip_delta \(6\)"),
        ({"robot.joint_names": ["a"]}, JOINT_SPEC, r"8 numbers, found arm.joint_position\[rad\] \(1\)"),
        ({}, JOINT_SPEC, r"robot.joint_names: found 0 joints \[\].*7 numbers"),
        (
            {"control.output": "twist_stamped", "robot.joint_names": list("abcdefg")},
            JOINT_SPEC,
            "a twist from joint",
        ),
        ({"robot.joint_names": list("abcdefg"), "robot.home": [0.0]}, JOINT_SPEC, "robot.home: found 1 numbers"),
        (
            {"robot.joint_names": ["a"]},
            spec_of("arm.joint_velocity", 1),
            r"robot.urdf: found no velocity limit for \['a'\]",
        ),
        (
            {"robot.joint_names": ["a"]},
            spec_of("arm.joint_position[-100..100]", 1),
            r"robot.urdf: not set.*\[-100..100\]",
        ),
        ({}, spec_of("arm.tip_position + arm.tip_rotation[rot6d]", 9), "robot.urdf: not set"),
    ],
)
def test_contradictory_options_and_policies_are_refused_at_start(
    values: dict[str, object], spec: PolicySpec, message: str
) -> None:
    config = build(values)
    with pytest.raises(ConfigError, match=message):
        RobotController(config, spec, make_kinematics(config))


def test_a_joint_without_limits_has_neither_range_nor_velocity(tmp_path) -> None:
    path = tmp_path / "wheel.urdf"
    path.write_text(
        '<robot name="wheel"><link name="a"/><link name="b"/><joint name="axle" type="continuous">'
        '<parent link="a"/><child link="b"/><axis xyz="0 0 1"/></joint></robot>'
    )
    config = build({"robot.urdf": str(path)})
    for text, what in (("arm.joint_position[0..1]", "position"), ("arm.joint_velocity[1]", "velocity")):
        with pytest.raises(ConfigError, match=rf"no {what} limit for \['axle'\]"):
            RobotController(config, spec_of(text, 1), make_kinematics(config))


@pytest.mark.parametrize(
    ("values", "spec", "warned"),
    [
        ({}, JOINT_SPEC, True),
        ({"gripper.mode": "none"}, JOINT_SPEC, False),
        ({"robot.gripper_joint_names": ["finger"]}, JOINT_SPEC, False),
        ({}, spec_of("arm.joint_position", 7), False),
    ],
)
def test_a_gripper_that_would_never_close_causes_a_warning(
    values: dict[str, object], spec: PolicySpec, warned: bool
) -> None:
    controller = ArmController(build(values | {"robot.joint_names": list("abcdefg")}), spec.columns())
    assert ("gripper_joint_names is empty" in controller.unused_gripper) == warned
