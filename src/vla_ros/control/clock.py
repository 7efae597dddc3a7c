"""The injected clock that all parts use to read the time and to wait.

A simulated clock advances only when code waits, so replay and tests run the live control loop without waiting.
"""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Now:
    """The current time on both clocks, in nanoseconds."""

    steady: int  # steady clock, for timeouts: never jumps, starts at any value
    ros: int  # ROS clock, which stamps refer to: system time, or simulated time (0 before it begins)


class Clock:
    """The real clock. ``ros`` returns the ROS time in nanoseconds; the default is system time."""

    def __init__(self, ros: Callable[[], int] = time.time_ns) -> None:
        self._ros_ns = ros

    def now(self) -> Now:
        return Now(time.monotonic_ns(), self._ros_ns())

    def steady(self) -> float:
        """Return the steady clock's time in seconds."""
        return time.monotonic()

    def ros(self) -> int:
        """Return the ROS clock's time in nanoseconds."""
        return self._ros_ns()

    def awake(self) -> float:
        """Return the seconds of a steady clock that also advances while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wait_for(self, changed: threading.Condition, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until ``ready()`` is True; return False after the timeout.

        The caller holds ``changed``, which is notified when ``ready()`` may have changed.
        """
        return changed.wait_for(ready, timeout)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Mark work that takes time; a simulated clock advances by its duration."""
        yield


class SimulatedClock(Clock):
    """A clock that advances only in :meth:`wait_for`, :meth:`sleep` and :meth:`work`.

    Used from one thread.

    Args:
        ros: Start of the ROS clock, nanoseconds; the steady clock starts at 0.
        events: Times of the ROS clock in nanoseconds, ascending, each with an action to call at that time.
        speed: Simulated seconds per real second of :meth:`work`; with 0, work takes no time.

    Attributes:
        limit: The latest time to which waiting advances the ROS clock, nanoseconds; a longer wait ends there.
    """

    def __init__(
        self, ros: int = 0, events: Iterable[tuple[int, Callable[[], None]]] = (), speed: float = 0.0
    ) -> None:
        super().__init__(lambda: self._now)
        self._begin = self._now = ros
        self._events = iter(events)
        self._next = next(self._events, None)
        self._speed = speed
        self.limit: float = math.inf
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._job_seconds: float | None = None  # seconds that the current job has slept; None outside jobs

    def now(self) -> Now:
        return Now(self._now - self._begin, self._now)

    def steady(self) -> float:
        """Return the simulated seconds since the start."""
        return (self._now - self._begin) / 1e9

    def awake(self) -> float:
        """Return 0: what waits for this clock is never suspended."""
        return 0.0

    def jump(self, ros: int) -> int:
        """Set the ROS clock to ``ros`` and return the nanoseconds passed; from 0, no time passes."""
        if not self._now:
            self._begin = self._now = ros
        passed, self._now = ros - self._now, ros
        return passed

    @property
    def exhausted(self) -> bool:
        """True when no event is left."""
        return self._next is None and not self._later

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``seconds`` of simulated time."""
        heapq.heappush(self._later, (self._now + math.ceil(seconds * 1e9), next(self._count), action))

    def job(self, do: Callable[[], T]) -> tuple[T, float]:
        """Run ``do`` without advancing the clock; return the result and the simulated seconds."""
        began, self._job_seconds = time.perf_counter(), 0.0
        try:
            value = do()
            return value, self._job_seconds + (time.perf_counter() - began) * self._speed
        finally:
            self._job_seconds = None

    def sleep(self, seconds: float) -> None:
        """Advance by ``seconds``, and call the actions that become due."""
        if self._job_seconds is not None:
            self._job_seconds += seconds
            return
        # Rounded up, so that waiting for less than a nanosecond ends.
        self._advance(self._now + math.ceil(seconds * 1e9), lambda: False)

    def wait_for(self, changed: threading.Condition, ready: Callable[[], bool], timeout: float) -> bool:
        """Advance by at most ``timeout`` seconds until ``ready()`` is True."""
        self._advance(self._now + math.ceil(timeout * 1e9), ready)
        return ready()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Advance by the real time that the work took, times ``speed``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.sleep((time.perf_counter() - began) * self._speed)

    def _advance(self, until: int, ready: Callable[[], bool]) -> None:
        until = int(min(until, self.limit))
        while not ready():
            event = self._next[0] if self._next is not None else math.inf
            later = self._later[0][0] if self._later else math.inf
            if min(event, later) > until:
                self._now = max(self._now, until)
                return
            if self._next is not None and event <= later:
                (at, happens), self._next = self._next, next(self._events, None)
            else:
                at, _, happens = heapq.heappop(self._later)
            self._now = max(self._now, at)
            happens()
