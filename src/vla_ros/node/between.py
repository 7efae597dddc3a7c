"""Decides when commands between two steps of the plan are due, and during deceleration."""

from __future__ import annotations

import math

from vla_ros.config import ControlConfig
from vla_ros.control.outcome import StepResult

_SHORTEST = 0.9  # shortest time between two commands if one was late, in intervals


class Between:
    """Schedules commands between steps (``control.command_rate_hz``), and after the last step until the arm rests.

    Attributes:
        due: When the next command between steps is due, seconds of the steady clock; infinite for never.
        step: The last step of the plan that was sent, or None.
        rests: True once a command was due after the end of the step.
    """

    def __init__(self) -> None:
        self.step: StepResult | None = None
        self.stop()

    def configure(self, control: ControlConfig, period: float) -> None:
        """Apply options; ``period`` is the duration of a step in seconds."""
        self._count = max(1, round(period * control.command_rate_hz))
        self._dt = period / self._count
        self._period = period

    @property
    def divides(self) -> bool:
        """True if there are commands between two steps."""
        return self._count > 1

    @property
    def interval(self) -> float:
        """Seconds between two commands."""
        return self._dt

    def begin(self, step: StepResult, made: float, end: float) -> None:
        """Record a step that was sent at ``made``, perhaps late; the next step is due at ``end``."""
        self.step, self._sent, self._end, self.rests = step, made, end, False
        self.due = max(end - self._period + self._dt, made + _SHORTEST * self._dt)

    def ease(self) -> None:
        """Decelerate from the next command on."""
        if self.step is not None:
            self._end = min(self._end, self.due)

    def stop(self) -> None:
        """Send nothing more."""
        self.step, self.due, self._end, self.rests = None, math.inf, -math.inf, False
        self._sent = 0.0

    def next(self, now: float) -> tuple[float, float, float, int]:
        """Return the timing of the command that is due.

        Seconds until the following command; seconds left to reach the step's positions, 0 to come to rest; seconds
        since the last command; number of steps by which the command is late, 0 during its step.
        """
        following = max(self.due + self._dt, now + _SHORTEST * self._dt)
        if abs(following - self._end) < self._dt / 2:
            following = self._end
        self.due = following
        left, passed, self._sent = self._end - now, now - self._sent, now
        self.rests = left < self._dt / 2
        late = 1 + int(max(0.0, -left) / self._period) if self.rests else 0
        return min(following - now, self._dt), 0.0 if self.rests else left, passed, late
