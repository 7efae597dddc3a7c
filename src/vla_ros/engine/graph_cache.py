"""Caches graphs by padded prompt length; captures missing lengths in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Generic, TypeVar

from vla_ros.errors import ConfigError


@dataclass(frozen=True)
class Buckets:
    """Padded text lengths, so that a new instruction rarely needs new graphs.

    A sequence is BOS, the patches, the rest of the prompt, the drafted tokens, and padding that no other token
    attends to. All but the patches form one row of text tokens.
    """

    patches: int  # patch tokens of one image
    answer: int  # tokens to decode (7 for OpenVLA)
    lengths: tuple[int, ...]  # sequence lengths, ascending, with the patches

    @classmethod
    def up_to(cls, patches: int, answer: int, max_positions: int, step: int = 32) -> Buckets:
        """Return multiples of ``step`` up to twice the patches, and every fourth multiple beyond."""
        room = max_positions - answer  # a verifying pass may write beyond the last token, but not beyond the tables
        lengths = []
        length = -(-(patches + answer + 1) // step) * step
        while length < room:
            lengths.append(length)
            length += step if length < 2 * patches + step else 4 * step
        if room >= patches + answer + 1:
            lengths.append(room)
        if not lengths:
            raise ConfigError(
                f"the decoder has {max_positions} positions, too few for {patches} patches and {answer} tokens"
            )
        return cls(patches, answer, tuple(lengths))

    def text(self, length: int) -> int:
        """Return the number of text tokens in a bucket of ``length``: all but the patches."""
        return length - self.patches

    def choose(self, prompt: int, among: Sequence[int] | None = None) -> int | None:
        """Return the shortest length (of ``among``, or of all) that holds a prompt and its draft, or None.

        ``prompt`` counts tokens with BOS, without patches.
        """
        need = self.patches + prompt + self.answer - 1
        fitting = [length for length in (self.lengths if among is None else among) if length >= need]
        return min(fitting, default=None)

    def require(self, prompt: int) -> int:
        """Like :meth:`choose`, but raise ConfigError if the prompt is longer than the decoder allows."""
        length = self.choose(prompt)
        if length is None:
            longest = self.lengths[-1] - self.patches - self.answer + 1
            raise ConfigError(
                f"policy.instruction: {prompt} tokens with the prompt template, the model has room for "
                f"{longest}; shorten it"
            )
        return length


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
