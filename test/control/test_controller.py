"""The commands that actions become: meaning of deltas, limits, units, grippers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, DT, HOME, POSE, STAMP, action, configure, control, spec_of, state

from vla_ros.contract.components import ROTATION_SIZES, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.arm import ArmController
from vla_ros.control.reasons import Reason, Refused
from vla_ros.kinematics.rotations import euler_xyz_matrix, rotation_vector_matrix, write_rotation
from vla_ros.kinematics.solver import Kinematics
from vla_ros.kinematics.urdf import resolve
from vla_ros.types import JointState

JOINTS = PolicySpec(action=parse_components("arm.joint_position + arm.gripper", action=True), dimension=8).columns()


NEAR = HOME + 0.02


def moved(joints: JointState, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    before, after = ARM.forward(joints.positions[:7]), ARM.forward(positions[:7])
    return after.position - before.position, after.rotation @ before.rotation.T


def test_a_delta_in_the_base_frame_moves_the_tip_by_it() -> None:
    controller, joints = control(), state()
    command = controller.command(action(0.02, 0.01, -0.01, 0.05, -0.02, 0.1), joints, STAMP, DT)
    translation, turn = moved(joints, command.positions)
    np.testing.assert_allclose(translation, [0.02, 0.01, -0.01], atol=1e-4)
    np.testing.assert_allclose(turn, euler_xyz_matrix(np.array([0.05, -0.02, 0.1])), atol=1e-3)
    assert command.names == (*ARM.joint_names, "finger_left", "finger_right")
    assert (command.stamp, command.hold, command.duration) == (STAMP, False, DT)
    assert controller.counters == {}


def test_a_delta_in_the_tips_frame_is_turned_with_the_tip() -> None:
    controller = control(control={"delta_frame": "tip"})
    joints = state()
    command = controller.command(action(0.0, 0.0, 0.02, 0.0, 0.0, 0.1), joints, STAMP, DT)
    start = ARM.forward(joints.positions[:7]).rotation
    translation, turn = moved(joints, command.positions)
    np.testing.assert_allclose(translation, start @ [0, 0, 0.02], atol=1e-4)
    np.testing.assert_allclose(turn, start @ rotation_vector_matrix(np.array([0, 0, 0.1])) @ start.T, atol=1e-3)


def test_scales_and_form_of_rotation_follow_the_options() -> None:
    options = {"rotation": "rotation_vector", "translation_scale": 0.05, "rotation_scale": 0.5}
    controller, joints = control(control=options), state()
    command = controller.command(action(0.4, 0.0, 0.0, 0.2, 0.2, 0.1), joints, STAMP, DT)
    translation, turn = moved(joints, command.positions)
    np.testing.assert_allclose(translation, [0.02, 0, 0], atol=1e-4)
    np.testing.assert_allclose(turn, rotation_vector_matrix(np.array([0.1, 0.1, 0.05])), atol=1e-3)


def test_no_motion_leaves_every_joint_exactly_where_it_was_measured() -> None:
    controller = control(robot={"home": [0.1] * 7})
    joints = state()
    command = controller.command(action(), joints, STAMP, DT)
    np.testing.assert_array_equal(command.positions[:7], joints.positions[:7])


@pytest.mark.parametrize(("delta_from", "expected"), [("measured", 0.01), ("commanded", 0.03)])
def test_deltas_of_an_arm_that_does_not_follow(delta_from: str, expected: float) -> None:
    """Relative to the measurement, deltas do not add up; relative to the command they do, until the arm is held."""
    controller, joints = control(control={"delta_from": delta_from}), state()
    for _ in range(3):
        command = controller.command(action(0.01), joints, STAMP, DT)
        controller.sent()
    translation, _ = moved(joints, command.positions)
    assert translation[0] == pytest.approx(expected, abs=3e-4)
    refused = None
    for _ in range(60):
        try:
            command = controller.command(action(0.01), joints, STAMP, DT)
        except Refused as error:
            refused = error
            break
        controller.sent()
        assert np.abs(command.positions[:7] - joints.positions[:7]).max() <= 0.5 + 1e-9
    assert (refused is not None) == (delta_from == "commanded")
    if refused is not None:
        assert refused.reason is Reason.FOLLOWING_ERROR
        assert re.search(
            r"is at .* commanded to be at .* 0.5 apart, allowed 0.5 \(limits.following_error\)", str(refused)
        )


def test_a_command_that_was_not_sent_leaves_no_trace() -> None:
    controller, joints = (control(control={"delta_from": "commanded"}), state(fingers=0.04))
    for _ in range(3):
        command = controller.command(action(0.01, gripper=0.0), joints, STAMP, DT)
    translation, _ = moved(joints, command.positions)
    assert translation[0] == pytest.approx(0.01, abs=1e-4)
    assert controller.hold(joints).positions[-1] == 0.04, "fingers were never told to close"


def test_near_joint_positions_are_unchanged_and_far_ones_limited() -> None:
    wide = configure(limits={"max_translation_step": 1.0, "max_rotation_step": 3.0})
    controller, joints = ArmController(wide, JOINTS, ARM), state()
    near = joints.positions[:7] + 0.1
    command = controller.command(np.append(near, 1.0), joints, STAMP, DT)
    np.testing.assert_allclose(command.positions[:7], near)
    assert controller.counters == {}
    far = joints.positions[:7] + np.array([1.0, 0, 0, 0, 0, 0, 0.5])
    command = controller.command(np.append(far, 1.0), joints, STAMP, DT)
    np.testing.assert_allclose(command.positions[:7] - joints.positions[:7], [0.2, 0, 0, 0, 0, 0, 0.1], atol=1e-9)
    assert set(controller.counters) == {"limit_velocity", "limit_jump"}


def test_joints_are_found_by_name_in_any_order() -> None:
    controller, joints = control(), state()
    order = np.random.default_rng(0).permutation(9)
    shuffled = JointState(tuple(joints.names[i] for i in order), joints.positions[order], joints.stamp)
    expected = controller.command(action(0.01), joints, STAMP, DT)
    np.testing.assert_array_equal(
        controller.command(action(0.01), shuffled, STAMP, DT).positions, expected.positions
    )


@pytest.mark.parametrize(("mode", "names"), [("none", 7), ("binary", 9)])
def test_the_gripper_mode_decides_whether_fingers_are_commanded(mode: str, names: int) -> None:
    controller = control(gripper={"mode": mode})
    assert len(controller.command(action(), state(), STAMP, DT).positions) == names
    assert len(controller.hold(state()).positions) == names


def test_fingers_move_no_faster_than_the_option() -> None:
    controller = control(gripper={"max_speed": 0.1})
    found = []
    for _ in range(5):
        found.append(controller.command(action(gripper=0.0), state(), STAMP, DT).positions[-1])
        controller.sent()
    np.testing.assert_allclose(found, [0.03, 0.02, 0.01, 0, 0], atol=1e-12)
    assert controller.counters == {"gripper_speed": 3}


def closing(controller: ArmController, dt: float) -> list[float]:
    """Finger positions of commands that close an open gripper."""
    found = []
    for _ in range(4):
        found.append(float(controller.command(action(gripper=0.0), state(), STAMP, dt).positions[-1]))
        controller.sent()
    return found


def test_fingers_move_no_faster_than_the_urdf_allows_if_no_option_says_otherwise() -> None:
    np.testing.assert_allclose(closing(control(), 0.02), [0.03, 0.02, 0.01, 0], atol=1e-12)  # 0.5 m/s
    faster = {"max_speed": 1.0}
    np.testing.assert_allclose(closing(control(gripper=faster), 0.02), [0.02, 0, 0, 0], atol=1e-12)
    goals = {"output": "gripper_command"}
    topics = {"gripper": "/gripper"}
    assert closing(control(gripper=goals, topics=topics), 0.02) == [0.0] * 4, "a goal is a final position"


@pytest.mark.parametrize(
    "limits", [{"velocity_scale": 0.0}, {"velocity_scale": 0.0, "max_joint_acceleration": 5.0}]
)
def test_no_velocity_limit_times_nothing_is_no_motion(limits: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "arm.urdf"
    path.write_text(re.sub('velocity="[^"]+"', 'velocity="0"', resolve("demo").read_text()))
    controller = ArmController(configure(limits=limits), POSE, Kinematics.from_urdf(str(path)))
    for _ in range(3):
        command = controller.command(action(0.02), state(), STAMP, DT)
        controller.sent()
        np.testing.assert_array_equal(command.positions[:7], HOME)


@pytest.mark.parametrize(("assumed", "reach"), [([12.0, 2.0], 0.024), ([1.0, 1.0], 0.002)])
def test_without_a_velocity_limit_anywhere_the_assumed_one_holds(assumed: list[float], reach: float) -> None:
    """Without a URDF: for fingers and for the arm's joints."""
    names = {"urdf": "", "joint_names": list(ARM.joint_names)}
    limits = {"assumed_joint_velocity": assumed, "max_joint_step": 3.0}
    controller = ArmController(configure(robot=names, limits=limits), JOINTS)
    far = np.array([*(HOME + 1.0), 0.0])
    command = controller.command(far, state(), STAMP, 0.002)
    np.testing.assert_allclose(command.positions[:7] - HOME, reach, atol=1e-9)
    assert command.positions[-1] == pytest.approx(0.04 - min(reach, 0.04))
    assert controller.joint_speeds == dict.fromkeys(ARM.joint_names, assumed[0])
    own = configure(robot=names, limits={**limits, "max_joint_velocity": 0.5})
    controller.configure(own)
    assert controller.joint_speeds == dict.fromkeys(ARM.joint_names, 0.5)
    assert set(control(limits=limits).joint_speeds.values()) == {3.0, 4.0}, "the URDF's, where it states them"


