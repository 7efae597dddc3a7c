import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import LimitsConfig
from vla_ros.control.limits import JointLimits, limit_box, limit_joints, limit_length
from vla_ros.control.reasons import Reason
from vla_ros.errors import ConfigError

NAMES = ("a", "b")
ZERO = np.zeros(2)
TURNING = np.zeros(2, np.bool_)


def limits(
    low: float = -2.0,
    high: float = 2.0,
    velocity: float = math.inf,
    acceleration: float = math.inf,
    step: float = math.inf,
    lead: float = math.inf,
) -> JointLimits:
    ends = np.full(2, low), np.full(2, high)
    return JointLimits(NAMES, *ends, np.full(2, velocity), acceleration, step, np.full(2, lead))


def reasons(violations: list) -> list[Reason]:
    return [violation.reason for violation in violations]


def test_a_target_within_every_limit_is_unchanged() -> None:
    target = np.array([0.1, -0.2])
    found, violations = limit_joints(target, ZERO, ZERO, ZERO, 0.1, limits(velocity=5, acceleration=100, step=0.5))
    np.testing.assert_allclose(found, target)
    assert violations == []


def test_a_target_exactly_at_a_limit_is_no_violation() -> None:
    target = np.array([0.3, -0.3])
    found, violations = limit_joints(target, ZERO, ZERO, ZERO, 0.1, limits(velocity=3, step=0.3))
    np.testing.assert_allclose(found, target, atol=1e-9)
    assert violations == []


def test_velocity_shortens_the_whole_step_so_that_the_arm_stays_on_its_path() -> None:
    found, violations = limit_joints(np.array([1.0, 0.5]), ZERO, ZERO, ZERO, 0.1, limits(velocity=1))
    np.testing.assert_allclose(found, [0.1, 0.05])
    assert reasons(violations) == [Reason.LIMIT_VELOCITY]
    assert "joint 'a' wanted 1, allowed 0.1" in violations[0].detail


def test_a_step_is_limited_from_the_last_command() -> None:
    origin = np.array([0.19, 0.0])
    found, violations = limit_joints(np.array([0.6, 0.0]), ZERO, origin, ZERO, 0.1, limits(step=0.2))
    np.testing.assert_allclose(found, [0.39, 0.0], atol=1e-9)
    assert reasons(violations) == [Reason.LIMIT_JUMP]


def test_the_distance_from_the_measured_position_is_limited_though_the_last_command_is_ahead() -> None:
    """The arm stays on its path; that it lags is not the target's fault."""
    origin = np.array([0.19, 0.0])
    found, violations = limit_joints(np.array([0.29, 0.1]), ZERO, origin, ZERO, 0.1, limits(step=0.2, lead=0.2))
    np.testing.assert_allclose(found, [0.2, 0.01], atol=1e-9)
    assert violations == []


def test_targets_beyond_a_joints_range_are_clamped() -> None:
    found, violations = limit_joints(np.array([9.0, 0.1]), ZERO, ZERO, ZERO, 1.0, limits(high=0.5))
    np.testing.assert_allclose(found, [0.5, 0.1])
    assert reasons(violations) == [Reason.LIMIT_POSITION]


def test_acceleration_starts_gently_and_also_stops_gently() -> None:
    allowed = limits(acceleration=10.0)
    first, violations = limit_joints(np.array([1.0, 0.0]), ZERO, ZERO, ZERO, 0.1, allowed)
    np.testing.assert_allclose(first, [0.1, 0.0])
    assert reasons(violations) == [Reason.LIMIT_ACCELERATION]
    moving = np.array([3.0, 0.0])
    slowing, _ = limit_joints(ZERO, ZERO, ZERO, moving, 0.1, allowed)
    np.testing.assert_allclose(slowing, [0.2, 0.0], err_msg="from 3 to 2 rad/s within 0.1 s")


def test_position_wins_over_acceleration() -> None:
    moving, at = np.array([3.0, 0.0]), np.array([1.95, 0.0])
    found, _ = limit_joints(at, at, at, moving, 0.1, limits(acceleration=10.0))
    np.testing.assert_allclose(found, [2.0, 0.0])


def test_an_arm_outside_its_range_comes_back_no_faster_than_it_may() -> None:
    outside = np.array([2.05, 0.0])
    found, _ = limit_joints(np.array([2.5, 0.0]), outside, outside, ZERO, 0.1, limits(velocity=0.2))
    np.testing.assert_allclose(found, [2.03, 0.0])


