"""From actions to commands: what a delta means, what is refused, what is clamped, what a hold is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_ros.config import Config, build
from vla_ros.control.controller import Controller
from vla_ros.control.fit import unused_gripper
from vla_ros.control.kinematics import Kinematics
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.transforms import euler_xyz_matrix, rotation_angle, rotation_vector_matrix
from vla_ros.errors import ConfigError
from vla_ros.types import ActionChunk, ActionSpec, ControlMode, JointState

Configure = Callable[..., Config]
State = Callable[..., JointState]

POSE = ActionSpec()
JOINTS = ActionSpec(dimension=8, gripper_index=7, control_mode=ControlMode.JOINT_POSITION)
JOINT_DELTAS = ActionSpec(dimension=8, gripper_index=7, control_mode=ControlMode.JOINT_DELTA)
STAMP, DT = 123_456_789, 0.1


def action(*motion: float, gripper: float = 1.0) -> np.ndarray:
    return np.array([*motion, *[0.0] * (6 - len(motion)), gripper])


def moved(arm: Kinematics, joints: JointState, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Translation [3] and rotation [3, 3] of the tip in base axes."""
    before, after = arm.forward(joints.positions[:7]), arm.forward(positions[:7])
    return after.position - before.position, after.rotation @ before.rotation.T


def test_a_delta_in_the_base_frame_moves_the_tip_by_it(arm: Kinematics, configure: Configure, state: State) -> None:
    controller, joints = Controller(configure(), POSE, arm), state()
    command = controller.command(action(0.02, 0.01, -0.01, 0.05, -0.02, 0.1), joints, STAMP, DT)
    translation, turn = moved(arm, joints, command.positions)
    np.testing.assert_allclose(translation, [0.02, 0.01, -0.01], atol=1e-4)
    np.testing.assert_allclose(turn, euler_xyz_matrix(np.array([0.05, -0.02, 0.1])), atol=1e-3)
    assert command.names == (*arm.joint_names, "finger_left", "finger_right")
    assert (command.stamp, command.hold, command.duration) == (STAMP, False, DT)
    assert controller.counters == {}


