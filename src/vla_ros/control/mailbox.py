"""A mailbox for one item: a new item replaces the waiting one, and putting never waits.

A camera is faster than a model. With a queue between them, every command would be older than the last; here the
waiting frame is always the newest. The caller that replaces or takes an item gets the item, to account for it.
"""

import threading
from typing import Generic, TypeVar

from vla_ros.control.clock import Clock

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Passes the newest item (not None) from receiving threads to a working thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._item: T | None = None

    def put(self, item: T) -> T | None:
        """Store ``item`` without waiting; return the untaken item that it replaced, or None."""
        with self._changed:
            replaced, self._item = self._item, item
            self._changed.notify()
            return replaced

    @property
    def waiting(self) -> bool:
        return self._item is not None

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for an item; return True if one is waiting."""
        with self._changed:
            return self._clock.wait_for(self._changed, lambda: self.waiting, timeout)

    def take(self, timeout: float = 0.0) -> T | None:
        """Remove and return the item; None if none arrives within ``timeout`` seconds."""
        with self._changed:
            self._clock.wait_for(self._changed, lambda: self.waiting, timeout)
            item, self._item = self._item, None
            return item
