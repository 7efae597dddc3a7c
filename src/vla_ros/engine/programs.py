"""Which program answers: the best that is ready, while a better one is made ready behind the scenes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from vla_ros.engine.shapes import Buckets

logger = logging.getLogger(__name__)

P = TypeVar("P")


class Programs(Generic[P]):
    """Programs by sequence length.

    A prompt is answered by the shortest ready program that holds it. If that is not the best length, the best is
    made ready by a second thread; until then a longer one answers, or a program that was not prepared at all.

    Args:
        buckets: The lengths.
        build: Makes a program of a length, with buffers of its own.
        prepare: Makes it fast (captures its graphs).
        background: False prepares at once, in the caller's thread.
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
        """Lengths whose programs are prepared."""
        with self._lock:
            return tuple(sorted(self._ready))

    @property
    def failures(self) -> dict[int, Exception]:
        """Lengths that could not be prepared, and why."""
        with self._lock:
            return dict(self._failed)

    def ensure(self, length: int) -> None:
        """Prepare a length now.

        Raises:
            Exception: Whatever building or preparing raises.
        """
        if length not in self.ready:
            program = self._build(length)
            self._prepare(program)
            with self._lock:
                self._ready[length] = program

    def take(self, prompt: int) -> P:
        """The program that answers a prompt of that many tokens now.

        Raises:
            ConfigError: The prompt is too long for any.
        """
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
        """Wait until nothing is being prepared; False where that took longer than ``timeout`` seconds."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout)
            return not worker.is_alive()
        return True

    def close(self) -> None:
        """Wait for the worker, then forget all programs."""
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
            logger.warning("sequence length %d stays without graphs: %s", length, error)
            with self._lock:
                self._failed[length] = error
            return
        self._plain.pop(length, None)
