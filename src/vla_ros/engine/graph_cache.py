"""Caches graphs by sequence length; captures missing lengths in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Generic, TypeVar

from vla_ros.engine.buckets import Buckets

logger = logging.getLogger(__name__)

P = TypeVar("P")


class GraphCache(Generic[P]):
    """Graphs by sequence length.

    A prompt runs on the shortest captured graphs that fit it. If a shorter length would fit, a second thread
    captures it; until then, the prompt runs on longer graphs or, if there are none, without graphs. ``build``
    creates the stages of a length with their own buffers, ``prepare`` captures them. Without ``background``, the
    calling thread captures a missing length immediately.

    Attributes:
        failures: Lengths whose capture failed, with the reason.
    """

    def __init__(
        self, buckets: Buckets, build: Callable[[int], P], prepare: Callable[[P], None], background: bool = True
    ) -> None:
        self._buckets = buckets
        self._build = build
        self._prepare = prepare
        self._worker = ThreadPoolExecutor(1, "capture") if background else None
        self._captures: dict[int, Future[None]] = {}
        self._ready: dict[int, P] = {}
        self._plain: dict[int, P] = {}
        self.failures: dict[int, Exception] = {}

    @property
    def ready(self) -> tuple[int, ...]:
        return tuple(sorted(self._ready))

    def ensure(self, length: int) -> None:
        """Capture a length now; raises any error of building or capturing."""
        if length not in self._ready:
            built = self._build(length)
            self._prepare(built)
            self._ready[length] = built

    def take(self, prompt: int) -> P:
        """Return stages that can run a prompt of this many tokens now."""
        best = self._buckets.require(prompt)
        if self._worker is None and best not in self.failures:
            self.ensure(best)
        if best in self._ready:
            return self._ready[best]
        if self._worker is not None and best not in self._captures:
            self._captures[best] = self._worker.submit(self._work, best)
        longer = self._buckets.choose(prompt, self.ready)
        if longer is not None:
            return self._ready[longer]
        if best not in self._plain:
            self._plain[best] = self._build(best)
        return self._plain[best]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for captures; return False after ``timeout`` seconds."""
        return not wait_for(self._captures.values(), timeout).not_done

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._ready.clear()
        self._plain.clear()

    def _work(self, length: int) -> None:
        try:
            self.ensure(length)
        except Exception as error:
            logger.warning("sequence length %d runs without graphs: %s", length, error)
            self.failures[length] = error
            return
        self._plain.pop(length, None)
