"""Decides when commands are due between two steps of the plan and during deceleration."""

import math

from vla_ros.control.outcome import StepResult
from vla_ros.control.rate_limiter import RateLimiter

_SHORTEST = 0.9  # shortest time between two commands, in intervals, if the first was late


class CommandInterpolator:
    """Schedules commands between steps, and after the last step until the arm rests.

    ``limiter`` provides the duration of a step; ``rate_hz`` is ``control.command_rate_hz`` and may be assigned.
    ``due`` is the time of the next command in seconds of the steady clock, or infinite if there is none. ``step``
    is the last step that was sent; ``rests`` is True once a command was due at the end of the step or later.
    """

    def __init__(self, limiter: RateLimiter, rate_hz: float) -> None:
        self._limiter, self.rate_hz = limiter, rate_hz
        self.step: StepResult | None = None
        self.stop()

    @property
    def commands_per_step(self) -> int:
        return max(1, round(self._limiter.period * self.rate_hz))

    @property
    def interval(self) -> float:
        """Seconds between two commands."""
        return self._limiter.period / self.commands_per_step

    def begin(self, step: StepResult, sent: float, end: float) -> None:
        """Record that ``step`` was sent at ``sent``, perhaps late; the next step is due at ``end``."""
        self.step, self._sent, self._end, self.rests = step, sent, end, False
        self.due = max(end - self._limiter.period + self.interval, sent + _SHORTEST * self.interval)

    def decelerate(self) -> None:
        if self.step is not None:
            self._end = min(self._end, self.due)

    def stop(self) -> None:
        self.step, self.due, self._end, self._sent, self.rests = None, math.inf, -math.inf, 0.0, False

    def advance(self, now: float) -> tuple[float, float, float, int]:
        """Count the command that is due, and return its timing: (following, remaining, elapsed, late).

        The following command is due in ``following`` seconds. The step's positions must be reached in ``remaining``
        seconds; 0 means that the arm comes to rest. The last command was sent ``elapsed`` seconds ago. ``late`` is
        the number of steps by which the command is late, 0 during its step.
        """
        interval = self.interval
        following = max(self.due + interval, now + _SHORTEST * interval)
        if abs(following - self._end) < interval / 2:
            following = self._end
        self.due = following
        remaining, elapsed, self._sent = self._end - now, now - self._sent, now
        self.rests = remaining < interval / 2
        late = 1 + int(max(0.0, -remaining) / self._limiter.period) if self.rests else 0
        return min(following - now, interval), 0.0 if self.rests else remaining, elapsed, late
