"""What the curves of one joint, and the times of messages, say. Pure functions of arrays.

Times are seconds of this machine's steady clock, positions radians or metres.
"""

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.types import FloatArray

LONGEST_DELAY = 1.0  # s
_SAME = 0.1  # share by which a measured speed may differ from the commanded one
_FINE = 0.002  # s, of the search for a delay
_EDGES = np.geomspace(0.05, 200.0, 240)  # rad/s^2 or m/s^2, of the search for a deceleration


@dataclass(frozen=True, eq=False)
class Track:
    """Positions of a joint over time, both float64 [N], with times ascending."""

    time: FloatArray
    position: FloatArray

    def between(self, begin: float, end: float) -> "Track":
        inside = (self.time >= begin) & (self.time < end)
        return Track(self.time[inside], self.position[inside])

    @property
    def mean(self) -> float:
        return float(self.position.mean()) if len(self.position) else math.nan


@dataclass(frozen=True)
class Rhythm:
    """When the messages of a topic come, seconds."""

    rate_hz: float
    jitter: float  # 95th percentile of the deviation from the median period
    longest: float  # between two arrivals
    age: float  # median of arrival minus stamp: transport and the difference of the clocks; NaN without stamps


def rhythm(arrived: FloatArray, stamped: FloatArray) -> Rhythm:
    """Return the rhythm of messages that ``arrived``, with their stamps (0: none), both [N] in seconds."""
    gaps = np.diff(arrived)
    if not len(gaps):
        return Rhythm(0.0, math.nan, math.inf, math.nan)
    has_stamps = bool(stamped.all())
    periods = np.diff(stamped) if has_stamps else gaps
    jitter = float(np.percentile(np.abs(periods - np.median(periods)), 95))
    age = float(np.median(arrived - stamped)) if has_stamps else math.nan
    return Rhythm(len(gaps) / float(arrived[-1] - arrived[0]), jitter, float(gaps.max()), age)


@dataclass(frozen=True)
class JointResponse:
    """How a joint follows a ramp out and a ramp back; rad or m and s."""

    gain: float  # measured speed per commanded speed: 1, -1 with a wrong sign, 57.3 in degrees
    offset: float  # measured minus commanded position at rest, mean of both directions of approach
    stick: float  # half the difference of both: friction and backlash
    delay: float  # from a command to the motion that it causes
    following: float  # largest distance between command and measurement
    deceleration: float  # rad/s^2 or m/s^2 from this speed to rest; a lower bound if it is ``at_least``
    at_least: bool
    noise: float  # standard deviation at rest


def measure_motion(commanded: Track, measured: Track, ends: tuple[float, float], dwell: float) -> JointResponse:
    """Measure a motion whose two ramps end, as commanded, at the times ``ends``; after each, it rests ``dwell`` s.

    ``commanded`` are the positions in force from their time on.
    """
    rests = [measured.between(end + 0.6 * dwell, end + dwell) for end in ends]
    goals = [float(_in_force(commanded, np.array([end + 0.9 * dwell]))[0]) for end in ends]
    errors = [rest.mean - goal for rest, goal in zip(rests, goals, strict=True)]
    way = goals[0] - goals[1]
    offset, stick = (errors[0] + errors[1]) / 2, max(0.0, (errors[1] - errors[0]) / 2 * math.copysign(1, way))
    noise = max(float(rest.position.std()) for rest in rests)
    delay = _delay(commanded, measured, offset, stick if stick < abs(way) / 4 else 0.0)
    moves = _moving(commanded, *ends)
    ramps = [measured.between(begin, end + dwell) for begin, end in moves]
    slopes = [middle(ramp) for ramp in ramps]
    speeds = [_slope(commanded.between(begin, end - 1e-9)) for begin, end in moves]
    # By the ramps, which friction does not change, or by the whole way, which noise changes less.
    gains = [_gain(commanded, measured, delay, begin, end) for begin, end in moves]
    gain = min(float(np.mean(gains)), (rests[0].mean - rests[1].mean) / way, key=lambda each: abs(each - 1))
    if abs(gain - 1) < _SAME:  # the line's slope is known, and more exactly than from a few steps of a staircase
        slopes = [(speed, when, at) for speed, (_, when, at) in zip(speeds, slopes, strict=True)]
    steps = np.abs(np.diff(commanded.position))
    step = float(np.percentile(steps[steps > 1e-9], 90))
    finest = max(3 * noise, step / 2, 1e-4)
    stops = [
        _deceleration(ramp, line, rest.mean, finest) for ramp, line, rest in zip(ramps, slopes, rests, strict=True)
    ]
    slowest, at_least = min(stops)
    distance = np.abs(_in_force(commanded, measured.time) - measured.position)
    return JointResponse(gain, offset, stick, delay, float(distance.max()), slowest, at_least, noise)


