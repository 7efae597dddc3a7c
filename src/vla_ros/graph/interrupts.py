"""Turns SIGINT and SIGTERM into KeyboardInterrupt between two callbacks of a spinning graph, never inside one.

Python raises KeyboardInterrupt wherever the thread is. Raised in a destructor or in a callback from C, it is
printed and lost, and the loop continues; rclpy's wait runs such destructors a hundred times a second.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class Interrupts:
    """Context manager that records SIGINT and SIGTERM on the main thread, unless the program has its own handlers.

    A second signal raises KeyboardInterrupt at once, which ends a hanging callback. Leaving the context raises
    KeyboardInterrupt if a signal arrived after the last :meth:`check`.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received; call between two callbacks."""
        if self._came:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
