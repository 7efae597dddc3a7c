"""The numbers of curves whose truth is known, without processes or a clock."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from vla_ros.types import FloatArray
from vla_ros_lab.commission.measure import AxisResponse, Track, measure_motion, rhythm

SPEED, WAY, DWELL, BEGAN = 0.2, 0.15, 1.2, 0.5
TAKES = WAY / SPEED


def target(now: FloatArray) -> FloatArray:
    """Out, rest, back, rest."""
    passed = now - BEGAN
    return SPEED * np.clip(np.minimum(passed, 2 * TAKES + DWELL - passed), 0, TAKES)


def measure(
    delay: float = 0.0,
    sag: float = 0.0,
    stick: float = 0.0,
    deceleration: float = 0.0,
    noise: float = 0.0,
    rate: float = 100.0,
    jitter: float = 0.0,
    gain: float = 1.0,
) -> AxisResponse:
    """Let a joint follow commands at 50 Hz, and measure it at a rate."""
    rng, tick = np.random.default_rng(0), 0.001
    commanded = Track(times := np.arange(0, BEGAN + 2 * TAKES + 2 * DWELL + 0.1, 0.02), target(times))
    ticks = np.arange(0, times[-1], tick)
    follow = _braking(deceleration, tick) if deceleration else _at_once
    at, positions = -sag, []
    for now in ticks:
        goal = commanded.position[max(0, np.searchsorted(times, now - delay, side="right") - 1)] - sag
        error = goal - at
        at += follow(math.copysign(max(abs(error) - stick, 0.0), error))
        positions.append(at)
    seen = np.cumsum((1 + jitter * rng.uniform(-1, 1, int(rate * times[-1]))) / rate)
    seen = seen[seen < ticks[-1]]
    shown = gain * np.interp(seen, ticks, positions) + noise * rng.standard_normal(len(seen))
    ends = BEGAN + TAKES, BEGAN + 2 * TAKES + DWELL
    return measure_motion(commanded, Track(seen, shown), ends, DWELL)


def _at_once(error: float) -> float:
    return error


def _braking(most: float, tick: float) -> Callable[[float], float]:
    speed = 0.0

    def follow(error: float) -> float:
        nonlocal speed
        wanted = math.copysign(min(abs(error) / 0.01, math.sqrt(2 * most * abs(error))), error)
        speed += float(np.clip(wanted - speed, -most * tick, most * tick))
        return speed * tick

    return follow


@pytest.mark.parametrize("noise", [0.0, 0.001])
@pytest.mark.parametrize("rate", [20.0, 100.0, 500.0])
def test_sag_friction_and_delay_are_found_together(noise: float, rate: float) -> None:
    found = measure(delay=0.2, sag=0.06, stick=0.02, noise=noise, rate=rate, jitter=0.3)
    assert found.delay == pytest.approx(0.2, rel=0.1)
    assert found.offset == pytest.approx(-0.06, rel=0.1)
    assert found.stick == pytest.approx(0.02, rel=0.1)
    assert found.gain == pytest.approx(1.0, abs=0.1)
    assert found.noise == pytest.approx(noise, rel=0.3, abs=1e-9)
    assert found.following == pytest.approx(0.06 + 0.02 + 0.2 * SPEED, abs=0.005 + 4 * noise)


@pytest.mark.parametrize("deceleration", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_a_deceleration_is_found(deceleration: float, delay: float) -> None:
    found = measure(delay=delay, deceleration=deceleration)
    assert found.deceleration == pytest.approx(deceleration, rel=0.1)
    assert not found.at_least


def test_what_stops_within_a_step_has_a_lower_bound() -> None:
    assert measure().at_least
    assert measure(noise=0.003, deceleration=2.0).at_least


@pytest.mark.parametrize("gain", [-1.0, 0.5, 57.3, 1 / 57.3])
def test_another_sign_or_unit_is_found(gain: float) -> None:
    assert measure(gain=gain).gain == pytest.approx(gain, rel=0.05)


def test_a_joint_that_follows_exactly_has_no_offset_friction_or_delay() -> None:
    found = measure()
    assert (found.offset, found.stick) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert found.delay < 0.02


def test_rate_jitter_and_age_of_messages() -> None:
    rng = np.random.default_rng(1)
    stamped = np.cumsum((1 + 0.3 * rng.uniform(-1, 1, 200)) / 20) + 1000
    found = rhythm(stamped + 0.3, stamped)
    assert found.rate_hz == pytest.approx(20, rel=0.05)
    assert found.age == pytest.approx(0.3)
    assert found.jitter == pytest.approx(0.3 * 0.95 / 20, rel=0.1)
    assert math.isnan(rhythm(stamped, np.full(200, np.nan)).age), "without stamps"
    assert rhythm(np.zeros(0), np.zeros(0)).rate_hz == 0.0
