"""Follows ``~/status`` of the policy node to decide whether a command can still be expected."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from vla_ros.errors import VlaRosError

_PATIENCE = 5.0  # s for which the node may hold or be disarmed
_LONGEST_GAP = 1.5  # s; largest time between two messages that counts; the node publishes once a second


class PolicyFailedError(VlaRosError):
    """The policy node exited, was stopped or does not move the arm."""


class PolicyStatus:
    """State of the policy node; ``clock`` returns monotonic seconds.

    Attributes:
        instruction: The instruction that the node has received.
        dropped: Number of frames that led to no command.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = self._explanation = self.instruction = ""
        self.dropped = 0
        self._received, self._idle = clock(), 0.0

    def update(self, text: str) -> None:
        """Process a message of ``~/status``; ignore anything else."""
        try:
            status = json.loads(text)
            state, explanation = str(status["state"]), str(status["explanation"])
            instruction, dropped = str(status["instruction"]), sum(status["frames"]["dropped"].values())
        except (ValueError, TypeError, KeyError):
            return
        if state == "disarmed":
            explanation += " (control.armed:=true or ~/enable arms it)"
        now = self._clock()
        idles = "armed" not in (state, self._state or "armed")  # in this message and the previous one
        self._idle = self._idle + min(_LONGEST_GAP, now - self._received) if idles else 0.0
        self._state, self._explanation, self._received = state, explanation, now
        self.instruction, self.dropped = instruction, dropped

    @property
    def stopped(self) -> str:
        """Reason for the stop, which only a person can reset; "" if the node is not stopped."""
        return self._explanation if self._state == "stopped" else ""

    @property
    def hopeless(self) -> str:
        """Why no command can be expected (stopped, or holding or disarmed for 5 s); otherwise ""."""
        return self._explanation if self.stopped or self._idle >= _PATIENCE else ""
