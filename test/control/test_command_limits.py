"""Searches for actions whose command breaks a limit, in all modes and with one to three arms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, configure, several, state
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.config import VELOCITY_OUTPUTS
from vla_ros.contract.components import ROTATION_SIZES, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import Command, lifetime
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.kinematics.rotations import rotation_angle
from vla_ros.types import FloatArray

STAMP, SLACK, LEAD = 123_456_789, 1e-6, 0.3
MARGIN, STEP, SPEED, FAR, TURN = 0.02, 0.15, 0.5, 0.04, 0.2
BOX = ((0.2, 0.8), (-0.3, 0.3), (0.05, 0.9))
LIMITS = {
    "joint_margin": MARGIN,
    "max_joint_step": STEP,
    "following_error": LEAD,
    "velocity_scale": SPEED,
    "max_translation_step": FAR,
    "max_rotation_step": TURN,
}
MOTIONS = [
    *(f"tip_delta[{form}]" for form in ("euler_xyz", "rotation_vector")),
    *(f"joint_position[{form}]" for form in ("rad", "deg", "-100..100")),
    *(f"joint_delta[{form}]" for form in ("rad", "deg")),
    *(f"joint_velocity[{form}]" for form in ("rad/s", "deg/s", "1")),
    *(f"tip_rotation[{form}] + NAME.tip_position" for form in ROTATION_SIZES),
]
OUTPUTS = ["joint_state", "joint_trajectory", "twist_stamped", "joint_velocity", "joint_velocity_state"]
GRIPPERS = ["", " + NAME.gripper", " + NAME.gripper[1..-1]", " + NAME.gripper[m]"]

wild = st.one_of(
    st.floats(-0.1, 0.1),
    st.floats(-4.0, 4.0),
    st.floats(-1e300, 1e300),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)


def action_of(motions: list[str], grippers: list[str]) -> str:
    """Text of the action of all arms."""
    texts = [
        f"NAME.{motion}{gripper}".replace("NAME", f"arm_{number}")
        for number, (motion, gripper) in enumerate(zip(motions, grippers, strict=True))
    ]
    return " + ".join(texts)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    motions=st.lists(st.sampled_from(MOTIONS), min_size=1, max_size=3),
    steps=st.integers(1, 4),
    follow=st.floats(0.0, 1.0),
    dt=st.floats(0.001, 1.0),
    stands=st.sampled_from([0.0, 0.5]),
    delta_from=st.sampled_from(["measured", "commanded"]),
    delta_frame=st.sampled_from(["base", "tip"]),
    boxed=st.booleans(),
    acceleration=st.sampled_from([0.0, 2.0]),
)
def test_whatever_a_policy_says_no_command_is_outside_any_limit(
    data: Any,
    motions: list[str],
    steps: int,
    follow: float,
    dt: float,
    stands: float,
    delta_from: str,
    delta_frame: str,
    boxed: bool,
    acceleration: float,
) -> None:
    count = len(motions)
    outputs = [data.draw(st.sampled_from(OUTPUTS)) for _ in motions]
    grippers = [data.draw(st.sampled_from(GRIPPERS)) for _ in motions]
    limits: dict[str, Any] = LIMITS | {"max_joint_acceleration": acceleration}
    if boxed:
        low, high = zip(*BOX, strict=True)
        limits |= {"workspace_low": list(low), "workspace_high": list(high)}
    config = several(
        configure(
            limits=limits,
            control={"delta_from": delta_from, "delta_frame": delta_frame, "rate_hz": 1 / dt},
            gripper={"mode": data.draw(st.sampled_from(["binary", "continuous"])), "max_speed": 0.1},
            timeouts={"velocity": stands},
            topics={"gripper": "/gripper"},
        ),
        outputs,
    )
    parts = parse_components(action_of(motions, grippers), action=True)
    spec = PolicySpec(action=parts, dimension=sum(part.size(7) for part in parts))
    controller = RobotController(config, spec, {each.name: ARM for each in config.arms})
    span = ARM.position_high - ARM.position_low - 2 * MARGIN
    # Anywhere, and one joint in four so near to its limit that a single step might pass it.
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    near = np.where(rng.random((count, 7)) < 0.25, rng.choice([0.002, 0.998], (count, 7)), rng.random((count, 7)))
    where = list(ARM.position_low + MARGIN + span * near)
    fingers, sent, speeds = [0.04] * count, [None] * count, [np.zeros(7)] * count
    for _ in range(steps):
        action = np.array(data.draw(st.tuples(*[wild] * spec.dimension)))
        joints = {each.name: state(q, finger) for each, q, finger in zip(config.arms, where, fingers, strict=True)}
        try:
            commands = controller.command(action, joints, STAMP, dt)
        except Refused as refused:
            if refused.reason is Reason.FOLLOWING_ERROR:
                break
            assert refused.reason is Reason.ACTION_INVALID  # noqa: PT017
            assert not np.isfinite(action).all() or "no direction" in refused.detail  # noqa: PT017
            continue
        assert [command.arm for command in commands] == [each.name for each in config.arms]
        controller.sent()
        for index, command in enumerate(commands):
            q = where[index]
            is_velocity = outputs[index] in VELOCITY_OUTPUTS
            origin = q
            if sent[index] is not None and not is_velocity:
                origin = sent[index]
            within_limits(command, q, origin, dt, boxed)
            speed = np.abs(command.positions[:7] - origin) / dt
            if acceleration:
                assert np.all(speed <= speeds[index] + acceleration * dt + SLACK / dt), "acceleration"
            speeds[index] = speed
            if is_velocity:
                velocity_within_limits(command, q, dt, max(dt, lifetime(config)), boxed)
            for finger in command.positions[7:]:
                assert 0 <= finger <= 0.04, "fingers"
                assert abs(finger - fingers[index]) <= 0.1 * dt + SLACK, "speed of the fingers"
                fingers[index] = finger
            sent[index] = command.positions[:7]
            where[index] = q + follow * (command.positions[:7] - q)


def within_limits(command: Command, q: FloatArray, origin: FloatArray, dt: float, boxed: bool) -> None:
    """Check every limit of docs/safety.md for an arm that is measured at ``q``."""
    positions = command.positions[:7]
    low, high = ARM.position_low + MARGIN, ARM.position_high - MARGIN
    assert np.isfinite(command.positions).all()
    assert np.all((positions >= low - SLACK) & (positions <= high + SLACK)), "joint limits"
    assert np.all(np.abs(positions - origin) <= STEP + SLACK), "step"
    assert np.all(np.abs(positions - q) <= LEAD + SLACK), "distance from the measurement"
    assert np.all(np.abs(positions - origin) <= SPEED * ARM.velocity_limits * dt + SLACK), "velocity"
    before, after = ARM.forward(origin), ARM.forward(positions)
    moved = np.linalg.norm(after.position - before.position)
    turned = rotation_angle(after.rotation @ before.rotation.T)
    assert moved <= FAR * 1.01 + 1e-4 + SLACK, "translation"
    assert turned <= TURN * 1.01 + 1e-4 + SLACK, "rotation"
    if boxed:
        in_box(before.position, after.position)
    if command.twist is not None:
        assert np.linalg.norm(command.twist[0]) * dt == pytest.approx(moved, abs=1e-6)
        assert np.linalg.norm(command.twist[1]) * dt == pytest.approx(turned, abs=1e-6)


def velocity_within_limits(command: Command, q: FloatArray, dt: float, stands: float, boxed: bool) -> None:
    """Check limits of positions and the box until the velocity expires."""
    velocity = (command.positions[:7] - q) / dt
    if command.velocities is not None:
        assert tuple(command.velocities) == ARM.joint_names
        np.testing.assert_allclose(list(command.velocities.values()), velocity, atol=1e-9 / dt)
    assert np.all(np.abs(velocity) <= SPEED * ARM.velocity_limits * (1 + 1e-6) + SLACK / dt), "velocity"
    end = q + velocity * stands
    low, high = ARM.position_low + MARGIN, ARM.position_high - MARGIN
    assert np.all(end >= np.minimum(low, q) - SLACK), "joint limits"
    assert np.all(end <= np.maximum(high, q) + SLACK), "joint limits"
    if boxed:
        begin = ARM.forward(q).position
        straight = None if command.twist is None else begin + command.twist[0] * stands
        in_box(begin, ARM.forward(end).position if straight is None else straight)


def in_box(before: FloatArray, after: FloatArray) -> None:
    for was, now, (least, most) in zip(before, after, BOX, strict=True):
        assert min(least, was) - SLACK <= now <= max(most, was) + SLACK, "workspace"
