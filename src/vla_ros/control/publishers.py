"""Publishers of the same data: follows one of them, detects two that compete, and names their nodes. Pure logic.

A restarted driver publishes after its predecessor has ended; two running drivers alternate. DataSources are
distinguished by publisher id and by kind of data, because a relay forwards everything under one id.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vla_ros.errors import one_line

ANY = "*"
"""Entry of ``topics.command_shared_with`` that allows every node."""

_GID_BYTES = 16  # length of a DDS GUID; before Iron, rmw pads it to 24 bytes
_UNNAMED = ("", "_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_")  # rmw's names for an unknown node

_SECOND = 1_000_000_000
_MEMORY = 2 * _SECOND  # ns; sources and alternations are forgotten after that
_ENOUGH = 5  # alternations between two kinds from one publisher; damaged messages cause fewer
_NOISE = 0.02  # rad or m; noise of a measurement
_FASTER = 1.25  # factor by which a joint may exceed its velocity limit
_JITTER = 0.02  # s between stamp and measurement
_DELAY = 0.1  # s by which the delays of two messages may differ


class DataSource(NamedTuple):
    """Where the messages of an input come from: a publisher, and one of the sources that it may relay."""

    publisher: bytes  # the publisher's id; b"" if the middleware does not provide one
    kind: Hashable = None  # kind of data, to distinguish two sources with the same publisher


@dataclass(frozen=True)
class CompetingSources:
    """Two sources of the same data that alternate."""

    subject: str
    first: DataSource
    second: DataSource


@dataclass
class _Subject:
    """State of the sources of one subject; times are nanoseconds of a steady clock."""

    followed: DataSource | None = None
    heard: dict[DataSource, int] = field(default_factory=dict)
    last: DataSource | None = None
    since: int = 0  # when the last source became the only one heard
    # Pair of sources to the number of their alternations and the time of the last alternation.
    turns: dict[frozenset[DataSource], tuple[int, int]] = field(default_factory=dict)
    returned: int = -_MEMORY
    competing: CompetingSources | None = None


class DataSources:
    """Accepts the messages of one publisher per subject, a joint or a camera, until it is silent. Thread-safe.

    The kind of its messages tells apart sources that it relays. After a change of kind, it is followed again once
    only the new kind has arrived for ``settle`` seconds, so that a single damaged message is never used; with
    infinity, only once the old kind is back.
    """

    def __init__(self, settle: float = 0.0) -> None:
        self.settle = settle
        self._lock = threading.Lock()
        self._subjects = defaultdict[str, _Subject](_Subject)

    def follows(self, subject: str, source: DataSource, steady: int, patience: float, agrees: bool = True) -> bool:
        """Record a message; return True if its source is the one to follow.

        ``subject`` is what the message measures (a joint, a camera). Another publisher is followed once the first
        has been silent for ``patience`` seconds, and its messages agree (``agrees``). ``steady`` is the time of
        arrival, nanoseconds of a steady clock.
        """
        with self._lock:
            known = self._subjects[subject]
            _notice(known, subject, source, steady)
            if not agrees:
                return False
            before = known.followed
            if before is not None and before != source:
                other = before.publisher != source.publisher
                if not other and math.isinf(self.settle):
                    return False
                silence = min(_MEMORY, patience * _SECOND if other else min(patience, self.settle) * _SECOND)
                if steady - known.heard.get(before, -_MEMORY) < silence:
                    return False
                if not other and steady - known.since < silence:
                    return False
            known.followed = source
            return True

    def followed(self, subject: str) -> DataSource | None:
        """Return the source of ``subject`` that is followed, or None before the first."""
        with self._lock:
            known = self._subjects.get(subject)
            return known.followed if known is not None else None

    def competing(self, steady: int) -> CompetingSources | None:
        """Return two sources of one subject that alternate, or None; ``steady`` is the time in ns."""
        with self._lock:
            for known in self._subjects.values():
                if known.competing is not None and steady - known.returned <= _MEMORY:
                    return known.competing
        return None


def _notice(known: _Subject, subject: str, source: DataSource, steady: int) -> None:
    """Record a message, and count the alternation if its source was heard before the last one."""
    last, known.last = known.last, source
    known.heard = {each: at for each, at in known.heard.items() if steady - at <= _MEMORY}
    if last is not None and last != source and source in known.heard:
        known.turns = {two: turn for two, turn in known.turns.items() if steady - turn[1] <= _MEMORY}
        two = frozenset((last, source))
        count = known.turns.get(two, (0, 0))[0] + (_ENOUGH if last.publisher != source.publisher else 1)
        known.turns[two] = count, steady
        if count >= _ENOUGH:
            known.returned, known.competing = steady, CompetingSources(subject, last, source)
    if last != source:
        known.since = steady
    known.heard[source] = steady


class Continuity:
    """Separates the trajectories of a robot in the joint states of one publisher.

    A joint cannot jump from one trajectory to another faster than it moves. One joint that does decides for the
    whole joint state: in a damaged one, the positions that a joint could have are no better than the others.
    """

    def __init__(self) -> None:
        self._tracks: dict[int, _Track] = {}
        self._number = 0

    def track(
        self,
        positions: Mapping[str, float],
        speeds: Mapping[str, float],
        at: int,
        stamp: int = 0,
        keep: Collection[Hashable] = (),
    ) -> int:
        """Return the number of the trajectory that a joint state continues; each new one has a new number.

        A joint that is not finite, or has no speed, continues any. Besides the newest trajectory, those of ``keep``
        are remembered, or else the one that was continued last.

        Args:
            positions: Measured positions by joint, those of a part of the joints or of all.
            speeds: How fast joints can move, rad/s or m/s.
            at: Time of arrival, nanoseconds of a steady clock.
            stamp: Time of the measurement in nanoseconds; 0 if the driver sets none.
            keep: The trajectories that are followed.
        """
        new = {
            name: _Measured(position, at, stamp)
            for name, position in positions.items()
            if math.isfinite(position) and math.isfinite(speeds.get(name, math.inf))
        }
        ranked = sorted((_mismatch(track, new, speeds), number) for number, track in self._tracks.items())
        if ranked and ranked[0][0].jump <= 1.0:
            number = ranked[0][1]
            track = self._tracks[number]
        else:
            spare = sorted(
                (each for each in self._tracks if each not in keep), key=lambda each: self._tracks[each].at
            )
            for each in spare if len(spare) < len(self._tracks) else spare[:-1]:
                del self._tracks[each]
            number, track = self._number, _Track({}, at)
            self._tracks[number], self._number = track, self._number + 1
        track.joints.update(new)
        track.at = at
        return number


class _Measured(NamedTuple):
    position: float
    at: int
    stamp: int


@dataclass
class _Track:
    joints: dict[str, _Measured]  # newest position of each joint
    at: int  # when it was continued last, nanoseconds of a steady clock


class _Mismatch(NamedTuple):
    """How badly a joint state continues a trajectory; the smallest fits best."""

    jump: float  # largest motion of a joint, as a share of what it can have moved; 0 up to 1, when nothing is wrong
    unknown: int  # joints that the trajectory does not have
    share: float  # as ``jump``
    silent: int


def _mismatch(track: _Track, new: Mapping[str, _Measured], speeds: Mapping[str, float]) -> _Mismatch:
    shares = [
        abs(now.position - before.position) / _reach(speeds[name], before, now)
        for name, now in new.items()
        if (before := track.joints.get(name)) is not None
    ]
    share = max(shares, default=0.0)
    return _Mismatch(share if share > 1.0 else 0.0, len(new) - len(shares), share, -track.at)


def _reach(speed: float, before: _Measured, now: _Measured) -> float:
    """Return how far a joint can have moved between two measurements."""
    passed = max(0, now.at - before.at) / _SECOND + _DELAY
    if before.stamp and now.stamp:
        passed = min(passed, abs(now.stamp - before.stamp) / _SECOND + _JITTER)
    return _NOISE + _FASTER * speed * passed


def gid_of(gid: Iterable[int]) -> bytes:
    """Return the id of an endpoint, from rclpy or the embedded participant, without padding."""
    return bytes(gid)[:_GID_BYTES]


def node_of(endpoint: Any) -> str:
    """Return the full name of an endpoint's node, or "" if it is unknown."""
    if endpoint.node_name in _UNNAMED:
        return ""
    return one_line(f"{endpoint.node_namespace.rstrip('/')}/{endpoint.node_name}")


