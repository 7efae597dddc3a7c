import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.control.rate_limiter import RateLimiter

RATE = 10.0
PERIOD = 1 / RATE


def run(limiter, arrivals, inference, chunk=1):
    """Return when each inferred frame was taken, and for how long it had waited; the newest frame wins."""
    begun, waited, free, index = [], [], 0.0, 0
    interval = np.diff(arrivals, prepend=-np.inf)
    while index < len(arrivals):
        now = max(arrivals[index], free, limiter.frame_due)
        index = int(np.searchsorted(arrivals, now, "right")) - 1
        patience = limiter.patience(now, arrivals[index], arrivals[index] + interval[index])
        if patience and index + 1 < len(arrivals) and arrivals[index + 1] <= now + patience:
            index += 1
            now = arrivals[index]
        begun.append(now)
        waited.append(now - arrivals[index])
        free = now + inference[index]
        limiter.answered(now, free)
        for _ in range(chunk - 1):
            free = limiter.planned_due
            limiter.sent(free)
        index += 1
    return np.array(begun), np.array(waited)


@pytest.mark.parametrize("shift", [0.01, 0.05, 0.072, 0.099])
def test_a_camera_at_the_control_rate_is_answered_without_delay_after_one_second(shift):
    """Otherwise a slow inference, or a first frame out of phase, would delay every later frame."""
    arrivals = np.r_[0.0, PERIOD - shift + PERIOD * np.arange(40)]
    begun, waited = run(RateLimiter(RATE), arrivals, np.full(41, 0.02))
    assert waited[1] == pytest.approx(max(0.0, shift - 0.1 * PERIOD)) or begun[1] == arrivals[2]
    assert waited[12:] == pytest.approx(0)
    assert len(begun) >= 40


def test_the_delay_of_one_slow_inference_is_made_up():
    inference = np.full(60, 0.06)
    inference[20] = 0.15
    _, waited = run(RateLimiter(RATE), PERIOD * np.arange(60), inference)
    assert waited[21] == pytest.approx(0.05)
    assert waited[30:] == pytest.approx(0)


def test_a_slightly_faster_camera_does_not_accumulate_delay():
    _, waited = run(RateLimiter(RATE), PERIOD / 1.005 * np.arange(4000), np.full(4000, 0.01))
    assert len(waited) == 4000
    assert waited.max() == pytest.approx(0)


@given(
    st.lists(st.floats(0.001, 0.3), min_size=2, max_size=300),
    st.lists(st.floats(0.0, 0.25), min_size=300, max_size=300),
)
def test_no_window_holds_more_steps_than_the_rate_allows(gaps, inference):
    begun, _ = run(RateLimiter(RATE), np.cumsum(gaps), inference)
    assert (np.diff(begun) > 0.9 * PERIOD - 1e-9).all()
    for first in range(len(begun)):
        steps = np.arange(1, len(begun) - first + 1)
        assert (steps <= 1.01 * RATE * (begun[first:] - begun[first]) + 2 + 1e-6).all()


def test_a_fast_camera_is_answered_at_the_rate():
    begun, waited = run(RateLimiter(RATE), np.arange(3000) / 30, np.full(3000, 0.01))
    assert len(begun) == pytest.approx(1000, rel=0.015)
    assert waited[:-1].max() == pytest.approx(0)


@pytest.mark.parametrize(("camera_hz", "chunk"), [(25, 1), (15, 1), (12, 1), (30, 4), (10, 4), (10, 8), (7, 1)])
def test_other_rates_and_chunks_keep_the_rate_with_little_delay(camera_hz, chunk):
    frames = 200 * camera_hz
    begun, waited = run(RateLimiter(RATE), np.arange(frames) / camera_hz, np.full(frames, 0.03), chunk)
    assert min(camera_hz, RATE) * 0.9 <= chunk * len(begun) / 200 <= RATE * 1.01 + 0.01
    assert waited.mean() < 0.4 / camera_hz


