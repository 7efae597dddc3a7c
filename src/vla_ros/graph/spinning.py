"""The loop of a graph: one thread at a time runs callbacks; any thread may close the graph."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from vla_ros.errors import VlaRosError
from vla_ros.graph.interrupts import Interrupts

T = TypeVar("T", bound="SpinningGraph")


class SpinningGraph(ABC):
    """Common parts of both backends; see :class:`vla_ros.graph.node.Graph` for the public methods."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._spinning = threading.Lock()
        self._spinner: threading.Thread | None = None
        self._closing = False
        self._closed = False

    @abstractmethod
    def _spin_once(self, period: float) -> None:
        """Run the callbacks that are due, waiting at most ``period`` seconds for one."""

    @abstractmethod
    def _wake(self) -> None:
        """End the wait of :meth:`_spin_once`."""

    @abstractmethod
    def _leave(self) -> None:
        """Destroy the nodes and disconnect. Called once, when no thread spins."""

    def spin(self, until: Callable[[], bool], period: float = 0.1) -> None:
        """Run callbacks until ``until()`` is true or the graph is closed.

        An exception of a callback is logged with its traceback, and the next callback runs. Raises
        KeyboardInterrupt for SIGINT or SIGTERM if the program has no handlers of its own for them.
        """
        if not self._spinning.acquire(blocking=False):
            raise VlaRosError("this graph is already spinning; its callbacks run on one thread")
        self._spinner = threading.current_thread()
        try:
            with Interrupts() as interrupts:
                while not self._closing and not until():
                    self._spin_once(period)
                    interrupts.check()
        finally:
            self._spinner = None
            self._spinning.release()
            if self._closing:
                self.close()

    def wake(self) -> None:
        """Make a spin check ``until()`` now. Thread-safe."""
        if not self._closing:
            self._wake()

    def close(self) -> None:
        """Destroy all nodes and disconnect. Safe to call twice, from callbacks and from other threads."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake()
        if self._spinner is threading.current_thread():
            return  # spin closes when it has come back from this callback
        with self._spinning:
            if not self._closed:
                self._closed = True
                self._leave()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self, name: str) -> None:
        if self._closing:
            raise VlaRosError(f"node '{name}' cannot be created: this graph was closed")
