"""Threads for work that must not keep the graph thread or the control thread."""

import threading
import time
from collections.abc import Callable

from vla_ros.control.reasons import Reason
from vla_ros.execution.context import Context
from vla_ros.graph.wiring import Wiring

_PATIENCE = 5.0  # s that the end waits for work that has begun


class BesideThread:
    """Calls ``work`` every ``period`` seconds and when woken, and rests for as long as that took.

    Time is that of the machine, also where the node's clock is a simulation's, which may stand still. An exception
    stops the arm, which cannot be armed again: what the thread did is missing. The thread ends when ``wiring``
    closes.
    """

    def __init__(
        self, context: Context, wiring: Wiring, name: str, period: float, work: Callable[[], None]
    ) -> None:
        self._context, self._period, self._work = context, period, work
        self._awake, self._ended = threading.Event(), threading.Event()
        self._worked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        wiring.on_close(self.close)
        self._thread.start()

    def wake(self) -> None:
        """Let ``work`` be called soon."""
        self._awake.set()

    @property
    def silent(self) -> float:
        """Seconds since ``work`` has returned, or since the start."""
        return time.monotonic() - self._worked

    def close(self) -> None:
        self._ended.set()
        self._awake.set()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        name = self._thread.name
        try:
            while True:
                self._awake.wait(self._period)
                self._awake.clear()
                if self._ended.is_set():
                    return
                begin = time.monotonic()
                self._work()
                self._worked = time.monotonic()
                self._ended.wait(min(self._worked - begin, self._period))
        except BaseException as error:
            found = f"{name}: {type(error).__name__}: {error}"
            self._context.watchdog.see_dead_thread(f"{found}; start the node again")
            self._context.safety.stop(Reason.THREAD_DIED, found)
            self._context.logger.error(f"the thread {name} ended: {type(error).__name__}: {error}")
            raise
