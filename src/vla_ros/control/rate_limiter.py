"""When the next step may begin: at most ``control.rate_hz`` of them, and no frame waits longer than it must.

A camera with the rate of the control loop would otherwise be answered late for ever: after one slow answer each
frame finds the loop not yet due, waits for the same part of a period as the one before, and the arm acts on what
was. So the time that a late step lost may be made up: the next ones follow after nine tenths of a period until a
frame is answered as it comes. That is a token bucket of one period (the generic cell rate algorithm of ITU-T
I.371): on the long run no more steps than the rate allows, plus 1 % for a camera whose clock is a little faster.

What is planned (the rest of a chunk) has its own times: each step follows a full period after the last command.
"""

from __future__ import annotations

import math

from vla_ros.config import ControlConfig

_SHORTEST = 0.9  # of a period: between two answers while lost time is made up
_LATE = 0.1  # of a period: so long a frame that is about to come is waited for
_FASTER = 1.01  # of the rate: two clocks that mean the same rate differ by less
_GUESS = 1 / 30  # s that a command has where every frame is answered


class RateLimiter:
    """Counts steps against a rate. Times are seconds of any one clock.

    Args:
        rate_hz: Steps a second; 0 answers every frame.
        velocities: Commands are velocities, not positions.
    """

    def __init__(self, rate_hz: float, *, velocities: bool = False) -> None:
        self._velocities = velocities
        self.configure(rate_hz)
        self.reset()

    @classmethod
    def from_config(cls, config: ControlConfig) -> RateLimiter:
        """As the options say."""
        return cls(config.rate_hz, velocities=config.output == "twist_stamped")

    def configure(self, rate_hz: float) -> None:
        """Take another rate from the next step on."""
        self._period = 1 / rate_hz if rate_hz > 0 else 0.0

    def reset(self) -> None:
        """Forget the steps made: the next one may begin at once."""
        self._begun = -math.inf  # when the last step began
        self._earned = -math.inf  # when the rate alone would let the next one begin; it may be a period early
        self._lead = 0.0  # from a frame's step to its command

    @property
    def period(self) -> float:
        """Seconds that a command is made for: one period, or a guess of 1/30 s where every frame is answered."""
        return self._period or _GUESS

    @property
    def frame_due(self) -> float:
        """The time from which a frame may be answered."""
        return max(self._begun + _SHORTEST * self._period, self._earned - self._period)

    def patience(self, now: float, arrived: float, following: float) -> float:
        """Seconds to wait for a newer frame than the one that waits, or 0.

        Args:
            now: The present.
            arrived: When the frame that waits came.
            following: When the next one should come.
        """
        due = self.frame_due
        if due == -math.inf or arrived >= due:  # no step yet, or the frame is no older than it must be
            return 0.0
        latest = max(due, self._begun + self._period) + _LATE * self._period
        return max(0.0, latest - now) if following <= latest else 0.0

    @property
    def planned_due(self) -> float:
        """The time from which the next step of a chunk may be sent: a period after the last one was."""
        return self._begun + self._lead + self.period

    def step_time(self, now: float) -> float:
        """Seconds for which the command of a frame taken ``now`` is made.

        Less than a period where it follows on the last one sooner, so that a joint's way is bounded by its
        velocity also while time is made up. A velocity is a step's way by a whole period, always: made for less, it
        would be faster than the largest step in a period.
        """
        if self._velocities:
            return self.period
        return min(max(now - self._begun, _SHORTEST * self.period), self.period)

    def answered(self, begun: float, sent: float) -> None:
        """A frame taken at ``begun`` was answered at ``sent``."""
        self._lead = sent - begun
        self._step(begun)

    def executed(self, sent: float) -> None:
        """A planned step was sent; it counts as begun as long before that as the chunk was."""
        self._step(sent - self._lead)

    def _step(self, begun: float) -> None:
        self._begun = begun
        self._earned = max(self._earned, begun) + self._period / _FASTER
