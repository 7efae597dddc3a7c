"""The signals of a node's process: which end it, and which are requests of a person.

Handlers only record what came; the thread that spins carries it out between two callbacks. None of these signals
ends a node that moves an arm without a hold, however often it comes.
"""

import signal
from types import FrameType

from vla_ros.process import record_requests, take_requests

_PATIENCE = 3.0
"""Seconds from a signal to KeyboardInterrupt in a thread that does not look: in a callback that hangs."""


class Signals:
    """Takes over the process's signals, on the main thread.

    SIGINT and SIGTERM end the process, in a terminal SIGHUP as well. The first one raises KeyboardInterrupt at once
    while :attr:`interrupts` is set, which suits a load that nobody waits for; otherwise only if nobody has called
    :meth:`ending` 3 s later, because a callback hangs.

    Attributes:
        name: Name of the first signal that ends the process, or "".
        interrupts: Raise KeyboardInterrupt at the first such signal, wherever the thread is.
        requests: What the other signals ask for.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.name, self.interrupts, self._ends = "", interrupts, False
        self.requests = record_requests()
        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - self.requests.keys():
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def take_requests(self) -> tuple[str, ...]:
        """Return what was asked for since the last call: ``arm``, ``disarm``, ``reset``."""
        return take_requests()

    def ending(self) -> None:
        """Only record further signals: the process ends already, and its last hold must not be skipped."""
        self._ends, self.interrupts = True, False
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        first, self.name = not self.name, self.name or signal.Signals(number).name
        if not first or self._ends:
            return
        if self.interrupts:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE, 1.0)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if not self._ends:
            raise KeyboardInterrupt