def test_a_frame_is_skipped_only_for_one_that_is_about_to_arrive():
    limiter = RateLimiter(RATE)
    assert limiter.patience(5.0, 4.9, 5.01) == 0  # nothing was answered yet
    limiter.answered(0.0, 0.02)
    assert limiter.frame_due == pytest.approx(0.09)
    assert limiter.patience(0.09, 0.01, 0.105) == pytest.approx(0.02)
    assert limiter.patience(0.09, 0.06, 0.12) == 0
    assert limiter.patience(0.095, 0.095, 0.1) == 0  # it came in time
    assert limiter.patience(0.2, 0.01, 0.1) == 0  # too late to wait
    assert limiter.patience(0.09, 0.01, np.inf) == 0


def test_a_command_lasts_until_the_next_step():
    limiter = RateLimiter(RATE)
    assert limiter.step_duration(5.0) == PERIOD
    limiter.answered(5.0, 5.02)
    assert limiter.step_duration(5.095) == pytest.approx(0.095)
    assert limiter.step_duration(5.09) == pytest.approx(0.09)
    assert limiter.step_duration(9.0) == PERIOD


def test_a_velocity_command_always_lasts_a_whole_period():
    limiter = RateLimiter(RATE, velocities=True)
    limiter.answered(5.0, 5.02)
    assert limiter.frame_due == pytest.approx(5.09)
    assert limiter.step_duration(5.09) == PERIOD


@pytest.mark.parametrize("late", [0.0, 0.004, 0.009])
def test_delays_of_the_steps_of_a_chunk_do_not_add_up(late):
    limiter = RateLimiter(RATE)
    limiter.answered(0.0, 0.08)
    sent = [0.08]
    for number in range(1, 21):
        now = limiter.planned_due + (late if number % 2 else 0.0)
        assert 0.9 * PERIOD - 1e-9 <= limiter.planned_duration(now) <= PERIOD
        limiter.sent(now)
        sent.append(now)
    assert np.diff(sent).min() >= 0.9 * PERIOD - 1e-9
    assert sent[-1] == pytest.approx(0.08 + 20 * PERIOD, abs=late + 1e-9)


def test_a_step_of_a_chunk_that_is_very_late_is_not_made_up():
    limiter = RateLimiter(RATE)
    limiter.answered(0.0, 0.08)
    limiter.sent(5.0)
    assert limiter.planned_due == pytest.approx(5.0 + PERIOD)


def test_the_steps_of_a_chunk_are_a_period_apart_from_its_first_command():
    """However long the inference took; otherwise the second step would follow the first immediately."""
    limiter = RateLimiter(RATE)
    limiter.answered(0.0, 0.08)
    sent = [0.08]
    for _ in range(3):
        assert limiter.planned_due == pytest.approx(sent[-1] + PERIOD)
        sent.append(limiter.planned_due)
        limiter.sent(sent[-1])
    # The next question is asked so early that its answer follows at the same distance.
    assert sent[-1] <= limiter.frame_due + PERIOD * 0.1 <= sent[-1] + PERIOD - 0.08 + 1e-9


def test_without_a_rate_every_frame_is_answered_and_chunks_are_still_timed():
    limiter = RateLimiter(0.0)
    assert limiter.frame_due == -np.inf
    limiter.answered(1.0, 1.001)
    assert limiter.frame_due <= 1.0
    assert limiter.step_duration(1.01) == pytest.approx(0.03)
    assert limiter.planned_due == pytest.approx(1.001 + 1 / 30)


def test_a_new_rate_applies_from_the_next_step():
    limiter = RateLimiter(RATE)
    limiter.answered(0.0, 0.01)
    limiter.rate_hz = 20.0
    limiter.answered(0.09, 0.1)
    assert limiter.frame_due == pytest.approx(0.135, abs=0.01)
