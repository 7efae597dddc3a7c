"""The signals of a node's process: which end it, and which are requests of a person.

Handlers only record what came; the thread that spins carries it out between two callbacks. None of these signals
ends a node that moves an arm without a hold, however often it comes.
"""

import os
import signal
import threading
import time
from collections.abc import Set
from types import FrameType

from vla_ros.process import record_requests, take_requests

_PATIENCE = 3.0
"""Seconds from a signal to KeyboardInterrupt in a thread that does not look: in a callback that hangs."""


class Signals:
    """Takes over the process's signals, on the main thread.

    SIGINT and SIGTERM end the process, in a terminal SIGHUP as well. The first one raises KeyboardInterrupt at once
    while :attr:`interrupts` is set, which suits a load that nobody waits for; otherwise only if nobody has called
    :meth:`ending` 3 s later, because a callback hangs.

    Python runs handlers between two steps of the main thread. A signal that arrives just before a long call into C
    does not wake that call, so its handler would run when the call returns. A thread of its own, which each signal
    wakes, therefore signals the main thread again.

    Attributes:
        name: Name of the first signal that ends the process, or "".
        interrupts: Raise KeyboardInterrupt at the first such signal, wherever the thread is.
        requests: What the other signals ask for.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.name, self.interrupts = "", interrupts
        self._ending, self._late = threading.Event(), False
        self.requests = record_requests()
        ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - self.requests.keys()
        for number in ends:
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGALRM, self._on_alarm)
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read, ends), name="signals", daemon=True).start()

    def take_requests(self) -> tuple[str, ...]:
        """Return what was asked for since the last call: ``arm``, ``disarm``, ``reset``."""
        return take_requests()

    def ending(self) -> None:
        """Only record further signals: the process ends already, and its last hold must not be skipped."""
        self.interrupts = False
        self._ending.set()

    def _watch(self, read: int, ends: Set[int]) -> None:
        while os.read(read, 1)[0] not in ends:
            pass
        due = time.monotonic() + _PATIENCE
        while not self._ending.wait(1.0):
            self._late = time.monotonic() > due
            if self._late or not self.name:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        first, self.name = not self.name, self.name or signal.Signals(number).name
        if first and self.interrupts:
            raise KeyboardInterrupt

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._late and not self._ending.is_set():
            raise KeyboardInterrupt