LIMITED = [
    ({"max_translation_step": 0.01}, JOINTS, np.array([0.1, 0.5, 0, 1.2, 0, 0.8, 0, 1]), "limit_translation"),
    ({"max_rotation_step": 0.05}, JOINTS, np.array([0, 0.5, 0, 1.2, 0, 0.8, 0.1, 1]), "limit_rotation"),
    ({"max_translation_step": 0.01}, POSE, action(0.02), "limit_translation"),
    ({"max_rotation_step": 0.05}, POSE, action(0, 0, 0, 0, 0, 0.1), "limit_rotation"),
    (
        {"workspace_low": [0.0, 0.0, 0.0], "workspace_high": [1.0, 1.0, 1.0]},
        POSE,
        action(0, -0.02),
        "limit_workspace",
    ),
    ({"velocity_scale": 0.01}, POSE, action(0.02), "limit_velocity"),
    ({"max_joint_step": 0.001}, POSE, action(0.02), "limit_jump"),
    ({"max_joint_acceleration": 0.1}, POSE, action(0.02), "limit_acceleration"),
    ({}, JOINTS, np.array([0, 0.5, 0, 9.0, 0, 0.8, 0, 1.0]), "limit_position"),
    (
        {"workspace_low": [-1.0, -0.01, 0.0], "workspace_high": [1.0, 0.01, 2.0]},
        JOINTS,
        np.array([0.1, 0.5, 0, 1.2, 0, 0.8, 0, 1.0]),
        "limit_workspace",
    ),
]


