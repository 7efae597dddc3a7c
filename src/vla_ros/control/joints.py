"""Merges joint states of several drivers, each of which publishes only some joints.

On many robots the drivers of the arm and the gripper both publish on ``/joint_states``, so that no message is
complete.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vla_ros.control.publishers import CompetingSources, Continuity, DataSource, DataSources
from vla_ros.types import FloatArray, JointState

_SECOND = 1_000_000_000
_SETTLE = 0.1  # s; after an impossible jump, a joint is used again if it stays at the new position for this long
_FAR = 0.5  # rad or m; a longer jump of an armed robot is not used however long it lasts
_STOOD = (
    0.1  # rad or m; a joint that is no further from where it was before a silence, or with another driver, stood
)
_FORGOTTEN, _MOST = 4, 256  # timeouts after which a source may be forgotten, if so many joints are remembered


class _Joint(NamedTuple):
    """The last measurement of one joint; velocity and effort are NaN if not published."""

    position: float
    velocity: float
    effort: float
    stamp: int  # nanoseconds of the ROS clock; the time of arrival if the message has no stamp
    stamped: bool
    seen: int  # nanoseconds of the steady clock
    published: float  # Suspension.note_arrival
    publisher: bytes


@dataclass
class _Run:
    """What one source says of a joint, without a silence; nanoseconds of the steady clock."""

    since: int
    heard: int
    agrees: bool = False  # with those before


@dataclass(frozen=True, eq=False)
class MergedJointState:
    """A joint state merged from the newest measurement of every joint."""

    # All joints measured within the timeout, with the stamp of the oldest needed joint. Velocities and efforts are
    # empty if no joint has one.
    joints: JointState
    stamp: int  # the same stamp, or 0 if a needed joint has no stamp, so that its age is unknown
    published: float  # when the oldest needed joint was published (Suspension.note_arrival)


class JointStateMerger:
    """Merges the joint states of several publishers. Thread-safe.

    Args:
        needed: Joints that every command needs (the arm's). If empty, every message is returned unchanged.
        speeds: How fast each joint can move, rad/s or m/s; a joint without a speed is believed anywhere.
        own: The arm's joints, if several arms share the topic; others are dropped. Empty keeps all joints.

    Attributes:
        speeds: As given; assign to change them.
    """

    def __init__(
        self, needed: Iterable[str], speeds: Mapping[str, float] = MappingProxyType({}), own: Iterable[str] = ()
    ) -> None:
        self._needed = frozenset(needed)
        self._own = frozenset(own)
        self._sources = DataSources(_SETTLE)
        self.speeds = speeds
        self._continuity = defaultdict[bytes, Continuity](Continuity)  # by publisher
        self._lock = threading.Lock()
        self._known: dict[str, _Joint] = {}
        self._unbelieved = ""
        self._believed: dict[str, float] = {}  # the last position of each needed joint that was used
        self._runs: dict[tuple[DataSource, str], _Run] = {}  # by source and joint
        self._keeps = False

    def forget(self) -> None:
        """Forget all measurements, because the clock jumped and stamps may repeat; the robot may be elsewhere."""
        with self._lock:
            self._known.clear()
            self._believed.clear()
            self._runs.clear()
            self._continuity.clear()
            self._sources = DataSources(self._sources.settle)

    def keep_trajectory(self, keep: bool) -> None:
        """Say whether a robot that has jumped far stays unbelieved until it is back, not only for a moment."""
        self._keeps = keep

    @property
    def unbelieved(self) -> str:
        """Why the newest joint state of the followed publisher is not used, or "" if it is."""
        with self._lock:
            return self._unbelieved

    def competing(self, steady: int) -> CompetingSources | None:
        """Return two sources that alternate on a needed joint, or None; ``steady`` is the time in ns."""
        return self._sources.competing(steady)

    def add(
        self,
        message: JointState,
        stamp: int,
        steady: int,
        timeout: float,
        publisher: bytes = b"",
        published: float = math.inf,
    ) -> MergedJointState | None:
        """Add a message and return the merged joint state.

        If two publishers measure a needed joint, the first one is used until it stops publishing. Needed joints
        that no message has measured are missing from the result, so that the caller can name them.

        Args:
            message: The message; its stamp is the time of arrival if the publisher sets none.
            stamp: Stamp of the message's header, nanoseconds; 0 if the publisher sets none.
            steady: Time of arrival, nanoseconds of a steady clock.
            timeout: Seconds for which a joint's measurement is valid.
            publisher: Id of the publisher; b"" if unknown.
            published: When the message was published (:meth:`Suspension.note_arrival`).

        Returns:
            None if the message measures no needed joint, and all are known or other arms share the topic; or if it
            is not believed: a joint is where it cannot have moved to (:attr:`unbelieved`), or it is the first of an
            armed robot, with which others must agree for 0.1 s. A message that names a needed joint twice, or has
            more or fewer positions than names, is returned unchanged; it is refused later.
        """
        named = [name for name in message.names if name in self._needed]
        concerns = self._needed.intersection(named)
        contradictory = len(named) > len(concerns) or len(message.names) != len(message.positions)
        if not self._needed or (concerns and contradictory):
            return MergedJointState(message, stamp, published)
        with self._lock:
            self._known = {
                name: joint for name, joint in self._known.items() if steady - joint.seen <= timeout * _SECOND
            }
            numbers = (
                message.positions.tolist(),
                _padded(message.velocities, message),
                _padded(message.efforts, message),
            )
            used, wrong = self._followed(message, concerns, stamp, steady, timeout, publisher)
            if used is None:
                self._unbelieved = wrong
                return None
            concerns = used
            self._unbelieved = "" if concerns else self._unbelieved
            for name, position, velocity, effort in zip(message.names, *numbers, strict=False):
                if (self._own and name not in self._own) or (name in self._needed and name not in concerns):
                    continue
                before = self._known.get(name)
                if before is None or message.stamp >= before.stamp:
                    stamped = bool(stamp)
                    self._known[name] = _Joint(
                        position, velocity, effort, message.stamp, stamped, steady, published, publisher
                    )
            known_needed = [self._known[name] for name in self._needed if name in self._known]
            if not concerns and (self._own or len(known_needed) == len(self._needed)):
                return None
            oldest = min((joint.stamp for joint in known_needed), default=message.stamp)
            known = self._known.values()
            positions = np.array([joint.position for joint in known], dtype=np.float64)
            velocities = _unless_empty([joint.velocity for joint in known])
            efforts = _unless_empty([joint.effort for joint in known])
            publishers = {joint.publisher for joint in known_needed}
            one = publishers.pop() if len(publishers) == 1 else b""
            joints = JointState(tuple(self._known), positions, oldest, velocities, efforts, one)
            stamp = oldest if all(joint.stamped for joint in known_needed) else 0
            earliest = min((joint.published for joint in known_needed), default=published)
            return MergedJointState(joints, stamp, earliest)

    def _followed(
        self,
        message: JointState,
        concerns: frozenset[str],
        stamp: int,
        steady: int,
        timeout: float,
        publisher: bytes,
    ) -> tuple[frozenset[str] | None, str]:
        """Return the joints of ``concerns`` for which the message is used, or None and why it is not believed."""
        if not concerns:
            return concerns, ""
        positions = dict(zip(message.names, message.positions.tolist(), strict=True))
        kinds = {
            each.kind
            for name in concerns
            if (each := self._sources.followed(name)) is not None and each.publisher == publisher
        }
        source = DataSource(
            publisher,
            self._continuity[publisher].track(
                {name: positions[name] for name in sorted(concerns)}, self.speeds, steady, stamp, kinds
            ),
        )
        jumps = {name: abs(positions[name] - self._believed[name]) for name in concerns & self._believed.keys()}
        far = self._keeps and max(jumps.values(), default=0.0) > _FAR
        self._sources.settle = math.inf if far else _SETTLE
        moved = {name: jumps.get(name) for name in concerns}
        agrees = self._agrees(source, moved, steady, timeout, far and not kinds)
        used = [name for name in sorted(concerns) if self._sources.follows(name, source, steady, timeout, agrees)]
        if agrees and (len(used) == len(concerns) or source.kind in kinds or not kinds):
            self._believed |= {name: positions[name] for name in used}
            return frozenset(used), ""
        if not jumps:
            return None, ""
        worst = max(jumps, key=jumps.__getitem__)
        until = "; disarm to use it where it is" if far else ""
        return None, (
            f"joint '{worst}' jumps to {positions[worst]:.4g}, from {self._believed[worst]:.4g}, faster than it "
            f"can move ({self.speeds.get(worst, math.inf):.3g} rad/s or m/s){until}"
        )

    def _agrees(
        self, source: DataSource, jumps: Mapping[str, float | None], steady: int, timeout: float, never: bool
    ) -> bool:
        """Return True if a message agrees with others: a first one, also after a silence, is no better than a jump.

        ``jumps`` says how far each of its joints is from where it was believed to be, or None. It agrees with that,
        or with those before it for 0.1 s, unless ``never``. While nothing is armed, the very first one is used.
        """
        silence = timeout * _SECOND
        if len(self._runs) > _MOST:
            self._runs = {
                each: run for each, run in self._runs.items() if steady - run.heard <= _FORGOTTEN * silence
            }
        agrees = True
        for name, jump in jumps.items():
            run = self._runs.setdefault((source, name), _Run(steady, steady))
            if run.agrees and steady - run.heard > silence:
                run.since, run.agrees = steady, False
            run.heard = steady
            run.agrees |= not self._keeps if jump is None else jump <= _STOOD
            run.agrees |= name not in self.speeds or (steady - run.since >= _SETTLE * _SECOND and not never)
            agrees &= run.agrees
        return agrees


def together(states: Iterable[JointState]) -> JointState | None:
    """Concatenate ``states`` into one joint state with the oldest stamp; None without states."""
    each = tuple(states)
    if len(each) < 2:
        return each[0] if each else None
    return JointState(
        tuple(name for state in each for name in state.names),
        np.concatenate([state.positions for state in each]),
        min(state.stamp for state in each),
        _unless_empty([value for state in each for value in _padded(state.velocities, state)]),
        _unless_empty([value for state in each for value in _padded(state.efforts, state)]),
    )


def _padded(values: FloatArray, state: JointState) -> list[float]:
    """Return the velocities or efforts of all joints; NaN if the message has none."""
    return values.tolist() if len(values) == len(state.names) else [math.nan] * len(state.names)


def _unless_empty(values: list[float]) -> FloatArray:
    """Return the values, or an empty array if no joint has one."""
    return np.zeros(0) if all(map(math.isnan, values)) else np.array(values)
