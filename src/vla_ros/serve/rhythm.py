"""Decides when a batch waits for robots whose next request is due.

A robot that asks again soon after each answer would otherwise miss the batch that starts with that answer: the
robots then split into two halves that wait for each other's batches.

A robot is due if its requests usually follow its answers within the allowed wait. A batch only waits if the robots
that are due complete the next batch size, and for a share of an inference at most. Waits that did not complete it
are charged to an account, so that robots that stop asking, by chance or on purpose, cost the others little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

SHARE = 0.5
"""Maximum wait for a batch, as a share of an inference: as it at least doubles the batch, it pays for itself."""
WASTE = 0.05
"""Maximum share of all time that is spent on waits in vain."""
_KNOWN, _KEPT = 3, 8  # gaps that make a rhythm, and that are remembered; one of them may be longer than the wait


@dataclass
class _Rhythm:
    """One robot's times between an answer and the next request."""

    answered: float | None = None  # s, time of the answer that its next request follows
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # s
    usual: float = float("inf")  # s, the gap that all but one of the last ones kept


class Rhythms:
    """Predicts when each robot sends its next request; all times are seconds of one clock."""

    def __init__(self) -> None:
        self._robots: dict[Hashable, _Rhythm] = {}
        self._spare = 0.0  # s that may still be wasted

    def asked(self, robot: Hashable, when: float) -> None:
        rhythm = self._robots.setdefault(robot, _Rhythm())
        if rhythm.answered is not None:
            rhythm.gaps.append(when - rhythm.answered)
            rhythm.answered = None
            if len(rhythm.gaps) >= _KNOWN:
                rhythm.usual = sorted(rhythm.gaps)[-2]

    def answered(self, robots: Iterable[Hashable], when: float) -> None:
        for robot in robots:
            if (rhythm := self._robots.get(robot)) is not None:
                rhythm.answered = when

    def forget(self, robot: Hashable) -> None:
        self._robots.pop(robot, None)

    def due(self, now: float, wait: float) -> set[Hashable]:
        """Return the robots whose request should come within ``wait`` seconds, or is late by as much at most.

        Returns none of them while too much time was wasted on waits.
        """
        if self._spare < wait:
            return set()
        return {
            robot
            for robot, rhythm in self._robots.items()
            if rhythm.answered is not None
            and rhythm.usual <= wait
            and abs(rhythm.answered + rhythm.usual - now) <= wait
        }

    def charge(self, wasted: float, inference: float) -> None:
        """Account for a batch: the time that was wasted waiting for it, and the duration of the inference."""
        self._spare = min(self._spare - wasted + WASTE * inference, 2 * SHARE * inference)
