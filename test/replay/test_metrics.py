import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vla_ros.config import GripperConfig
from vla_ros_lab.replay import metrics, skill

NAN = math.nan
ONE = np.zeros(4, np.int64)


def test_errors_by_dimension_leave_out_what_is_unknown():
    predicted = np.array([[1.0, 5.0], [2.0, 6.0], [4.0, 7.0]])
    recorded = np.array([[0.0, 5.0], [4.0, NAN], [4.0, 3.0]])
    assert metrics.mae(predicted, recorded) == pytest.approx([1.0, 2.0])
    assert metrics.rmse(predicted, recorded) == pytest.approx([math.sqrt(5 / 3), math.sqrt(8)])


def test_a_dimension_that_is_never_known_has_no_figure():
    assert np.isnan(metrics.mae(np.zeros((3, 1)), np.full((3, 1), NAN))).all()


def test_correlation():
    x = np.array([0.0, 1.0, 2.0, 3.0])
    predicted = np.stack([2 * x + 1, -x, np.ones(4), np.array([0.0, 1.0, 2.0, NAN])], axis=1)
    recorded = np.stack([x, x, x, np.array([0.0, 1.0, 3.0, 5.0])], axis=1)
    found = metrics.correlation(predicted, recorded)
    assert found[:2] == pytest.approx([1.0, -1.0])
    assert np.isnan(found[2])
    assert found[3] == pytest.approx(3 / math.sqrt(2 * 14 / 3))


def test_direction_cosine_by_hand():
    recorded = np.array([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 1.0], [0, 0, 0], [NAN, 0, 0], [1.0, 1.0, 0]])
    predicted = np.array([[3.0, 0, 0], [0, -1.0, 0], [0, 0, 0], [1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
    found = metrics.direction_cosines(predicted, recorded)
    assert found[[0, 1, 2, 5]] == pytest.approx([1.0, -1.0, 0.0, math.sqrt(0.5)])
    assert np.isnan(found[[3, 4]]).all()


@given(
    arrays.arrays(float, (8, 3), elements=st.floats(-1, 1)),
    arrays.arrays(float, (8, 3), elements=st.floats(-1, 1)),
    st.floats(0.01, 100),
)
def test_cosine_is_bounded_and_blind_to_scale(predicted, recorded, scale):
    found = metrics.direction_cosines(predicted, recorded)
    known = found[np.isfinite(found)]
    assert (np.abs(known) <= 1 + 1e-9).all()
    mine = metrics.direction_cosines(recorded * scale, recorded)
    assert mine[np.isfinite(mine)] == pytest.approx(1.0)


def test_gripper_states_follow_the_convention():
    values = np.array([0.0, 0.5, 0.51, 1.0, NAN])
    opens_with_one = GripperConfig(open_value=1.0, closed_value=0.0, threshold=0.5)
    assert metrics.is_closed(values, opens_with_one)[:4].tolist() == [1, 1, 0, 0]
    assert np.isnan(metrics.is_closed(values, opens_with_one)[4])
    closes_with_one = GripperConfig(open_value=-1.0, closed_value=1.0, threshold=0.5)
    assert metrics.is_closed(np.array([-1.0, 0.2, 1.0]), closes_with_one).tolist() == [0, 1, 1]


def test_gripper_counts():
    predicted = np.array([1.0, 1, 0, 0, 1, NAN])
    recorded = np.array([1.0, 0, 1, 0, 1, 1])
    assert metrics.gripper_scores(predicted, recorded) == pytest.approx((0.6, 2 / 3))
    assert math.isnan(metrics.gripper_scores(np.zeros(3), np.zeros(3))[1])


def test_events_pair_by_kind_and_time_within_an_episode():
    times = np.arange(10.0) * 0.1
    episodes = np.array([0] * 6 + [1] * 4)
    recorded = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], float)  # closes at .2, opens at .4; closes at .7
    predicted = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 0], float)  # closes at .3
    found = metrics.match_events(predicted, recorded, times, episodes)
    assert (found.recorded, found.predicted) == (3, 1)
    assert found.delays == pytest.approx([0.1])
    assert found.f1 == pytest.approx(0.5)
    none = metrics.match_events(predicted, recorded, times, episodes, window=0.05)
    assert none.delays.size == 0


def test_saturation_counts_the_outermost_bins_and_what_lies_beyond():
    outermost = 1 - 1 / 255  # centre of the last of 255 bins on [-1, 1]
    values = np.array([[-outermost, 0.0], [outermost, 0.99], [1.0, 1.2], [0.98, -3.0]])
    assert metrics.at_edge(values).tolist() == [[True, False], [True, False], [True, True], [False, True]]


def test_jerk_of_a_cubic_is_its_third_derivative():
    times = np.arange(20) * 0.1
    position = (2.0 * times**3)[:, None]  # third derivative 12
    episodes = np.zeros(20, np.int64)
    assert metrics.jerk(position, times, episodes, order=3) == pytest.approx(12.0)
    steps = np.diff(position, axis=0)
    assert metrics.jerk(steps, times[1:], episodes[1:], order=2) == pytest.approx(12.0)


def test_jerk_ignores_the_jump_between_episodes():
    steps = np.concatenate([np.zeros(5), np.full(5, 100.0)])[:, None]
    times = np.arange(10) * 0.1
    episodes = np.repeat([0, 1], 5)
    assert metrics.jerk(steps, times, episodes) == 0.0
    assert math.isnan(metrics.jerk(steps[:2], times[:2], episodes[:2]))


def test_idle():
    assert metrics.idle_share(np.array([[0, 0, 0], [0.1, 0, 0], [NAN, 0, 0], [0, 0, 0.01]]), 0.02) == pytest.approx(
        2 / 3
    )


def test_percentile_figures():
    found = metrics.percentile_figures(np.arange(101.0))
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "count": 101}
    assert math.isnan(metrics.percentile_figures([])["p50"])


def test_baselines():
    recorded = np.array([[1.0, 1.0], [3.0, 0.0], [5.0, NAN]])
    episodes = np.array([0, 0, 1])
    found = skill.baselines(recorded, episodes, (1,), 1.0)
    assert found["zero"].tolist() == [[0, 1], [0, 1], [0, 1]]
    assert found["hold_last"].tolist() == [[0, 1], [1, 1], [0, 1]]
    assert found["mean_action"].tolist() == [[3, 0.5]] * 3


def test_bootstrap_interval_of_a_mean_is_about_two_standard_errors():
    rng = np.random.default_rng(1)
    values = rng.normal(3.0, 1.0, 400)
    data = np.repeat(values, 3)[:, None], np.ones((1200, 1)), np.repeat(np.arange(400), 3)  # episodes of 3 frames
    low, high = skill.interval(*data)
    assert low < values.mean() < high
    assert high - low == pytest.approx(4 * values.std() / 20, rel=0.1)
    assert skill.interval(*data) == [low, high]


def test_one_episode_has_no_interval():
    assert skill.interval(np.ones((4, 1)), np.ones((4, 1)), np.zeros(4, np.int64)) is None
