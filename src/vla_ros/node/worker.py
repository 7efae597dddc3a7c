"""Runs jobs on a separate thread; the caller continues and polls for the result."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from vla_ros.control.clock import Clock, SimulatedClock

T = TypeVar("T")
_REMEMBERED = 20


class Worker(Generic[T]):
    """Runs one job at a time. Begin another only after :meth:`result`.

    When a job has ended, ``ended`` is called on the worker's thread, then ``changed`` is notified. On a simulated
    clock a job runs immediately and ends when its duration has passed (:meth:`SimulatedClock.job`).
    """

    def __init__(
        self, clock: Clock, changed: threading.Condition, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._clock, self._changed, self._on_end = clock, changed, ended
        self._jobs: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._busy = False
        self._began = 0.0
        self._took: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def seconds(self) -> float:
        """Expected duration: the 95th percentile of the last 20 successful jobs; infinite before the first."""
        return float(np.percentile(self._took, 95)) if self._took else math.inf

    @property
    def ready(self) -> bool:
        """True once the job has ended."""
        return self._outcome is not None

    def begin(self, job: Callable[[], T], *, beside: bool = True) -> None:
        """Start a job and return at once, or, without ``beside``, run it on this thread."""
        assert not self._busy, "one job at a time"
        self._outcome, self._busy, self._began = None, True, self._clock.steady()
        if not beside:
            with self._clock.work():
                outcome = _outcome(job)
            self._end(outcome)
            return
        if isinstance(self._clock, SimulatedClock):
            simulated, seconds = self._clock.job(lambda: _outcome(job))
            self._clock.after(seconds, lambda: self._end(simulated))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vla_inference", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def result(self) -> T:
        """Return the result of the job, which must have ended, or raise its exception."""
        assert self._outcome is not None, "it has not ended"
        (value, error), self._outcome, self._busy = self._outcome, None, False
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self, timeout: float) -> bool:
        """End after the current job; return False if that takes longer than ``timeout`` seconds."""
        self._jobs.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._end(_outcome(job))

    def _end(self, outcome: tuple[T | None, BaseException | None]) -> None:
        self._on_end()
        if outcome[1] is None:
            self._took.append(self._clock.steady() - self._began)
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()


def _outcome(job: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return job(), None
    except BaseException as error:  # raised again by result()
        return None, error
