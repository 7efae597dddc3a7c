"""A place for one thing: the newest wins, and whoever puts it there never waits.

A camera is faster than a model. A queue between them would make every command older than the last; here the
frame that waits is always the newest, and the ones that nobody took are counted.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Hands the newest item from receiving threads to a working thread.

    Attributes:
        received: Items put so far.
        replaced: Items that a newer one replaced before anybody took them.
        taken: Items taken. ``received == taken + replaced + (1 if one waits)``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._item: T | None = None
        self._full = False
        self.received = 0
        self.replaced = 0
        self.taken = 0

    def put(self, item: T) -> bool:
        """Leave ``item``; never waits for a taker.

        Returns:
            True where it replaced an item that nobody had taken.
        """
        with self._changed:
            replaced = self._full
            self._item, self._full = item, True
            self.received += 1
            self.replaced += replaced
            self._changed.notify()
            return replaced

    def take(self, timeout: float) -> T | None:
        """The newest item, removed; waits for one.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            None after the timeout.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._full, timeout)
            if not self._full:
                return None
            item, self._item, self._full = self._item, None, False
            self.taken += 1
            return item

    def clear(self) -> bool:
        """Throw the waiting item away (counted as replaced): after a reset or a clock jump.

        Returns:
            True where there was one.
        """
        with self._changed:
            dropped = self._full
            self._item, self._full = None, False
            self.replaced += dropped
            return dropped
