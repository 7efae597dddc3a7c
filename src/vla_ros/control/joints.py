"""The arm's joint state, whoever publishes it: one driver, or several that each tell of some joints.

On many robots the arm's and the gripper's drivers publish on the same ``/joint_states``, each its own joints, as
``joint_state_publisher``'s ``source_list`` merges them elsewhere. None of their messages is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from vla_ros.control.sources import Contest, Continuity, Source, Sources
from vla_ros.types import JointState

_SECOND = 1_000_000_000
_SETTLE = 0.1  # s; a joint that jumps further than it can move is believed where it stays for so long


@dataclass(frozen=True)
class _Joint:
    """What was said of one joint last."""

    position: float
    stamp: int  # ROS clock; the time of arrival where the message has no stamp
    stamped: bool
    seen: int  # steady clock


@dataclass(frozen=True, eq=False)
class Whole:
    """A joint state made of the newest of every joint.

    Attributes:
        joints: Positions of all joints that were heard of within the timeout; its stamp is that of the oldest
            among the needed joints.
        stamp: The same, or 0 where one of those came without a stamp: its age is not known then.
    """

    joints: JointState
    stamp: int


class JointStates:
    """Puts the joint states of several publishers together. Safe to use from several threads.

    Args:
        needed: Joints without which nothing can be commanded (the arm's). Empty gives every message back as it is.
        speeds: Velocity limits of joints, where they are known.
    """

    def __init__(self, needed: Iterable[str], speeds: Mapping[str, float] = MappingProxyType({})) -> None:
        self._needed = frozenset(needed)
        self._sources = Sources(_SETTLE)
        self._continuity = Continuity(speeds)
        self._lock = threading.Lock()
        self._known: dict[str, _Joint] = {}

    def forget(self) -> None:
        """Forget everything (the clock jumped: stamps may come again)."""
        with self._lock:
            self._known.clear()

    def contest(self, steady: int) -> Contest | None:
        """Two that tell of one needed joint in turn, at a time of the steady clock."""
        return self._sources.contest(steady)

    def add(
        self, message: JointState, stamp: int, steady: int, timeout: float, publisher: bytes = b""
    ) -> Whole | None:
        """A message came.

        Of a needed joint that two publishers tell of, the one is believed that was heard first, until it is silent.

        Args:
            message: Its joints; its stamp is the time of arrival where the publisher gives none.
            stamp: What its header says, nanoseconds; 0 for none.
            steady: When it came, nanoseconds of a steady clock.
            timeout: Seconds for which what was said of a joint counts.
            publisher: Id of whoever sent it; b"" where it is not known.

        Returns:
            The newest of everything, or None where the message told nothing about a needed joint while all of
            those are known. Where needed joints are missing, the answer lacks them, so that whoever asks for them
            says which. A message with other numbers of names and positions comes back as it is, to be refused.
        """
        concerns = self._needed.intersection(message.names)
        if not self._needed or (concerns and len(message.names) != len(message.positions)):
            return Whole(message, stamp)
        with self._lock:
            self._known = {
                name: joint for name, joint in self._known.items() if steady - joint.seen <= timeout * _SECOND
            }
            for name, position in zip(message.names, message.positions.tolist(), strict=False):
                if name in concerns:
                    source = Source(publisher, self._continuity.track(name, position, steady))
                    if not self._sources.follows(name, source, steady, timeout):
                        concerns -= {name}
                        continue
                known = self._known.get(name)
                if known is None or message.stamp >= known.stamp:
                    self._known[name] = _Joint(position, message.stamp, bool(stamp), steady)
            known_needed = [self._known[name] for name in self._needed if name in self._known]
            if not concerns and len(known_needed) == len(self._needed):
                return None
            oldest = min((joint.stamp for joint in known_needed), default=message.stamp)
            positions = np.array([joint.position for joint in self._known.values()], dtype=np.float64)
            joints = JointState(tuple(self._known), positions, oldest)
            return Whole(joints, oldest if all(joint.stamped for joint in known_needed) else 0)