@pytest.mark.parametrize(("limits", "spec", "wanted", "name"), LIMITED, ids=[f"{case[3]}" for case in LIMITED])
def test_each_limit_clamps_and_counts_or_stops_as_the_option_says(
    limits: dict[str, object], spec: PolicySpec, wanted: np.ndarray, name: str
) -> None:
    clamping = control(spec, limits=limits)
    clamping.command(wanted, state(), STAMP, DT)
    assert clamping.counters[name] == 1
    stopping = control(spec, limits={**limits, "on_violation": "stop"})
    with pytest.raises(Refused) as refused:
        stopping.command(wanted, state(), STAMP, DT)
    assert refused.value.reason.value == name
    assert refused.value.reason.level.value == "stop"


@pytest.mark.parametrize(
    ("motion", "numbers", "expected"),
    [
        ("joint_position[deg]", np.rad2deg(NEAR), NEAR),
        ("joint_position[-100..100]", None, NEAR),
        ("joint_delta[rad]", np.full(7, 0.01), HOME + 0.01),
        ("joint_delta[deg]", np.full(7, 0.5), HOME + np.deg2rad(0.5)),
        ("joint_velocity[rad/s]", np.full(7, 0.1), HOME + 0.01),
        ("joint_velocity[deg/s]", np.full(7, 5.0), HOME + np.deg2rad(0.5)),
        ("joint_velocity[1]", np.full(7, 0.05), None),
    ],
)
def test_joint_quantities_in_every_unit(motion: str, numbers: Any, expected: Any) -> None:
    if numbers is None:  # from the lowest to the highest position of each joint
        numbers = -100 + 200 * (NEAR - ARM.position_low) / (ARM.position_high - ARM.position_low)
    if expected is None:
        expected = HOME + 0.05 * ARM.velocity_limits * DT
    controller = control(spec_of(f"arm.{motion}", 7).columns(), gripper={"mode": "none"})
    command = controller.command(np.asarray(numbers), state(HOME), STAMP, DT)
    np.testing.assert_allclose(command.positions, expected, atol=1e-9)
    assert controller.counters == {}


