"""What the policy node says of itself on ``~/status``, and when there is no point in waiting for it any longer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from vla_ros.errors import VlaRosError

_PATIENCE = 5.0  # s of a hold, or disarmed, after which nobody waits for a command
_LONGEST_GAP = 1.5  # s; the node speaks once a second, and what was not heard does not count


class PolicyFailedError(VlaRosError):
    """The policy node has ended, was stopped, or does not move the arm; its log says more."""


class PolicyStatus:
    """Follows the status of the policy node.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = ""
        self._explanation = ""
        self._heard: float | None = None
        self._idle = 0.0

    def hear(self, text: str) -> None:
        """Take a message of ``~/status``; one that is no status is left alone."""
        try:
            words = json.loads(text)
            state, explanation = str(words["state"]), str(words["explanation"])
        except (ValueError, TypeError, KeyError):
            return
        if state == "disarmed":
            explanation += " (control.armed:=true or ~/enable arms it)"
        now = self._clock()
        gap = 0.0 if self._heard is None else min(_LONGEST_GAP, now - self._heard)
        self._idle = 0.0 if state == "armed" or not self._idles else self._idle + gap
        self._state, self._explanation, self._heard = state, explanation, now

    @property
    def stopped(self) -> str:
        """Why the node was stopped, or ""; only a person ends a stop."""
        return self._explanation if self._state == "stopped" else ""

    @property
    def hopeless(self) -> str:
        """Why no command will come: the node was stopped, or has been holding or disarmed for 5 s. Else ""."""
        return self._explanation if self.stopped or self._idle >= _PATIENCE else ""

    @property
    def _idles(self) -> bool:
        """True where the last message told of no motion."""
        return self._state not in ("", "armed")
