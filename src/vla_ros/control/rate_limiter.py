"""Limits steps to ``control.rate_hz`` without delaying frames more than necessary.

With a fixed tick, a camera that runs at the control rate stays out of phase: after one slow inference, every frame
waits for the same fraction of a period. Here, later steps follow after nine tenths of a period until the delay is
made up. This is a token bucket of one period (the generic cell rate algorithm of ITU-T I.371), so the long-run rate
is the configured rate, plus 1 % for a camera whose clock runs slightly fast.

The remaining steps of a chunk are scheduled separately: each is due a period after the previous one was due.
"""

import math

_SHORTEST = 0.9  # shortest time between two steps, in periods
_LATE = 0.1  # longest wait for a frame that is about to arrive, in periods
_FASTER = 1.01  # highest long-run rate, in multiples of the configured rate
_GUESS = 1 / 30  # s; duration of a command if every frame is answered


class RateLimiter:
    """Decides when the next step may begin. Times are seconds of the steady clock.

    Assign ``rate_hz`` to change the rate for later steps; with 0, every frame is answered. ``velocities`` is True
    if commands are velocities, not positions.
    """

    def __init__(self, rate_hz: float, *, velocities: bool = False) -> None:
        self.rate_hz = rate_hz
        self._velocities = velocities
        self._begun = -math.inf  # when the last step began
        self._earned = -math.inf  # when the long-run rate allows the next step; it may be a period early
        self.planned_due = -math.inf  # when the next step of a chunk is due: a period after the previous one was
        self._lead = 0.0  # seconds from taking a frame to sending its command

    @property
    def _period(self) -> float:
        return 1 / self.rate_hz if self.rate_hz else 0.0

    @property
    def period(self) -> float:
        """Duration of a step in seconds; 1/30 s if every frame is answered."""
        return self._period or _GUESS

    @property
    def frame_due(self) -> float:
        """The earliest time to begin an inference step."""
        return max(self._begun + _SHORTEST * self._period, self._earned - self._period)

    def patience(self, now: float, arrived: float, following: float) -> float:
        """Return how many seconds a frame should wait for a newer one, or 0.

        The frame arrived at ``arrived``; the newer one is expected at ``following``.
        """
        due = self.frame_due
        if due == -math.inf or arrived >= due:  # no step yet, or the frame did not wait
            return 0.0
        latest = max(due, self._begun + self._period) + _LATE * self._period
        return max(0.0, latest - now) if following <= latest else 0.0

    def planned_duration(self, now: float) -> float:
        """Return the seconds from ``now``, when a chunk's step is sent, until the next step is due.

        Always a whole period for velocities, as in :meth:`step_duration`.
        """
        if self._velocities:
            return self.period
        return min(max(self.planned_due + self.period - now, _SHORTEST * self.period), self.period)

    def step_duration(self, now: float) -> float:
        """Return the duration in seconds of the step for a frame taken at ``now``.

        Shorter than a period if the last step began less than a period ago, so that velocity limits bound the
        distance of each step. Always a whole period for velocities, because the largest allowed step divided by
        less would be a higher velocity.
        """
        if self._velocities:
            return self.period
        return min(max(now - self._begun, _SHORTEST * self.period), self.period)

    def answered(self, begun: float, sent: float) -> None:
        """Record that the command for a frame taken at ``begun`` was sent at ``sent``."""
        self._lead = sent - begun
        self.planned_due = sent + self.period
        self._step(begun)

    def sent(self, at: float, begun: float | None = None) -> None:
        """Record that a step of a chunk was sent ``at`` this time; the step began earlier by the chunk's latency.

        The latency is the time from taking the frame to sending the chunk's first step; ``begun`` is when the frame
        was taken, if this is the first step. The next step is due one period after this one was due, so that delays
        do not add up, but no sooner than nine tenths of a period from now.
        """
        due = self.planned_due if at - self.planned_due < self.period else at
        self.planned_due = max(due + self.period, at + _SHORTEST * self.period)
        if begun is not None:
            self._lead = at - begun
        self._step(at - self._lead)

    def _step(self, begun: float) -> None:
        self._begun = begun
        self._earned = max(self._earned, begun) + self._period / _FASTER