@pytest.mark.parametrize("form", ROTATION_SIZES)
def test_an_absolute_pose_is_reached_in_every_form_of_its_rotation(form: str) -> None:
    wanted = ARM.forward(NEAR)
    spec = spec_of(f"arm.gripper + arm.tip_rotation[{form}] + arm.tip_position", 4 + ROTATION_SIZES[form])
    limits = {"max_translation_step": 0.01, "max_rotation_step": 0.05}
    controller, q = control(spec.columns(), limits=limits), HOME
    scale = 3.0 if form.startswith(("rot6d", "quaternion")) else 1.0  # what has a direction may have any length
    numbers = np.concatenate([[1.0], scale * write_rotation(wanted.rotation, form), wanted.position])
    for _ in range(30):
        before = ARM.forward(q)
        q = controller.command(numbers, state(q), STAMP, DT).positions[:7]
        assert math.dist(ARM.forward(q).position, before.position) <= 0.01 * 1.01 + 1e-4
    reached = ARM.forward(q)
    np.testing.assert_allclose(reached.position, wanted.position, atol=1e-4)
    np.testing.assert_allclose(reached.rotation, wanted.rotation, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "closed", "half"), [("", 0.0, 0.5), ("1..0", 1.0, 0.5), ("-1..1", -1.0, 0.0), ("m", 0.0, 0.02)]
)
def test_a_gripper_means_what_its_part_says(form: str, closed: float, half: float) -> None:
    spec = spec_of("arm.gripper" + (f"[{form}]" if form else "") + " + arm.joint_delta", 8)
    controller = control(spec.columns(), gripper={"mode": "continuous"})
    for number, expected in ((closed, 0.0), (half, 0.02)):
        command = controller.command(np.array([number, *[0.0] * 7]), state(), STAMP, DT)
        np.testing.assert_allclose(command.positions[7:], [expected] * 2, atol=1e-12)


def test_a_joint_velocity_stays_within_limits_until_it_expires() -> None:
    control = {"output": "joint_velocity", "rate_hz": 10.0}
    robot = {"gripper_joint_names": []}
    config = configure(control=control, robot=robot, timeouts={"velocity": 0.3})
    controller = ArmController(config, spec_of("arm.joint_velocity[rad/s]", 7).columns(), ARM)
    q = HOME.copy()
    q[3] = ARM.position_high[3] - 0.03
    command = controller.command(np.array([0, 0, 0, 1.0, 0, 0, 0]), state(q), STAMP, DT)
    assert command.velocities == pytest.approx(dict(zip(ARM.joint_names, [0, 0, 0, 0.1, 0, 0, 0], strict=True)))
    assert controller.counters == {"limit_position": 1}
    held = controller.hold(None)
    assert held.velocities == dict.fromkeys(ARM.joint_names, 0.0)
    assert held.hold