def test_no_velocity_allowed_means_no_motion() -> None:
    config = LimitsConfig(velocity_scale=0.0)
    ranges = np.full(2, -1.0), np.full(2, 1.0), np.array([1.0, math.inf])
    still = JointLimits.from_config(config, NAMES, *ranges, TURNING)
    found, violations = limit_joints(np.array([0.5, 0.5]), ZERO, ZERO, ZERO, 0.1, still)
    np.testing.assert_array_equal(found, ZERO)
    assert Reason.LIMIT_VELOCITY in reasons(violations)


def test_the_margin_narrows_the_range_and_must_leave_some() -> None:
    low, high = np.array([-1.0, 0.0]), np.array([1.0, 0.04])
    inner = JointLimits.from_config(LimitsConfig(joint_margin=0.01), NAMES, low, high, np.ones(2), TURNING)
    np.testing.assert_allclose([inner.low, inner.high], [[-0.99, 0.01], [0.99, 0.03]])
    with pytest.raises(ConfigError, match=r"limits.joint_margin: 0.1 leaves joint 'b' no room between 0 and 0.04"):
        JointLimits.from_config(LimitsConfig(joint_margin=0.1), NAMES, low, high, np.ones(2), TURNING)


def test_a_prismatic_joint_may_be_as_far_ahead_as_its_own_option_says() -> None:
    ranges = np.full(2, -1.0), np.full(2, 1.0), np.ones(2)
    found = JointLimits.from_config(LimitsConfig(), NAMES, *ranges, np.array([False, True]))
    np.testing.assert_allclose(found.lead, [0.5, 0.15])


positions = st.floats(-2.0, 2.0)
pair = st.tuples(positions, positions)
anything = st.floats(-1e300, 1e300)


@given(
    target=st.tuples(anything, anything),
    measured=pair,
    origin=pair,
    last=st.tuples(st.floats(-5, 5), st.floats(-5, 5)),
    dt=st.floats(1e-4, 10.0),
    velocity=st.floats(0.0, 10.0) | st.just(math.inf),
    acceleration=st.floats(0.01, 100.0) | st.just(math.inf),
    step=st.floats(0.0, 3.0) | st.just(math.inf),
    lead=st.floats(0.01, 3.0) | st.just(math.inf),
)
def test_every_limit_holds_for_any_target(
    target: tuple[float, float],
    measured: tuple[float, float],
    origin: tuple[float, float],
    last: tuple[float, float],
    dt: float,
    velocity: float,
    acceleration: float,
    step: float,
    lead: float,
) -> None:
    allowed = limits(velocity=velocity, acceleration=acceleration, step=step, lead=lead)
    here, start = np.array(measured), np.clip(origin, np.array(measured) - lead, np.array(measured) + lead)
    found, _ = limit_joints(np.array(target), here, start, np.array(last), dt, allowed)
    slack = 1e-6
    assert np.isfinite(found).all()
    assert np.all(found >= -2.0 - slack)
    assert np.all(found <= 2.0 + slack)
    assert np.all(np.abs(found - start) <= velocity * dt + slack)
    assert np.all(np.abs(found - start) <= step + slack)
    assert np.all(np.abs(found - here) <= lead + slack)


@given(st.tuples(anything, anything, anything), st.floats(0.0, 10.0))
def test_a_shortened_vector_has_at_most_the_length_and_its_old_direction(
    vector: tuple[float, ...], most: float
) -> None:
    given_vector = np.array(vector)
    found, shortened = limit_length(given_vector, most)
    assert np.isfinite(found).all()
    assert math.hypot(*found) <= most * (1 + 1e-6) + 1e-300  # numpy's norm loses digits below 1e-154
    if not shortened:
        np.testing.assert_array_equal(found, given_vector)
    elif most > 1e-6:
        scale = np.abs(given_vector).max()
        np.testing.assert_allclose(np.cross(found / most, given_vector / scale), 0, atol=1e-9)
        assert found @ (given_vector / scale) > 0


point = st.tuples(*[st.floats(-2.0, 2.0)] * 3)


@given(target=point, current=point)
def test_a_tip_stays_in_the_box_or_moves_no_further_out(
    target: tuple[float, ...], current: tuple[float, ...]
) -> None:
    low, high = (-1.0, -1.0, 0.0), (1.0, 1.0, 1.5)
    found, changed = limit_box(np.array(target), np.array(current), low, high)

    def outside(at: np.ndarray) -> np.ndarray:
        return np.maximum(np.maximum(np.array(low) - at, at - np.array(high)), 0)

    assert np.all(outside(found) <= outside(np.array(current)) + 1e-12)
    assert changed == bool(np.any(np.abs(found - np.array(target)) > 1e-9))