def other_publishers(endpoints: Iterable[Any], own: bytes, allowed: Collection[str] = ()) -> Mapping[bytes, str]:
    """Map the id of each other publisher of a topic to its node's full name ("" if unknown).

    ``endpoints`` come from ``get_publishers_info_by_topic``, ``own`` is the id of this node's publisher, and
    ``allowed`` names nodes that may publish, or contains :data:`ANY`.
    """
    if ANY in allowed:
        return {}
    found = {gid_of(endpoint.endpoint_gid): node_of(endpoint) for endpoint in endpoints}
    return {gid: node for gid, node in found.items() if gid != own and (not node or node not in allowed)}


def name_nodes(found: Mapping[bytes, str], more: Iterable[str] = ()) -> str:
    """Return the node names in ``found`` (from :func:`other_publishers`) and in ``more`` as text."""
    names = {node or f"an unknown node (gid {gid.hex('.')})" for gid, node in found.items()}
    return " and ".join(sorted(names.union(more)))


def describe_competing(competing: CompetingSources, topic: str, endpoints: Iterable[Any]) -> tuple[str, bool]:
    """Return a sentence that names both sources, and True if both nodes are known.

    ``endpoints`` come from ``get_publishers_info_by_topic``.
    """
    known = {gid_of(endpoint.endpoint_gid): node_of(endpoint) for endpoint in endpoints}
    two = {source.publisher for source in (competing.first, competing.second)}
    # If an id is unknown to discovery, all publishers of the topic are named.
    who = {gid: known[gid] for gid in two} if two <= known.keys() else known
    is_named = all(who.values()) and len(who) >= len(two)
    names = name_nodes(who) or "nobody known"
    what = "" if competing.subject == topic else f"{competing.subject} "
    if len(two) == 2:
        return f"{names} publish {what}on {topic} in turn", is_named
    kinds = f"{competing.first.kind} and {competing.second.kind}"
    alternating = f"two positions of {what}that no velocity limit allows, " if what else f"{kinds} "
    return f"{names} publishes {alternating}in turn on {topic}", is_named
