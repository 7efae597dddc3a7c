"""A place for one item: the newest wins, and whoever puts it there never waits.

A camera is faster than a model. A queue between them would make every command older than the last; here the
frame that waits is always the newest, and whoever replaces or clears one is handed it to account for.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from vla_ros.control.clock import Clock

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Hands the newest item from receiving threads to a working thread. An item is anything but None."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._item: T | None = None

    @property
    def waiting(self) -> bool:
        """True where an item waits to be taken."""
        return self._item is not None

    def put(self, item: T) -> T | None:
        """Leave ``item``; never waits for a taker.

        Returns:
            The item that it replaced, which nobody had taken; None where there was none.
        """
        with self._changed:
            replaced, self._item = self._item, item
            self._changed.notify()
            return replaced

    def take(self, timeout: float = 0.0) -> T | None:
        """Wait for an item for ``timeout`` seconds at most and remove it; None where none came."""
        with self._changed:
            self._clock.wait_for(self._changed, lambda: self._item is not None, timeout)
            item, self._item = self._item, None
            return item
