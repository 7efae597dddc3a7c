from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import GripperConfig
from vla_ros.control.gripper import Gripper


def make(**options: Any) -> Gripper:
    return Gripper(GripperConfig(**options))


@pytest.mark.parametrize(
    ("options", "value", "opening"),
    [
        ({"open_value": 1.0, "closed_value": 0.0}, 1.0, 1.0),
        ({"open_value": 1.0, "closed_value": 0.0}, 0.996, 1.0),
        ({"open_value": 1.0, "closed_value": 0.0}, 0.0, 0.0),
        ({"open_value": 0.0, "closed_value": 1.0}, 1.0, 0.0),
        ({"open_value": -1.0, "closed_value": 1.0}, -0.01, 1.0),
        ({"open_value": -1.0, "closed_value": 1.0}, 0.01, 0.0),
        ({"open_value": -1.0, "closed_value": 1.0}, 0.0, 1.0),
        ({"open_value": -1.0, "closed_value": 1.0, "at_threshold": "close"}, 0.0, 0.0),
        ({"open_value": 1.0, "closed_value": 0.0}, 7.0, 1.0),
        ({"open_value": 1.0, "closed_value": 0.0}, -7.0, 0.0),
    ],
    ids=[
        "bridge open",
        "bridge nearly",
        "bridge closed",
        "inverted",
        "libero -",
        "libero +",
        "at the threshold",
        "at the threshold, closing",
        "far",
        "-far",
    ],
)
def test_binary_by_threshold_in_every_convention(options: dict[str, float], value: float, opening: float) -> None:
    assert make(mode="binary", **options).opening(value) == opening


def test_continuous_scales_and_clips() -> None:
    gripper = make(mode="continuous", open_value=-1.0, closed_value=1.0, open_position=0.08, closed_position=0.01)
    assert gripper.opening(0.0) == pytest.approx(0.5)
    assert gripper.opening(-3.0) == 1.0
    assert gripper.position(0.5) == pytest.approx(0.045)


def test_hysteresis_keeps_the_state_in_the_band_and_nowhere_else() -> None:
    gripper = make(mode="binary", threshold=0.5, hysteresis=0.2)
    assert gripper.opening(0.6) == 1.0, "at first the threshold alone decides"
    assert [gripper.opening(value) for value in (0.45, 0.31, 0.3, 0.45, 0.69, 0.71, 0.45)] == [1, 1, 0, 0, 0, 1, 1]
    gripper.reset()
    assert gripper.opening(0.45) == 0.0


def test_without_hysteresis_noise_at_the_threshold_would_chatter_and_with_it_does_not() -> None:
    noise = [0.49, 0.51] * 20
    flips = {}
    for band in (0.0, 0.1):
        gripper = make(mode="binary", hysteresis=band)
        answers = [gripper.opening(value) for value in noise]
        flips[band] = sum(a != b for a, b in pairwise(answers))
    assert flips == {0.0: 39, 0.1: 0}


def test_max_speed_bounds_each_step_from_the_last_command_not_from_the_measurement() -> None:
    gripper = make(mode="binary", open_position=0.04, closed_position=0.0, max_speed=0.1)
    assert gripper.command(0.0, measured=0.04, dt=0.1) == (pytest.approx(0.03), True)
    assert gripper.target is None, "made, not sent"
    gripper.target = 0.03
    # Fingers are stuck on an object at 0.03: the command goes on closing, or there is no grip.
    assert gripper.command(0.0, measured=0.03, dt=0.1) == (pytest.approx(0.02), True)
    gripper.target = 0.02
    assert gripper.command(0.0, measured=0.03, dt=0.1) == (pytest.approx(0.01), True)
    assert gripper.command(0.0, measured=0.03, dt=1.0) == (0.0, False)


def test_without_a_speed_limit_the_command_is_the_target() -> None:
    assert make(mode="binary").command(1.0, measured=0.0, dt=1e-3) == (0.04, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused_and_change_nothing(value: float) -> None:
    gripper = make(mode="binary", hysteresis=0.4)
    gripper.opening(1.0)
    with pytest.raises(ValueError, match="not finite"):
        gripper.opening(value)
    assert gripper.opening(0.5) == 1.0


@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    mode=st.sampled_from(["binary", "continuous"]),
    ends=st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)).filter(lambda e: abs(e[0] - e[1]) > 1e-3),
)
def test_fingers_never_leave_their_range(values: list[float], mode: str, ends: tuple[float, float]) -> None:
    gripper = make(
        mode=mode, open_value=ends[0], closed_value=ends[1], open_position=0.01, closed_position=0.05, max_speed=0.2
    )
    before = 0.02
    for value in values:
        position, _ = gripper.command(value, measured=0.02, dt=0.1)
        assert 0.01 - 1e-12 <= position <= 0.05 + 1e-12
        assert abs(position - before) <= 0.02 + 1e-12
        gripper.target = position
        before = position
