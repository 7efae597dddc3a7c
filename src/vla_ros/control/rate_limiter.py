"""Limits steps to ``control.rate_hz`` without making frames wait longer than they must.

With a fixed tick, a camera that runs at the control rate stays out of phase: after one slow inference every frame
waits for the same fraction of a period, and the arm acts on old images. Here a late step may be made up: the next
ones follow after nine tenths of a period until frames are answered as they arrive. This is a token bucket of one
period (the generic cell rate algorithm of ITU-T I.371), so the long-run rate is the configured one, plus 1 % for a
camera whose clock runs slightly fast.

The remaining steps of a chunk are scheduled separately: each is due a period after the last one was due.
"""

from __future__ import annotations

import math

_SHORTEST = 0.9  # of a period; between two inference steps while lost time is made up
_LATE = 0.1  # of a period; how long to wait for a frame that is about to arrive
_FASTER = 1.01  # of the rate; clocks that nominally agree differ by less
_GUESS = 1 / 30  # s; duration of a command where every frame is answered


class RateLimiter:
    """Decides when the next step may begin. Times are seconds of one clock.

    ``rate_hz``, which may be changed from the next step on, is 0 to answer every frame. ``velocities`` says that
    commands are velocities, not positions.
    """

    def __init__(self, rate_hz: float, *, velocities: bool = False) -> None:
        self.rate_hz = rate_hz
        self._velocities = velocities
        self._begun = -math.inf  # when the last step began
        self._earned = -math.inf  # when the rate alone allows the next one, which may be a period early
        self._planned = -math.inf  # when the next step of a chunk is due
        self._lead = 0.0  # from taking a frame to sending its command

    @property
    def _period(self) -> float:
        return 1 / self.rate_hz if self.rate_hz else 0.0

    @property
    def period(self) -> float:
        """Duration of a command in seconds: one period, or 1/30 s where every frame is answered."""
        return self._period or _GUESS

    @property
    def frame_due(self) -> float:
        """The earliest time to begin an inference step."""
        return max(self._begun + _SHORTEST * self._period, self._earned - self._period)

    def patience(self, now: float, arrived: float, following: float) -> float:
        """Return the seconds to wait for a newer frame than the one that waits since ``arrived``, or 0.

        The next frame is expected at ``following``.
        """
        due = self.frame_due
        if due == -math.inf or arrived >= due:  # no step yet, or the frame did not wait
            return 0.0
        latest = max(due, self._begun + self._period) + _LATE * self._period
        return max(0.0, latest - now) if following <= latest else 0.0

    @property
    def planned_due(self) -> float:
        """The earliest time to send the next step of a chunk: a period after the last one was due."""
        return self._planned

    def planned_time(self, now: float) -> float:
        """Duration of the command for a step of a chunk that is sent at ``now``: until the next one is due.

        For velocity commands always a whole period, as in :meth:`step_time`.
        """
        if self._velocities:
            return self.period
        return min(max(self._planned + self.period - now, _SHORTEST * self.period), self.period)

    def step_time(self, now: float) -> float:
        """Return the duration of the command for a frame taken at ``now``, in seconds.

        Shorter than a period where the step follows the last one sooner, so that velocity limits bound the
        distance of each step while time is made up. For velocity commands it is always a whole period: divided by
        less, the largest allowed step would become a higher velocity.
        """
        if self._velocities:
            return self.period
        return min(max(now - self._begun, _SHORTEST * self.period), self.period)

    def answered(self, begun: float, sent: float) -> None:
        """Record that the command for a frame taken at ``begun`` was sent at ``sent``."""
        self._lead = sent - begun
        self._planned = sent + self.period
        self._step(begun)

    def executed(self, sent: float, begun: float | None = None) -> None:
        """Record that a planned step was sent. Backdates it by the chunk's frame-to-command latency.

        ``begun``: when its frame was taken, if the step before lasted until now.

        The next one is due a period after this one was, so that the time to make commands does not add up. Of a
        step that was late by more than a tenth of a period, the rest is not made up at once.
        """
        due = self._planned if sent - self._planned < self.period else sent
        self._planned = max(due + self.period, sent + _SHORTEST * self.period)
        if begun is not None:
            self._lead = sent - begun
        self._step(sent - self._lead)

    def _step(self, begun: float) -> None:
        self._begun = begun
        self._earned = max(self._earned, begun) + self._period / _FASTER
