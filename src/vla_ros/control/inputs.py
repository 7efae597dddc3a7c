"""The newest of everything besides images: joint state, further feeds, the instruction.

Receiving threads write, the working thread reads one consistent snapshot. Nothing is queued.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from vla_ros.control.clock import Clock
from vla_ros.types import JointState


@dataclass(frozen=True)
class Snapshot:
    """The inputs at one moment.

    Attributes:
        joints: Newest joint state, or None before the first.
        state: Feed name to its newest message.
        instruction: Newest instruction, "" before the first.
        epoch: Grows with every new task: what was inferred in an earlier epoch is void.
    """

    joints: JointState | None = None
    state: Mapping[str, JointState] = field(default_factory=lambda: MappingProxyType({}))
    instruction: str = ""
    epoch: int = 0


_REMEMBERED = 1024  # joint states: a second at the fastest drivers' 1 kHz


class Inputs:
    """Thread-safe store of the newest inputs, and of the last joint states by stamp."""

    def __init__(self, clock: Clock, instruction: str = "") -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._history: deque[JointState] = deque(maxlen=_REMEMBERED)
        self._snapshot = Snapshot(instruction=instruction.strip())
        self._joints_seen = -math.inf  # steady clock

    @property
    def snapshot(self) -> Snapshot:
        """The newest inputs; never waits."""
        return self._snapshot

    def set_joints(self, joints: JointState) -> None:
        """Store a measured joint state."""
        with self._changed:
            self._snapshot = replace(self._snapshot, joints=joints)
            self._joints_seen = self._clock.steady()
            self._history.append(joints)
            self._changed.notify_all()

    def fresh_joints(self, timeout: float) -> JointState | None:
        """The newest joint state where it came within ``timeout`` seconds, else None.

        A command built on an older one must not be sent, even if a fresh one arrives and ends the hold before the
        command goes out: the arm may have moved meanwhile.
        """
        with self._changed:
            joints, age = self._snapshot.joints, self._clock.steady() - self._joints_seen
        return joints if age <= timeout else None

    def joints_at(self, stamp: int, tolerance: float = 0.1) -> JointState | None:
        """The joint state measured nearest to ``stamp``, or None where none is within ``tolerance`` seconds."""
        with self._changed:
            history = list(self._history)
        best = min(history, key=lambda joints: abs(joints.stamp - stamp), default=None)
        return best if best is not None and abs(best.stamp - stamp) <= tolerance * 1e9 else None

    def set_state(self, key: str, state: JointState) -> None:
        """Store a message of a further feed."""
        with self._changed:
            feeds = MappingProxyType({**self._snapshot.state, key: state})
            self._snapshot = replace(self._snapshot, state=feeds)
            self._changed.notify_all()

    def set_instruction(self, instruction: str) -> bool:
        """Store an instruction.

        Returns:
            True where it differs from the one before (and a new epoch begins).
        """
        with self._changed:
            old = self._snapshot
            if instruction == old.instruction:
                return False
            self._snapshot = replace(old, instruction=instruction, epoch=old.epoch + 1)
            self._changed.notify_all()
            return True

    def new_epoch(self) -> None:
        """Begin a new task with the same instruction: what is inferred now is void (a reset)."""
        with self._changed:
            self._snapshot = replace(self._snapshot, epoch=self._snapshot.epoch + 1)

    def forget_measurements(self) -> None:
        """Forget joint state and feeds (after the clock jumped); the instruction stays."""
        with self._changed:
            self._snapshot = Snapshot(instruction=self._snapshot.instruction, epoch=self._snapshot.epoch + 1)
            self._history.clear()

    def wait_for_stamp(self, stamp: int, keys: tuple[str, ...], timeout: float) -> bool:
        """Wait up to ``timeout`` s until joint state and the feeds ``keys`` are as new as ``stamp`` (lockstep).

        Returns:
            False after the timeout.
        """

        def ready() -> bool:
            now = self._snapshot
            feeds = [now.joints, *(now.state.get(key) for key in keys)]
            return all(feed is not None and feed.stamp >= stamp for feed in feeds)

        with self._changed:
            return self._clock.wait_for(self._changed, ready, timeout)
