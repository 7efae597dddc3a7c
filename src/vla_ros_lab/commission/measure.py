"""What the curves of one motion, and the times of messages, say. Pure functions of arrays.

Times are seconds of a steady clock, positions radians or metres.
"""

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.types import FloatArray

TICK = 0.02
"""Seconds between two commands."""
LONGEST_DELAY = 1.0  # s
_SAME = 0.1  # share by which a measured speed may differ from the commanded one
_FINE = 0.002  # s, of the search for a delay
_RATES = np.geomspace(0.05, 200.0, 240)  # rad/s^2 or m/s^2, of the search for a deceleration


@dataclass(frozen=True, eq=False)
class Track:
    """Positions over time, both float64 [N], with times ascending."""

    time: FloatArray
    position: FloatArray

    def between(self, begin: float, end: float) -> "Track":
        inside = (self.time >= begin) & (self.time < end)
        return Track(self.time[inside], self.position[inside])

    def at(self, when: FloatArray) -> FloatArray:
        """Return the positions that were the newest ones at the times ``when``."""
        positions: FloatArray = self.position[np.maximum(np.searchsorted(self.time, when, side="right") - 1, 0)]
        return positions


@dataclass(frozen=True)
class Rhythm:
    """When the messages of a topic come, seconds."""

    rate_hz: float
    jitter: float  # 95th percentile of the deviation from the median period
    longest: float  # between two arrivals
    age: float  # median of arrival minus stamp: transport and the difference of the clocks; NaN without stamps


def rhythm(arrived: FloatArray, stamped: FloatArray) -> Rhythm:
    """Return the rhythm of messages that ``arrived``, with their stamps (NaN: none), both [N] in seconds."""
    gaps = np.diff(arrived)
    if not len(gaps):
        return Rhythm(0.0, math.nan, math.inf, math.nan)
    periods = gaps if np.isnan(stamped).any() else np.diff(stamped)
    jitter = float(np.percentile(np.abs(periods - np.median(periods)), 95))
    rate, age = len(gaps) / float(periods.sum()), float(np.median(arrived - stamped))
    return Rhythm(rate, jitter, float(gaps.max()), age)


@dataclass(frozen=True)
class AxisResponse:
    """How a joint, or the tip along an axis, follows a ramp out and a ramp back; rad or m and s."""

    gain: float  # measured way per commanded way: 1, -1 with a wrong sign, 57.3 in degrees
    offset: float  # measured minus commanded position at rest, mean of both directions of approach
    stick: float  # half the difference of both: friction and backlash
    delay: float  # from a command to the motion that it causes
    following: float  # largest distance between command and measurement
    deceleration: float  # rad/s^2 or m/s^2 from this speed to rest; a lower bound if it is ``at_least``
    at_least: bool
    noise: float  # standard deviation at rest


def measure_motion(commanded: Track, measured: Track, ends: tuple[float, float], dwell: float) -> AxisResponse:
    """Measure a motion whose two ramps end, as commanded, at the times ``ends``; after each, it rests ``dwell`` s.

    ``commanded`` are the positions in force from their time on.
    """
    rests = [measured.between(end + 0.6 * dwell, end + dwell).position for end in ends]
    goals = commanded.at(np.array(ends) + 0.9 * dwell)
    errors, way = [float(rest.mean()) for rest in rests] - goals, float(goals[0] - goals[1])
    stick = max(0.0, float(errors[1] - errors[0]) / 2 * math.copysign(1, way))
    offset, both = float(errors.mean()), {0.0, min(stick, abs(way) / 3)}  # what moves half as far may seem to stick
    _, delay, gain, stick = min(_fit(commanded, measured, offset, each) for each in both)
    noise, stops = max(float(rest.std()) for rest in rests), []
    moves = commanded.time[1:][np.abs(np.diff(commanded.position)) > 1e-9]
    for end, rest in zip(ends, rests, strict=True):
        ramp = moves[(moves > end - abs(ends[1] - ends[0])) & (moves <= end + 0.05)]
        moved = measured.between(float(ramp[0]), end + dwell)
        speed, when, at = middle(moved)
        if abs(gain - 1) < _SAME:  # the commanded one is known more exactly than a few steps of a staircase
            speed = _slope(ramp[:-1], commanded.at(ramp[:-1]))
        finest = max(3 * noise, abs(speed) * TICK / 2, 1e-4)
        stops.append(_deceleration(moved, speed, (when, at), float(rest.mean()), finest))
    following = float(np.abs(commanded.at(measured.time) - measured.position).max())
    return AxisResponse(gain, offset, stick, delay, following, *min(stops), noise)


def _fit(commanded: Track, measured: Track, offset: float, stick: float) -> tuple[float, float, float, float]:
    """Fit the commands, moved through friction, to what was measured; return misfit, delay, ratio and ``stick``."""
    felt, position = np.empty(len(commanded.time)), float(measured.position[0]) - offset
    for row, command in enumerate(commanded.position.tolist()):  # it rests while its command is nearer than that
        felt[row] = position = min(max(position, command - stick), command + stick)
    delays = np.arange(0.0, LONGEST_DELAY, _FINE)
    shifted = [Track(commanded.time + delay, felt).at(measured.time) for delay in delays]
    misfits = 1 - np.array([np.corrcoef(each, measured.position)[0, 1] ** 2 for each in shifted])
    least = int(misfits.argmin())
    delay = float(delays[misfits <= 1.02 * misfits[least] + 1e-9].mean())
    return float(misfits[least]), delay, _slope(shifted[least], measured.position), stick


def middle(moved: Track) -> tuple[float, float, float]:
    """Return the line through the middle half of a way: slope, and a time and position on it."""
    start, end = moved.position[0], moved.position[-5:].mean()
    share = (moved.position - start) / (end - start) if abs(end - start) > 1e-9 else np.zeros(len(moved.time))
    rows = np.flatnonzero((share > 0.25) & (share < 0.75))
    if len(rows) < 2:  # too fast for the rate of its joint states
        rows = np.unique(np.clip([np.argmax(share > 0.25) - 1, np.argmax(share > 0.25)], 0, len(share) - 1))
    time, position = moved.time[rows], moved.position[rows]
    return _slope(time, position) if len(rows) > 1 else 0.0, float(time.mean()), float(position.mean())


def _slope(x: FloatArray, y: FloatArray) -> float:
    return float(np.polyfit(x - x.mean(), y, 1)[0])


def _deceleration(
    moved: Track, slope: float, point: tuple[float, float], rest: float, finest: float
) -> tuple[float, bool]:
    """Return how fast what moved on a line through ``point`` came to ``rest``, and True if that is a lower bound.

    A parabola from the line to the rest is fitted. What lasts less than a period of the joint states, or covers
    less than three times the ``finest`` distance that their noise lets one see, cannot be told.
    """
    (when, at), speed, late = point, abs(slope), moved.between(point[0], math.inf)
    most = min(speed / float(np.median(np.diff(moved.time))), speed**2 / (2 * finest))
    rates = _RATES[most > _RATES][:, None]  # [R, 1], against times [N]
    if not len(rates):
        return most, True
    time = late.time - when
    brakes = (rest - at) / slope - speed / (2 * rates)  # after the point
    left = np.clip(brakes + speed / rates - time, 0.0, speed / rates)
    curves = np.where(time < brakes, at + slope * time, rest - math.copysign(1.0, slope) * rates / 2 * left**2)
    best = float(rates[np.square(curves - late.position).sum(axis=1).argmin(), 0])
    return best, speed**2 / (2 * best) < 3 * finest