def _gain(commanded: Track, measured: Track, delay: float, begin: float, end: float) -> float:
    """Return the slope of measured over commanded positions in a ramp's later part, where friction is overcome."""
    moved = measured.between(begin + delay + 0.4 * (end - begin), end + delay)
    return _slope(Track(_in_force(commanded, moved.time - delay), moved.position))


def _in_force(commanded: Track, when: FloatArray) -> FloatArray:
    """Return the commanded positions in force at the times ``when``."""
    rows = np.searchsorted(commanded.time, when, side="right") - 1
    positions: FloatArray = commanded.position[np.maximum(rows, 0)]
    return positions


def _moving(commanded: Track, *ends: float) -> list[tuple[float, float]]:
    """Return when each ramp that ends at one of ``ends`` begins and ends."""
    changes = np.flatnonzero(np.abs(np.diff(commanded.position)) > 1e-9)
    found, after = [], -math.inf
    for end in ends:
        times = commanded.time[changes + 1]
        inside = times[(times > after) & (times <= end + 0.05)]
        found.append((float(inside[0]), float(inside[-1])))
        after = end + 0.05
    return found


def _delay(commanded: Track, measured: Track, offset: float, stick: float) -> float:
    """Return the delay at which the commands, moved through friction, fit what was measured, in whatever unit."""
    felt = Track(commanded.time, _play(commanded.position, measured.position[0] - offset, stick))
    delays = np.arange(0.0, LONGEST_DELAY, _FINE)
    shifted = (_in_force(felt, measured.time - delay) for delay in delays)
    misfits = 1 - np.array([np.corrcoef(each, measured.position)[0, 1] ** 2 for each in shifted])
    return float(delays[misfits <= 1.02 * misfits.min() + 1e-9].mean())


def _play(commands: FloatArray, start: float, half: float) -> FloatArray:
    """Return where a joint goes that begins at ``start`` and rests while its command is nearer than ``half``."""
    felt, at = np.empty(len(commands)), start
    for row, command in enumerate(commands.tolist()):
        at = min(max(at, command - half), command + half)
        felt[row] = at
    return felt


def middle(moved: Track) -> tuple[float, float, float]:
    """Return the line through the middle half of a way: slope, and a time and position on it."""
    start, end = moved.position[0], moved.position[-5:].mean()
    share = (moved.position - start) / (end - start) if abs(end - start) > 1e-9 else np.zeros(len(moved.time))
    rows = np.flatnonzero((share > 0.25) & (share < 0.75))
    if len(rows) < 2:  # too fast for the rate of its joint states
        rows = np.unique(np.clip([np.argmax(share > 0.25) - 1, np.argmax(share > 0.25)], 0, len(share) - 1))
    half = Track(moved.time[rows], moved.position[rows])
    return _slope(half), float(half.time.mean()), half.mean


def _slope(track: Track) -> float:
    """Return the slope of the line through a track; 0 for a single point."""
    if len(track.time) < 2 or not np.ptp(track.time):
        return 0.0
    return float(np.polyfit(track.time - track.time.mean(), track.position, 1)[0])


def _deceleration(moved: Track, line: tuple[float, float, float], rest: float, finest: float) -> tuple[float, bool]:
    """Return how fast a joint on ``line`` came to ``rest``, and True if that is a lower bound.

    A parabola from the line to the rest is fitted. What lasts less than a period of the joint states, or covers
    less than three times the ``finest`` distance that their noise lets one see, cannot be told.
    """
    slope, time, position = line
    speed, sign = abs(slope), math.copysign(1.0, slope)
    period = float(np.median(np.diff(moved.time)))
    most = min(speed / period, speed**2 / (2 * finest))
    tried = _EDGES[most > _EDGES]
    if not len(tried):
        return most, True
    misfits = []
    for rate in tried.tolist():
        brakes = time + (rest - sign * speed**2 / (2 * rate) - position) / slope
        left = np.clip(brakes + speed / rate - moved.time, 0.0, speed / rate)
        curve = np.where(
            moved.time < brakes, position + slope * (moved.time - time), rest - sign * rate / 2 * left**2
        )
        seen = moved.time > time
        misfits.append(float(np.square(curve - moved.position)[seen].sum()))
    best = float(tried[int(np.argmin(misfits))])
    return best, speed**2 / (2 * best) < 3 * finest
