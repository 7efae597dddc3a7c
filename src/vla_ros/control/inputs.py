"""Stores the newest inputs other than images: joint states, state topics and the instruction.

Receiving threads write; the working thread reads a consistent snapshot. Nothing is queued.
"""

import math
import threading
import unicodedata
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import MappingProxyType

from vla_ros.config.options import LONGEST_INSTRUCTION
from vla_ros.control.clock import Clock
from vla_ros.control.joints import together
from vla_ros.types import JointState


@dataclass(frozen=True)
class Snapshot:
    """The inputs at one time."""

    joints: JointState | None = None  # newest joint state of all arms, or None before the first
    # Name in ``robot.state_topics`` to its newest message.
    state: Mapping[str, JointState] = field(default_factory=lambda: MappingProxyType({}))
    instruction: str = ""  # newest instruction, "" before the first
    epoch: int = 0  # number of the task; inferences of an earlier task are void
    # Arm to its newest joint state.
    arms: Mapping[str, JointState] = field(default_factory=lambda: MappingProxyType({}))


JOINT_STATES_KEPT = 1024
"""Joint states of an arm that are kept: one second at 1 kHz, the rate of the fastest drivers."""


class Inputs:
    """Thread-safe store of the newest inputs, of which ``snapshot`` has all, and of recent joint states."""

    def __init__(self, clock: Clock, instruction: str = "") -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By arm: joint states, and when the newest one arrived (steady clock) and was published (Suspension).
        self._history: dict[str, deque[JointState]] = defaultdict(lambda: deque(maxlen=JOINT_STATES_KEPT))
        self._joints_seen: dict[str, float] = {}
        self._published: dict[str, float] = {}
        self.snapshot = Snapshot(instruction=instruction.strip())

    def set_joints(self, joints: JointState, arm: str = "arm", published: float = math.inf) -> None:
        """Store a measured joint state of one arm; for ``published`` see :meth:`Suspension.note_arrival`."""
        with self._lock:
            arms = MappingProxyType({**self.snapshot.arms, arm: joints})
            self.snapshot = replace(self.snapshot, joints=together(arms.values()), arms=arms)
            self._joints_seen[arm], self._published[arm] = self._clock.steady(), published
            self._history[arm].append(joints)

    def fresh_joints(self, timeout: float, resumed: float = -math.inf) -> Mapping[str, JointState]:
        """Return each arm's newest joint state if it arrived within ``timeout`` seconds.

        Joint states published before ``resumed`` (:attr:`Suspension.resumed`) are left out. No command may be based
        on an older joint state, even if a fresh one arrives before the command is sent.
        """
        with self._lock:
            since = self._clock.steady() - timeout
            return {
                arm: joints
                for arm, joints in self.snapshot.arms.items()
                if self._joints_seen[arm] >= since and self._published[arm] >= resumed
            }

    def joints_at(self, stamp: int, tolerance: float = 0.1) -> Mapping[str, JointState]:
        """Return each arm's joint state nearest to ``stamp``, if within ``tolerance`` seconds."""
        with self._lock:
            found = {arm: _nearest(known, stamp, tolerance * 1e9) for arm, known in self._history.items()}
        return {arm: joints for arm, joints in found.items() if joints is not None}

    def set_state(self, key: str, state: JointState) -> None:
        """Store the newest message of one of ``robot.state_topics``."""
        with self._lock:
            newest = MappingProxyType({**self.snapshot.state, key: state})
            self.snapshot = replace(self.snapshot, state=newest)

    def set_instruction(self, instruction: str) -> bool:
        """Store an instruction; if it has changed, begin a new epoch and return True."""
        with self._lock:
            old = self.snapshot
            if instruction == old.instruction:
                return False
            self.snapshot = replace(old, instruction=instruction, epoch=old.epoch + 1)
            return True

    def new_epoch(self) -> None:
        """Begin a new task with the same instruction (a reset); the current inference becomes void."""
        with self._lock:
            self.snapshot = replace(self.snapshot, epoch=self.snapshot.epoch + 1)

    def forget_measurements(self) -> None:
        """Forget joint states and state topics after a clock jump, but not the instruction."""
        with self._lock:
            self.snapshot = Snapshot(instruction=self.snapshot.instruction, epoch=self.snapshot.epoch + 1)
            self._history.clear()


def _nearest(known: deque[JointState], stamp: int, tolerance: float) -> JointState | None:
    """Return the joint state nearest to ``stamp``, if within ``tolerance`` ns; the newest come last."""
    recent = list(takewhile(lambda joints: joints.stamp >= stamp - tolerance, reversed(known)))
    nearest = min(reversed(recent), key=lambda joints: abs(joints.stamp - stamp), default=None)
    return nearest if nearest is not None and nearest.stamp <= stamp + tolerance else None


def why_refused(instruction: str) -> str:
    """Return why an instruction is refused, or ""."""
    if not instruction:
        return "empty instruction ignored: the previous one remains in force"
    if len(instruction) > LONGEST_INSTRUCTION:
        return f"instruction of {len(instruction)} characters refused, expected at most {LONGEST_INSTRUCTION}"
    for character in instruction:
        if unicodedata.category(character) == "Cc":  # a terminal that shows the log would obey it
            return f"instruction with control character U+{ord(character):04X} refused, expected one line"
    return ""
