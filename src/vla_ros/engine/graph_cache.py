"""Caches graphs by sequence length; captures missing lengths in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from vla_ros.engine.buckets import Buckets

logger = logging.getLogger(__name__)

P = TypeVar("P")


class GraphCache(Generic[P]):
    """Graphs by sequence length.

    A prompt runs on the shortest captured graphs that fit it. If a shorter length would do, a second thread
    captures it; until then a longer one is used, or the stages run without graphs. ``build`` creates the stages of
    a length with their own buffers, ``prepare`` captures them; without ``background``, this happens at once in the
    caller's thread.
    """

    def __init__(
        self, buckets: Buckets, build: Callable[[int], P], prepare: Callable[[P], None], background: bool = True
    ) -> None:
        self._buckets = buckets
        self._build = build
        self._prepare = prepare
        self._background = background
        self._lock = threading.Lock()
        self._ready: dict[int, P] = {}
        self._plain: dict[int, P] = {}
        self._failed: dict[int, Exception] = {}
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def ready(self) -> tuple[int, ...]:
        """Captured lengths."""
        with self._lock:
            return tuple(sorted(self._ready))

    @property
    def failures(self) -> dict[int, Exception]:
        """Lengths whose capture failed, with the reason."""
        with self._lock:
            return dict(self._failed)

    def ensure(self, length: int) -> None:
        """Capture a length now; errors of building or capturing are raised."""
        if length not in self.ready:
            built = self._build(length)
            self._prepare(built)
            with self._lock:
                self._ready[length] = built

    def take(self, prompt: int) -> P:
        """Return stages that can run a prompt of this many tokens now."""
        best = self._buckets.require(prompt)
        if best in self._ready:
            return self._ready[best]
        if not self._background and best not in self._failed:
            self.ensure(best)
            return self._ready[best]
        self._start(best)
        longer = self._buckets.choose(prompt, self.ready)
        if longer is not None:
            return self._ready[longer]
        if best not in self._plain:
            self._plain[best] = self._build(best)
        return self._plain[best]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for captures; return False after ``timeout`` seconds."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout)
            return not worker.is_alive()
        return True

    def close(self) -> None:
        """Wait for the worker, then drop all graphs."""
        self._closed = True
        self.wait()
        with self._lock:
            self._ready.clear()
        self._plain.clear()

    def _start(self, length: int) -> None:
        busy = self._worker is not None and self._worker.is_alive()
        if not busy and length not in self._failed and not self._closed:
            self._worker = threading.Thread(target=self._work, args=(length,), name="capture", daemon=True)
            self._worker.start()

    def _work(self, length: int) -> None:
        try:
            self.ensure(length)
        except Exception as error:
            logger.warning("sequence length %d runs without graphs: %s", length, error)
            with self._lock:
                self._failed[length] = error
            return
        self._plain.pop(length, None)