def test_a_delta_in_the_tips_frame_is_turned_with_the_tip(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    controller = Controller(configure(control={"delta_frame": "tip"}), POSE, arm)
    joints = state()
    command = controller.command(action(0.0, 0.0, 0.02, 0.0, 0.0, 0.1), joints, STAMP, DT)
    start = arm.forward(joints.positions[:7]).rotation
    translation, turn = moved(arm, joints, command.positions)
    np.testing.assert_allclose(translation, start @ [0, 0, 0.02], atol=1e-4)
    np.testing.assert_allclose(turn, start @ rotation_vector_matrix(np.array([0, 0, 0.1])) @ start.T, atol=1e-3)


def test_scales_and_the_kind_of_rotation_are_the_options(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    options = {"rotation": "rotation_vector", "translation_scale": 0.05, "rotation_scale": 0.5}
    controller, joints = Controller(configure(control=options), POSE, arm), state()
    command = controller.command(action(0.4, 0.0, 0.0, 0.2, 0.2, 0.1), joints, STAMP, DT)
    translation, turn = moved(arm, joints, command.positions)
    np.testing.assert_allclose(translation, [0.02, 0, 0], atol=1e-4)
    np.testing.assert_allclose(turn, rotation_vector_matrix(np.array([0.1, 0.1, 0.05])), atol=1e-3)


def test_no_motion_leaves_every_joint_exactly_where_it_was_measured(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    controller = Controller(configure(robot={"home": [0.1] * 7}), POSE, arm)
    joints = state()
    command = controller.command(action(), joints, STAMP, DT)
    np.testing.assert_array_equal(command.positions[:7], joints.positions[:7])


def test_a_delta_counts_from_the_state_at_the_frames_stamp_where_it_is_known(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    controller = Controller(configure(), POSE, arm)
    then = state()
    now = state(then.positions[:7] + 0.01)
    command = controller.command(action(0.02), now, STAMP, DT, reference=then)
    translation, _ = moved(arm, then, command.positions)
    np.testing.assert_allclose(translation, [0.02, 0, 0], atol=2e-4)


@pytest.mark.parametrize(("delta_from", "expected"), [("measured", 0.01), ("commanded", 0.03)])
def test_deltas_of_an_arm_that_does_not_follow(
    arm: Kinematics, configure: Configure, state: State, delta_from: str, expected: float
) -> None:
    """Counted from the measurement they do not add up; counted from the command they do, within limits."""
    controller, joints = Controller(configure(control={"delta_from": delta_from}), POSE, arm), state()
    for _ in range(3):
        command = controller.command(action(0.01), joints, STAMP, DT)
        controller.executed()
    translation, _ = moved(arm, joints, command.positions)
    assert translation[0] == pytest.approx(expected, abs=3e-4)
    for _ in range(60):
        command = controller.command(action(0.01), joints, STAMP, DT)
        controller.executed()
    assert np.abs(command.positions[:7] - joints.positions[:7]).max() <= 0.2 + 1e-9


def test_a_command_that_was_not_sent_leaves_no_trace(arm: Kinematics, configure: Configure, state: State) -> None:
    controller, joints = Controller(configure(control={"delta_from": "commanded"}), POSE, arm), state(fingers=0.04)
    for _ in range(3):
        command = controller.command(action(0.01, gripper=0.0), joints, STAMP, DT)
    translation, _ = moved(arm, joints, command.positions)
    assert translation[0] == pytest.approx(0.01, abs=1e-4)
    assert controller.hold(joints).positions[-1] == 0.04, "fingers were never told to close"


def test_joint_positions_are_taken_as_they_are_and_far_ones_step_by_step(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    controller, joints = Controller(configure(), JOINTS, arm), state()
    near = joints.positions[:7] + 0.1
    command = controller.command(np.append(near, 1.0), joints, STAMP, DT)
    np.testing.assert_allclose(command.positions[:7], near)
    assert controller.counters == {}
    far = joints.positions[:7] + np.array([1.0, 0, 0, 0, 0, 0, 0.5])
    command = controller.command(np.append(far, 1.0), joints, STAMP, DT)
    np.testing.assert_allclose(command.positions[:7] - joints.positions[:7], [0.2, 0, 0, 0, 0, 0, 0.1], atol=1e-9)
    assert set(controller.counters) == {"limit_velocity", "limit_jump"}


def test_joint_deltas_add_to_the_measured_positions(arm: Kinematics, configure: Configure, state: State) -> None:
    controller, joints = Controller(configure(), JOINT_DELTAS, arm), state()
    command = controller.command(np.array([0.01, 0, 0, -0.02, 0, 0, 0, 0.0]), joints, STAMP, DT)
    np.testing.assert_allclose(command.positions[:7] - joints.positions[:7], [0.01, 0, 0, -0.02, 0, 0, 0])
    assert command.positions[7:].tolist() == [0.0, 0.0]


def test_joints_are_found_by_name_in_any_order(arm: Kinematics, configure: Configure, state: State) -> None:
    controller, joints = Controller(configure(), POSE, arm), state()
    order = np.random.default_rng(0).permutation(9)
    shuffled = JointState(tuple(joints.names[i] for i in order), joints.positions[order], joints.stamp)
    expected = controller.command(action(0.01), joints, STAMP, DT)
    np.testing.assert_array_equal(
        controller.command(action(0.01), shuffled, STAMP, DT).positions, expected.positions
    )


@pytest.mark.parametrize(("mode", "names"), [("none", 7), ("binary", 9)])
def test_fingers_are_commanded_where_the_options_say(
    arm: Kinematics, configure: Configure, state: State, mode: str, names: int
) -> None:
    controller = Controller(configure(gripper={"mode": mode}), POSE, arm)
    assert len(controller.command(action(), state(), STAMP, DT).positions) == names
    assert len(controller.hold(state()).positions) == names


def test_fingers_move_no_faster_than_the_option(arm: Kinematics, configure: Configure, state: State) -> None:
    controller = Controller(configure(gripper={"max_speed": 0.1}), POSE, arm)
    found = []
    for _ in range(5):
        found.append(controller.command(action(gripper=0.0), state(), STAMP, DT).positions[-1])
        controller.executed()
    np.testing.assert_allclose(found, [0.03, 0.02, 0.01, 0, 0], atol=1e-12)
    assert controller.counters == {"gripper_speed": 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", range(7))
def test_an_action_that_is_no_number_is_refused(
    arm: Kinematics, configure: Configure, state: State, bad: float, index: int
) -> None:
    controller, broken = Controller(configure(), POSE, arm), action(0.01)
    broken[index] = bad
    with pytest.raises(Refused) as refused:
        controller.command(broken, state(), STAMP, DT)
    assert refused.value.reason is Reason.ACTION_INVALID
    assert controller.command(action(0.01), state(), STAMP, DT).positions.shape == (9,), "the next good one works"


@pytest.mark.parametrize("shape", [(6,), (8,), (1, 7), ()])
def test_an_action_of_another_shape_is_refused(
    arm: Kinematics, configure: Configure, state: State, shape: tuple[int, ...]
) -> None:
    with pytest.raises(Refused, match="expected 7 finite numbers"):
        Controller(configure(), POSE, arm).command(np.zeros(shape), state(), STAMP, DT)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((0, 7)), r"shape \[0, 7\], expected \[1 to 4, 7\]"),
        (np.zeros((5, 7)), r"shape \[5, 7\]"),
        (np.zeros((4, 6)), r"shape \[4, 6\]"),
        (np.zeros(7), r"shape \[7\]"),
        (np.array([[0.0] * 7, [0, 0, math.nan, 0, 0, 0, 0]]), "number 2 of step 1 is nan"),
    ],
)
def test_a_chunk_is_checked_before_its_first_step(
    arm: Kinematics, configure: Configure, actions: np.ndarray, message: str
) -> None:
    controller = Controller(configure(), ActionSpec(horizon=4), arm)
    controller.check(ActionChunk(np.zeros((4, 7)), 0))
    with pytest.raises(Refused, match=message) as refused:
        controller.check(ActionChunk(actions, 0))
    assert refused.value.reason is Reason.ACTION_INVALID


def test_a_joint_state_that_cannot_be_used_is_refused(arm: Kinematics, configure: Configure, state: State) -> None:
    controller, good = Controller(configure(), POSE, arm), state()
    nan = good.positions.copy()
    nan[3] = math.nan
    outside = good.positions.copy()
    outside[3] = -0.2
    cases: list[tuple[JointState | None, Reason, str]] = [
        (None, Reason.JOINT_STATE_STALE, "no joint state"),
        (JointState(("x",), np.zeros(1), 0), Reason.JOINT_STATE_INVALID, "joint_1"),
        (JointState(good.names, good.positions[:3], 0), Reason.JOINT_STATE_INVALID, "9 names and 3 positions"),
        (JointState(good.names, nan, 0), Reason.JOINT_STATE_INVALID, "joint 'joint_4' is nan"),
        (JointState(good.names, outside, 0), Reason.JOINT_STATE_INVALID, "joint 'joint_4' is at -0.2, its URDF"),
    ]
    for joints, reason, message in cases:
        with pytest.raises(Refused, match=message) as refused:
            controller.command(action(0.01), joints, STAMP, DT)
        assert refused.value.reason is reason
    for joints, reason, message in cases[:4]:
        with pytest.raises(Refused, match=message) as refused:
            controller.hold(joints)
        assert refused.value.reason is reason


@pytest.mark.parametrize("dt", [0.0, -0.1, math.nan, math.inf])
def test_a_step_without_time_is_a_clock_that_jumped(
    arm: Kinematics, configure: Configure, state: State, dt: float
) -> None:
    with pytest.raises(Refused) as refused:
        Controller(configure(), POSE, arm).command(action(), state(), STAMP, dt)
    assert refused.value.reason is Reason.CLOCK_JUMP


LIMITED = [
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
    arm: Kinematics,
    configure: Configure,
    state: State,
    limits: dict[str, object],
    spec: ActionSpec,
    wanted: np.ndarray,
    name: str,
) -> None:
    clamping = Controller(configure(limits=limits), spec, arm)
    clamping.command(wanted, state(), STAMP, DT)
    assert clamping.counters[name] == 1
    stopping = Controller(configure(limits={**limits, "on_violation": "stop"}), spec, arm)
    with pytest.raises(Refused) as refused:
        stopping.command(wanted, state(), STAMP, DT)
    assert refused.value.reason.value == name
    assert refused.value.reason.level.value == "stop"


def test_a_hold_is_the_measured_position_never_zeros(arm: Kinematics, configure: Configure, state: State) -> None:
    controller, joints = Controller(configure(), POSE, arm), state(fingers=0.02, stamp=77)
    command = controller.hold(joints)
    np.testing.assert_array_equal(command.positions, joints.positions)
    assert (command.hold, command.stamp, command.duration) == (True, 77, 0.0)


def test_a_hold_keeps_the_grip_and_does_not_creep_with_a_sagging_arm(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    controller, joints = Controller(configure(), POSE, arm), state(fingers=0.02)
    controller.command(action(gripper=0.0), joints, STAMP, DT)
    controller.executed()
    first = controller.hold(joints)
    assert first.positions[7:].tolist() == [0.0, 0.0], "fingers at 0.02 are pressed on an object"
    sagging = state(joints.positions[:7] + 0.015, fingers=0.02)
    np.testing.assert_array_equal(controller.hold(sagging).positions, first.positions)
    pushed = state(joints.positions[:7] + 0.05, fingers=0.02)
    np.testing.assert_array_equal(controller.hold(pushed).positions[:7], pushed.positions[:7])


def test_after_a_hold_the_arm_starts_from_rest_where_it_is(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    config = configure(control={"delta_from": "commanded"}, limits={"max_joint_acceleration": 5.0})
    controller = Controller(config, POSE, arm)
    for _ in range(5):
        controller.command(action(0.03), state(), STAMP, DT)
        controller.executed()
    elsewhere = state(state().positions[:7] + 0.1)
    controller.hold(elsewhere)
    command = controller.command(action(0.03), elsewhere, STAMP, DT)
    assert np.abs(command.positions[:7] - elsewhere.positions[:7]).max() <= 5.0 * DT * DT + 1e-9


def test_a_hold_without_a_finger_measurement_leaves_it_out_or_refuses(
    arm: Kinematics, configure: Configure, state: State
) -> None:
    joints = JointState(arm.joint_names, state().positions[:7], 5)
    assert Controller(configure(), POSE, arm).hold(joints).names == arm.joint_names
    with pytest.raises(Refused, match="finger_left"):
        Controller(configure(control={"output": "float64_multi_array"}), POSE, arm).hold(joints)


def test_a_twist_is_the_limited_motion_per_second(arm: Kinematics, configure: Configure, state: State) -> None:
    limits = {"max_translation_step": 0.02}
    options = configure(control={"output": "twist_stamped"}, robot={"gripper_joint_names": []}, limits=limits)
    controller = Controller(options, POSE, arm)
    command = controller.command(action(0.2, 0, 0, 0, 0, 0.1), state(), STAMP, 0.5)
    assert command.twist is not None
    np.testing.assert_allclose(command.twist[0], [0.04, 0, 0], atol=1e-3)  # 0.02 m in 0.5 s
    np.testing.assert_allclose(command.twist[1], [0, 0, 0.2], atol=1e-3)
    assert command.frame_id == "base_link"
    held = controller.hold(state()).twist
    assert held is not None
    assert not np.any(held)


def test_a_servo_can_do_the_kinematics(state: State) -> None:
    config = build({"control.output": "twist_stamped", "robot.base_frame": "base", "robot.tip_frame": "tool0"})
    controller = Controller(config, POSE)
    command = controller.command(action(0.2, 0, 0, 0, 0, 0.1), None, STAMP, 0.5)
    assert (command.names, command.frame_id) == ((), "base")
    assert command.twist is not None
    np.testing.assert_allclose(command.twist[0], [0.1, 0, 0])
    np.testing.assert_allclose(command.twist[1], [0, 0, 0.2], atol=1e-12)
    assert controller.hold(None).twist is not None
    tip = build({"control.delta_frame": "tip"}, base=config)
    assert Controller(tip, POSE).command(action(), None, STAMP, DT).frame_id == "tool0"


def test_live_options_apply_to_the_next_command(arm: Kinematics, configure: Configure, state: State) -> None:
    controller = Controller(configure(), POSE, arm)
    controller.configure(configure(limits={"max_translation_step": 0.001}))
    translation, _ = moved(arm, state(), controller.command(action(0.02), state(), STAMP, DT).positions)
    assert np.linalg.norm(translation) <= 0.0011


@pytest.mark.parametrize(
    ("values", "spec", "message"),
    [
        ({}, POSE, r"robot.urdf: found no value.*end-effector deltas"),
        ({}, ActionSpec(dimension=8), "7 numbers besides the gripper, expected 6"),
        ({"robot.joint_names": ["a"]}, JOINTS, r"robot.joint_names: found 1 joints \['a'\].*7 numbers"),
        (
            {
                "control.output": "twist_stamped",
                "limits.workspace_low": [0.0] * 3,
                "limits.workspace_high": [1.0] * 3,
            },
            POSE,
            "workspace_low needs it",
        ),
        ({"control.output": "twist_stamped", "robot.joint_names": list("abcdefg")}, JOINTS, "a twist from joint"),
        ({"robot.joint_names": list("abcdefg"), "robot.home": [0.0]}, JOINTS, "robot.home: found 1 numbers"),
    ],
)
def test_what_does_not_belong_together_is_refused_at_start(
    values: dict[str, object], spec: ActionSpec, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Controller(build(values), spec)


@pytest.mark.parametrize(
    ("values", "spec", "warned"),
    [
        ({}, POSE, True),
        ({"gripper.mode": "none"}, POSE, False),
        ({"robot.gripper_joint_names": ["finger"]}, POSE, False),
        ({}, ActionSpec(dimension=6, gripper_index=None), False),
    ],
)
def test_a_gripper_that_would_never_close_is_said(
    values: dict[str, object], spec: ActionSpec, warned: bool
) -> None:
    assert ("gripper_joint_names is empty" in unused_gripper(build(values), spec)) == warned


wild = st.one_of(
    st.floats(-0.1, 0.1), st.floats(-1e300, 1e300), st.just(math.nan), st.just(math.inf), st.just(-math.inf)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.tuples(*[wild] * 7), min_size=1, max_size=4),
    start=st.tuples(*[st.floats(0.0, 1.0)] * 7),
    follow=st.floats(0.0, 1.0),
    dt=st.floats(0.001, 1.0),
    delta_from=st.sampled_from(["measured", "commanded"]),
    delta_frame=st.sampled_from(["base", "tip"]),
    rotation=st.sampled_from(["euler_xyz", "rotation_vector"]),
    boxed=st.booleans(),
    acceleration=st.sampled_from([0.0, 2.0]),
)
def test_whatever_a_policy_says_no_command_is_outside_any_limit(
    arm: Kinematics,
    configure: Configure,
    state: State,
    actions: list[tuple[float, ...]],
    start: tuple[float, ...],
    follow: float,
    dt: float,
    delta_from: str,
    delta_frame: str,
    rotation: str,
    boxed: bool,
    acceleration: float,
) -> None:
    margin, step, speed = 0.02, 0.15, 0.5
    limits: dict[str, object] = {
        "joint_margin": margin,
        "max_joint_step": step,
        "velocity_scale": speed,
        "max_joint_acceleration": acceleration,
        "max_translation_step": 0.04,
        "max_rotation_step": 0.2,
    }
    if boxed:
        limits |= {"workspace_low": [0.2, -0.3, 0.05], "workspace_high": [0.8, 0.3, 0.9]}
    control = {"delta_from": delta_from, "delta_frame": delta_frame, "rotation": rotation}
    controller = Controller(configure(limits=limits, control=control), POSE, arm)
    low, high = arm.position_low + margin, arm.position_high - margin
    q = low + np.array(start) * (high - low)
    sent = None
    for values in actions:
        try:
            command = controller.command(np.array(values), state(q), STAMP, dt)
        except Refused as refused:
            assert (refused.reason, np.isfinite(values).all()) == (Reason.ACTION_INVALID, False)  # noqa: PT017
            continue
        positions, slack = command.positions[:7], 1e-6
        origin = q if sent is None or delta_from == "measured" else np.clip(sent, q - step, q + step)
        assert np.isfinite(command.positions).all()
        assert np.all((positions >= low - slack) & (positions <= high + slack)), "joint limits"
        assert np.all(np.abs(positions - q) <= step + slack), "distance from the measurement"
        assert np.all(np.abs(positions - origin) <= speed * arm.velocity_limits * dt + slack), "velocity"
        before, after = arm.forward(origin), arm.forward(positions)
        assert np.linalg.norm(after.position - before.position) <= 0.04 * 1.01 + 1e-4 + slack, "translation"
        assert rotation_angle(after.rotation @ before.rotation.T) <= 0.2 * 1.01 + 1e-4 + slack, "rotation"
        if boxed:
            for axis, (least, most) in enumerate(((0.2, 0.8), (-0.3, 0.3), (0.05, 0.9))):
                was, now = before.position[axis], after.position[axis]
                assert min(least, was) - slack <= now <= max(most, was) + slack, "workspace"
        assert np.all((command.positions[7:] >= 0) & (command.positions[7:] <= 0.04)), "fingers"
        controller.executed()
        sent = positions
        q = q + follow * (positions - q)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    action=st.tuples(*[wild] * 8),
    start=st.tuples(*[st.floats(0.0, 1.0)] * 7),
    mode=st.sampled_from([JOINTS, JOINT_DELTAS]),
)
def test_nor_does_a_policy_in_joint_space(
    arm: Kinematics,
    configure: Configure,
    state: State,
    action: tuple[float, ...],
    start: tuple[float, ...],
    mode: ActionSpec,
) -> None:
    box = {"workspace_low": [0.2, -0.3, 0.05], "workspace_high": [0.8, 0.3, 0.9]}
    controller = Controller(configure(limits=box), mode, arm)
    q = arm.position_low + np.array(start) * (arm.position_high - arm.position_low)
    try:
        command = controller.command(np.array(action), state(q), STAMP, DT)
    except Refused as refused:
        assert refused.reason is Reason.ACTION_INVALID  # noqa: PT017 - good actions are not refused
        return
    positions, slack = command.positions[:7], 1e-6
    assert np.all((positions >= arm.position_low - slack) & (positions <= arm.position_high + slack))
    assert np.all(np.abs(positions - q) <= np.minimum(0.2, arm.velocity_limits * DT) + slack)
    before, after = arm.forward(q).position, arm.forward(positions).position
    assert np.all(after >= np.minimum([0.2, -0.3, 0.05], before) - slack)
    assert np.all(after <= np.maximum([0.8, 0.3, 0.9], before) + slack)
