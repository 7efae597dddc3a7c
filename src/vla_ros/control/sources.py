"""Follows one of several sources of the same data, and detects two that alternate. Pure logic.

A restarted driver publishes after its predecessor; two running drivers alternate. Sources are distinguished by
their publisher's id and by the kind of their data, because a relay has one id for everything it forwards.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SECOND = 1_000_000_000
_MEMORY = 2 * _SECOND  # ns; a source that was silent for longer begins anew, and a contest ends
_ENOUGH = 5  # turns of two kinds of one publisher that are no accident (bits that flip on the way)
_NOISE = 0.02  # rad or m, of a measurement
_FASTER = 1.25  # than its velocity limit a joint may be
_JITTER = 0.02  # s, between stamp and measurement
_DELAY = 0.1  # s, by which messages may be delayed differently


@dataclass(frozen=True)
class Source:
    """A source of data."""

    publisher: bytes  # its id; b"" if the middleware does not provide one
    kind: Hashable = None  # distinguishes two sources behind one publisher


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
    since: int = 0  # when the last one began to be the only one heard
    turns: dict[frozenset[Source], tuple[int, int]] = field(default_factory=dict)  # of two: how many, and the last
    returned: int = -_MEMORY
    contest: Contest | None = None


class Sources:
    """Follows one source per subject until it is silent. Thread-safe.

    Another kind of the same publisher is followed once it alone has been heard for ``settle`` seconds: a single
    wrong message is never followed.
    """

    def __init__(self, settle: float = 0.0) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._subjects: dict[str, _Subject] = {}

    def follows(self, subject: str, source: Source, steady: int, patience: float) -> bool:
        """Return True if ``source`` is the one to follow for ``subject`` (a joint, a camera).

        Another publisher is followed after ``patience`` seconds of silence. ``steady`` is in nanoseconds.
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
        """Return two sources of the same subject that currently alternate."""
        with self._lock:
            for known in self._subjects.values():
                if known.contest is not None and steady - known.returned <= _MEMORY:
                    return known.contest
        return None


def _notice(known: _Subject, subject: str, source: Source, steady: int) -> None:
    """Count a source that publishes again after another one did."""
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
    """Separates two trajectories of one joint that no velocity limit explains, if publishers are indistinguishable.

    ``speeds`` are the joints' velocity limits, rad/s or m/s; joints without one count as continuous.
    """

    def __init__(self, speeds: Mapping[str, float]) -> None:
        self._speeds = {name: speed for name, speed in speeds.items() if math.isfinite(speed)}
        self._tracks: dict[str, list[_Measured]] = {}

    def track(self, joint: str, position: float, at: int, stamp: int = 0) -> int:
        """Return which trajectory of a joint this position continues, 0 or 1.

        NaN and infinity belong to the trajectory updated last.

        Args:
            joint: The joint's name.
            position: Its measured position.
            at: Time of arrival, nanoseconds of a steady clock.
            stamp: Time of the measurement in nanoseconds; 0 if the driver sets none.
        """
        speed, tracks = self._speeds.get(joint), self._tracks.setdefault(joint, [])
        oldest_first = sorted(range(len(tracks)), key=lambda each: tracks[each].at)
        if speed is None or not math.isfinite(position):
            return oldest_first[-1] if tracks else 0
        new = _Measured(position, at, stamp)
        distance = [abs(position - each.position) for each in tracks]
        near = [index for index, each in enumerate(tracks) if distance[index] <= _reach(speed, each, new)]
        free = oldest_first[0] if len(tracks) == 2 else len(tracks)
        index = min(near, key=distance.__getitem__, default=free)
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
