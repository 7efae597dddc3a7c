"""The joint states that the guard has received by itself, and the one that a frame names."""

from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np

from vla_ros.guard.frames import PUBLISHER_BYTES
from vla_ros.types import FloatArray, JointState

_MOST = 2048  # joint states; two seconds at 1 kHz
_PUBLISHERS = 64  # remembered; all are forgotten beyond that
_JUMP = 500_000_000  # ns; one that is older by more is late, or follows a jump, after which the node holds
_SILENT = 50_000_000  # ns; two joint states of a publisher are seldom further apart
_LONG = 2_000_000_000  # ns; more than a joint state may be late
_NEWEST = 512  # among which a frame's joint state is
_NEAR = 1.0  # s; a joint state without any other this near is unknown
_SOON = 0.1  # s; one that has not arrived yet is not far from one this near
_AROUND = 20_000_000  # ns; a joint state without a stamp is dated by its arrival, which differs by less


@dataclass(frozen=True, eq=False)
class MeasuredRange:
    """Where an arm was: ``low`` and ``high`` [N] are equal if the joint state itself is known."""

    low: FloatArray
    high: FloatArray
    arrived: int  # nanoseconds of the monotonic clock
    exact: bool  # the joint state itself has arrived
    certain: bool = False  # it may still arrive: what is checked must hold wherever the arm was in the range

    def nearest(self, positions: FloatArray) -> FloatArray:
        """Return the measured positions [N] that count for ``positions`` [N]: nearest, or if certain farthest."""
        if self.certain:
            return np.where(np.abs(positions - self.low) > np.abs(positions - self.high), self.low, self.high)
        return np.clip(positions, self.low, self.high)


@dataclass(frozen=True, eq=False)
class _Entry:
    stamp: int
    publisher: bytes
    arrived: int
    positions: FloatArray  # [N]; NaN for joints that the message lacks


class JointHistory:
    """The newest joint states with any of an arm's joints ``names``, from every publisher.

    Attributes:
        stamped: True if they have stamps.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._entries: deque[_Entry] = deque(maxlen=_MOST)
        self._void = 0  # nothing that arrived until then counts, because the clock was set back
        # Of each publisher: its newest stamp, when that arrived, and the same as _void as long as it is not known
        # whether the clock was set back, else 0.
        self._publishers: dict[bytes, tuple[int, int, int]] = {}
        self.stamped = True
        self._whole = True  # no message has lacked any of the joints

    def add(self, message: JointState, publisher: bytes, arrived: int, *, stamped: bool) -> None:
        """Add a message; its stamp is its time of arrival on the ROS clock if it has none."""
        known, stamp = dict(zip(message.names, message.positions.tolist(), strict=False)), message.stamp
        row, self.stamped = np.array([known.get(name, np.nan) for name in self._names]), stamped
        if np.isfinite(row).any():
            publisher = publisher[:PUBLISHER_BYTES].ljust(PUBLISHER_BYTES, b"\0")
            if len(self._publishers) > _PUBLISHERS:
                self._publishers.clear()
            newest, since, doubt = self._publishers.get(publisher, (stamp, arrived, 0))
            # Late, or the clock was set back: then nothing newer follows, and stamps may repeat.
            if stamp < newest - _JUMP:
                self._void = max(self._void, arrived - _JUMP)  # which may have had the stamps that follow
                doubt = since if arrived - since > _SILENT else doubt
            if doubt and arrived - since > _JUMP:
                self._void, newest = doubt, stamp
            if stamp >= newest:
                newest, since, doubt = stamp, arrived, 0
            self._publishers[publisher] = newest, since, doubt
            self._whole &= bool(np.isfinite(row).all())
            self._entries.append(_Entry(stamp, publisher, arrived, row))

    def find(self, stamp: int, publisher: bytes, speeds: FloatArray | None = None) -> MeasuredRange | None:
        """Return where the arm was in the joint state that a frame names, or None if nothing is known of it yet.

        A joint that no message of this ``stamp`` has, because the message was lost on its way to this process,
        was between its measurements before and after it, or as far beyond them as its speed allows, ``speeds`` [N];
        without ``speeds``, only the joint state itself is looked for, which is quick.
        One that a later message has, which lacks other joints, may have been used from there. Publishers whose ids
        differ between processes (Cyclone DDS under rclpy) are known by the stamp alone.
        """
        count, of_one = len(self._names), publisher in self._publishers
        void, doubt = self._void, max((doubt for *_, doubt in self._publishers.values()), default=0)
        # If the clock was set back, no stamp comes again before those that have arrived since then reach it.
        if doubt and stamp < _SOON * 1e9 + max(each.stamp for each in self._entries if each.arrived > doubt):
            void = max(void, doubt)
        for entry in reversed(self._entries) if self._whole else ():
            if entry.arrived <= void or entry.stamp < stamp - _LONG:
                break
            if entry.stamp == stamp and (entry.publisher == publisher or not of_one):
                return MeasuredRange(entry.positions, entry.positions, entry.arrived, exact=True)
        if speeds is None:
            return None
        newest = islice(reversed(self._entries), _NEWEST)
        valid = (each for each in newest if each.arrived > void and (each.publisher == publisher or not of_one))
        recent = sorted(valid, key=attrgetter("stamp"), reverse=True)
        passed = exact = any(entry.stamp == stamp for entry in recent)
        low, high = np.full(count, np.inf), np.full(count, -np.inf)
        away, before = np.full(count, np.inf), np.zeros(count, np.bool_)
        for entry in recent:
            known = np.isfinite(entry.positions)
            passed |= entry.stamp >= stamp - (0 if self.stamped else _AROUND)
            if entry.stamp > stamp and exact and known.all():
                continue
            new = known & ~before
            low[new] = np.minimum(low[new], entry.positions[new])
            high[new] = np.maximum(high[new], entry.positions[new])
            away[new] = np.minimum(away[new], abs(entry.stamp - stamp) / 1e9)
            before |= known & (entry.stamp <= stamp)
            if before.all():
                break
        if not np.all(away < (_NEAR if passed else _SOON)):
            return None
        arrived = min(recent, key=lambda entry: abs(entry.stamp - stamp)).arrived
        return MeasuredRange(low - speeds * away, high + speeds * away, arrived, exact, certain=not passed)
