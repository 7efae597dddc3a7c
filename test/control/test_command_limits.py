"""Whatever a policy says, no command is outside any limit: a search for counter-examples."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_ros.config import Config
from vla_ros.contract.parts import parse_parts
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.controller import Controller
from vla_ros.control.reasons import Reason, Refused
from vla_ros.kinematics.solver import Kinematics
from vla_ros.kinematics.transforms import rotation_angle
from vla_ros.types import JointState

Configure = Callable[..., Config]
State = Callable[..., JointState]

POSE = PolicySpec()
JOINTS = PolicySpec(action=parse_parts("arm.joint_position + arm.gripper", action=True), dimension=8)
JOINT_DELTAS = PolicySpec(action=parse_parts("arm.joint_delta + arm.gripper", action=True), dimension=8)
STAMP, DT = 123_456_789, 0.1

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
    mode: PolicySpec,
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
