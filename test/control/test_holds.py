import math

import numpy as np
import pytest
from demo_arm import ARM, DT, POSE, STAMP, action, configure, control, state
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.config import build
from vla_ros.control.arm import ArmController
from vla_ros.control.reasons import Reason, Refused
from vla_ros.types import JointState


def test_a_hold_is_the_measured_position_never_zeros() -> None:
    controller, joints = control(), state(fingers=0.02, stamp=77)
    command = controller.hold(joints)
    np.testing.assert_array_equal(command.positions, joints.positions)
    assert (command.hold, command.stamp, command.duration) == (True, 77, 0.0)


def test_a_hold_keeps_the_grip_and_does_not_creep_with_a_sagging_arm() -> None:
    controller, joints = control(), state(fingers=0.02)
    controller.command(action(gripper=0.0), joints, STAMP, DT)
    controller.sent()
    first = controller.hold(joints)
    assert first.positions[7:].tolist() == [0.0, 0.0], "fingers at 0.02 are pressed on an object"
    sagging = state(joints.positions[:7] + 0.015, fingers=0.02)
    np.testing.assert_array_equal(controller.hold(sagging).positions, first.positions)
    pushed = state(joints.positions[:7] + 0.05, fingers=0.02)
    np.testing.assert_array_equal(controller.hold(pushed).positions[:7], pushed.positions[:7])


def test_after_a_hold_the_arm_starts_from_rest_where_it_is() -> None:
    config = configure(control={"delta_from": "commanded"}, limits={"max_joint_acceleration": 5.0})
    controller = ArmController(config, POSE, ARM)
    for _ in range(5):
        controller.command(action(0.03), state(), STAMP, DT)
        controller.sent()
    elsewhere = state(state().positions[:7] + 0.1)
    controller.hold(elsewhere)
    command = controller.command(action(0.03), elsewhere, STAMP, DT)
    assert np.abs(command.positions[:7] - elsewhere.positions[:7]).max() <= 5.0 * DT * DT + 1e-9


def test_a_hold_without_a_finger_measurement_leaves_it_out_or_refuses() -> None:
    """ros2_control ignores a trajectory or an array that lacks a joint, without telling anybody."""
    joints = JointState(ARM.joint_names, state().positions[:7], 5)
    assert control().hold(joints).names == ARM.joint_names
    for output in ("float64_multi_array", "joint_trajectory"):
        controller = control(control={"output": output})
        with pytest.raises(Refused, match=rf"finger_left.*neither measured nor commanded.*{output}") as refused:
            controller.hold(joints)
        assert refused.value.reason is Reason.JOINT_STATE_INVALID
        controller.command(action(0.01, gripper=0.0), joints, STAMP, DT)
        controller.sent()
        assert controller.hold(joints).positions[7:].tolist() == [0.0, 0.0], "what the fingers were told is known"
        apart = control(control={"output": output}, topics={"gripper": "/gripper"})
        assert apart.hold(joints).names == ARM.joint_names


@settings(max_examples=60, deadline=None)
@given(
    motions=st.lists(st.tuples(*[st.floats(-0.3, 0.3)] * 6), min_size=1, max_size=6),
    delta_from=st.sampled_from(["measured", "commanded"]),
    dt=st.floats(0.02, 0.5),
)
def test_a_hold_on_an_old_measurement_goes_back_one_step_at_most_and_not_faster_than_it_may(
    motions: list[tuple[float, ...]], delta_from: str, dt: float
) -> None:
    """Joint states went silent while the arm moved on: the hold is at the last one."""
    controller, measured = control(control={"delta_from": delta_from}), state()
    for motion in motions:
        try:
            last = controller.command(action(*motion), measured, STAMP, dt)
        except Refused as refused:
            assert refused.reason is Reason.FOLLOWING_ERROR  # noqa: PT017
            break
        controller.sent()
    hold = controller.hold(measured)
    np.testing.assert_array_equal(hold.positions[:7], measured.positions[:7])
    back = np.abs(hold.positions[:7] - last.positions[:7])
    assert np.all(back <= 0.5 + 1e-9), "limits.following_error"
    assert np.all(back <= ARM.velocity_limits * hold.duration + 1e-9), "a trajectory would be too fast"
    assert controller.hold(measured).duration == 0.0, "said again, it is there"


def test_a_twist_stands_still_whatever_is_measured() -> None:
    config = configure(control={"output": "twist_stamped"}, topics={"gripper": "/gripper"})
    controller = ArmController(config, POSE, ARM)
    broken = JointState((ARM.joint_names[0],), np.array([math.nan]), 9)
    for joints in (None, broken):
        held = controller.hold(joints)
        assert held.hold
        assert held.twist is not None
        assert not np.any(held.twist)
        assert held.names == ()


def test_a_twist_command_without_kinematics_has_fingers() -> None:
    values = {"control.output": "twist_stamped", "robot.gripper_joint_names": ["finger_left"]}
    controller = ArmController(build({**values, "topics.gripper": "/gripper", "gripper.max_speed": 0.1}), POSE)
    command = controller.command(action(0.01, gripper=0.0), state(fingers=0.04), STAMP, DT)
    assert command.names == ("finger_left",)
    assert command.positions.tolist() == pytest.approx([0.03])
    controller.sent()
    held = controller.hold(None)
    assert (held.names, held.positions.tolist()) == (("finger_left",), pytest.approx([0.03]))


def test_a_twist_is_the_limited_motion_per_second() -> None:
    limits = {"max_translation_step": 0.02}
    options = configure(control={"output": "twist_stamped"}, robot={"gripper_joint_names": []}, limits=limits)
    controller = ArmController(options, POSE, ARM)
    command = controller.command(action(0.2, 0, 0, 0, 0, 0.1), state(), STAMP, 0.5)
    np.testing.assert_allclose(command.twist[0], [0.04, 0, 0], atol=1e-3)  # 0.02 m in 0.5 s
    np.testing.assert_allclose(command.twist[1], [0, 0, 0.2], atol=1e-3)
    assert command.frame_id == "base_link"
    held = controller.hold(state()).twist
    assert held is not None
    assert not np.any(held)


def test_a_twist_needs_no_kinematics() -> None:
    config = build({"control.output": "twist_stamped", "robot.base_frame": "base", "robot.tip_frame": "tool0"})
    controller = ArmController(config, POSE)
    command = controller.command(action(0.2, 0, 0, 0, 0, 0.1), None, STAMP, 0.5)
    assert (command.names, command.frame_id) == ((), "base")
    np.testing.assert_allclose(command.twist[0], [0.1, 0, 0])
    np.testing.assert_allclose(command.twist[1], [0, 0, 0.2], atol=1e-12)
    assert controller.hold(None).twist is not None
    tip = build({"control.delta_frame": "tip"}, base=config)
    assert ArmController(tip, POSE).command(action(), None, STAMP, DT).frame_id == "tool0"
