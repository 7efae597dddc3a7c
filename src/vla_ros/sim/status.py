"""Follows ``~/status`` of the policy node to detect when waiting for a command is pointless."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from vla_ros.errors import VlaRosError

_PATIENCE = 5.0  # s that the node may hold or be disarmed
_LONGEST_GAP = 1.5  # s between two messages that count; the node publishes once a second


class PolicyFailedError(VlaRosError):
    """The policy node ended, was stopped or does not move the arm."""


class PolicyStatus:
    """State of the policy node; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = ""
        self._explanation = ""
        self._received: float | None = None
        self._idle = 0.0

    def update(self, text: str) -> None:
        """Process a message of ``~/status``; ignore anything else."""
        try:
            status = json.loads(text)
            state, explanation = str(status["state"]), str(status["explanation"])
        except (ValueError, TypeError, KeyError):
            return
        if state == "disarmed":
            explanation += " (control.armed:=true or ~/enable arms it)"
        now = self._clock()
        gap = 0.0 if self._received is None else min(_LONGEST_GAP, now - self._received)
        self._idle = 0.0 if state == "armed" or not self._idles else self._idle + gap
        self._state, self._explanation, self._received = state, explanation, now

    @property
    def stopped(self) -> str:
        """Why the node was stopped, or ""; only a person can reset a stop."""
        return self._explanation if self._state == "stopped" else ""

    @property
    def hopeless(self) -> str:
        """Why waiting for a command is pointless (stopped, or holding or disarmed for 5 s), or ""."""
        return self._explanation if self.stopped or self._idle >= _PATIENCE else ""

    @property
    def _idles(self) -> bool:
        """True if the last message reported a state without motion."""
        return self._state not in ("", "armed")
