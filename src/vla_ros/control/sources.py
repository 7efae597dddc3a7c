"""Follows one of several sources of the same data, and detects two sources that alternate. Pure logic.

A restarted driver publishes after its predecessor has ended; two running drivers alternate. Sources are
distinguished by publisher id and by kind of data, because a relay forwards everything under one id.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SECOND = 1_000_000_000
_MEMORY = 2 * _SECOND  # ns; sources and alternations are forgotten after that
_ENOUGH = 5  # alternations between two kinds from one publisher; damaged messages cause fewer
_NOISE = 0.02  # rad or m; noise of a measurement
_FASTER = 1.25  # factor by which a joint may exceed its velocity limit
_JITTER = 0.02  # s between stamp and measurement
_DELAY = 0.1  # s by which the delays of two messages may differ


@dataclass(frozen=True)
class Source:
    """Where the messages of an input come from: a publisher, and one of the sources that it may relay."""

    publisher: bytes  # the publisher's id; b"" if the middleware does not provide one
    kind: Hashable = None  # kind of data, to distinguish two sources with the same publisher


@dataclass(frozen=True)
class Contest:
    """Two sources of the same data that alternate."""

    subject: str
    first: Source
    second: Source


@dataclass
class _Subject:
    """State of the sources of one subject; times are nanoseconds of a steady clock."""

    followed: Source | None = None
    heard: dict[Source, int] = field(default_factory=dict)
    last: Source | None = None
    since: int = 0  # when the last source became the only one heard
    # Pair of sources to the number of their alternations and the time of the last alternation.
    turns: dict[frozenset[Source], tuple[int, int]] = field(default_factory=dict)
    returned: int = -_MEMORY
    contest: Contest | None = None


class Sources:
    """Follows one source per subject until that source is silent. Thread-safe.

    After a change of kind, a publisher is followed again once only the new kind has arrived for ``settle`` seconds,
    so that a single damaged message is never used.
    """

    def __init__(self, settle: float = 0.0) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._subjects: dict[str, _Subject] = {}

    def follows(self, subject: str, source: Source, steady: int, patience: float) -> bool:
        """Record a message; return True if its source is the one to follow.

        ``subject`` is what the message measures (a joint, a camera). Another publisher is followed once the first
        has been silent for ``patience`` seconds. ``steady`` is the time of arrival, nanoseconds of a steady clock.
        """
        with self._lock:
            known = self._subjects.setdefault(subject, _Subject())
            _notice(known, subject, source, steady)
            before = known.followed
            if before is not None and before != source:
                other = before.publisher != source.publisher
                silence = min(_MEMORY, patience * _SECOND if other else min(patience, self._settle) * _SECOND)
                if steady - known.heard.get(before, -_MEMORY) < silence:
                    return False
                if not other and steady - known.since < silence:
                    return False
            known.followed = source
            return True

    def contest(self, steady: int) -> Contest | None:
        """Return two sources of one subject that alternate, or None; ``steady`` is the time in ns."""
        with self._lock:
            for known in self._subjects.values():
                if known.contest is not None and steady - known.returned <= _MEMORY:
                    return known.contest
        return None


def _notice(known: _Subject, subject: str, source: Source, steady: int) -> None:
    """Record a message, and count the alternation if its source was heard before the last one."""
    last, known.last = known.last, source
    known.heard = {each: at for each, at in known.heard.items() if steady - at <= _MEMORY}
    if last is not None and last != source and source in known.heard:
        known.turns = {two: turn for two, turn in known.turns.items() if steady - turn[1] <= _MEMORY}
        two = frozenset((last, source))
        count = known.turns.get(two, (0, 0))[0] + (_ENOUGH if last.publisher != source.publisher else 1)
        known.turns[two] = count, steady
        if count >= _ENOUGH:
            known.returned, known.contest = steady, Contest(subject, last, source)
    if last != source:
        known.since = steady
    known.heard[source] = steady


class Continuity:
    """Separates two trajectories of one joint in the joint states of one publisher.

    A joint within its velocity limit cannot jump from one trajectory to the other. ``speeds`` are the velocity
    limits, rad/s or m/s; a joint without a limit has one trajectory.
    """

    def __init__(self, speeds: Mapping[str, float]) -> None:
        self._speeds = {name: speed for name, speed in speeds.items() if math.isfinite(speed)}
        self._tracks: dict[str, list[_Measured]] = {}

    def track(self, joint: str, position: float, at: int, stamp: int = 0) -> int:
        """Return the index (0 or 1) of the trajectory that a joint's position continues.

        NaN and infinity continue the trajectory that was updated last.

        Args:
            joint: The joint's name.
            position: The joint's measured position.
            at: Time of arrival, nanoseconds of a steady clock.
            stamp: Time of the measurement in nanoseconds; 0 if the driver sets none.
        """
        speed, tracks = self._speeds.get(joint), self._tracks.setdefault(joint, [])
        if speed is None or not math.isfinite(position):
            return max(range(len(tracks)), key=lambda each: tracks[each].at, default=0)
        new = _Measured(position, at, stamp)
        distance = [abs(position - each.position) for each in tracks]
        near = [index for index, each in enumerate(tracks) if distance[index] <= _reach(speed, each, new)]
        if near:
            index = min(near, key=distance.__getitem__)
        elif len(tracks) < 2:
            index = len(tracks)
        else:  # replace the trajectory that was updated longer ago
            index = min((0, 1), key=lambda each: tracks[each].at)
        tracks[index : index + 1] = [new]
        return index


class _Measured(NamedTuple):
    position: float
    at: int
    stamp: int


def _reach(speed: float, before: _Measured, now: _Measured) -> float:
    """Return how far a joint can have moved between two measurements."""
    passed = max(0, now.at - before.at) / _SECOND + _DELAY
    if before.stamp and now.stamp:
        passed = min(passed, abs(now.stamp - before.stamp) / _SECOND + _JITTER)
    return _NOISE + _FASTER * speed * passed
