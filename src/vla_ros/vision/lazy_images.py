"""The images of an observation, each turned and resized on first access.

A policy that answers without them (``hold``, an open-loop baseline, one camera of two) then costs no resize.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from vla_ros.types import UInt8Array


class LazyImages(Mapping[str, UInt8Array]):
    """Image key to uint8 [H, W, 3], each prepared when it is first asked for.

    Args:
        makers: Image key to what prepares it; called at most once by each thread that asks.

    Attributes:
        spent_ms: Milliseconds that preparing took so far.
    """

    def __init__(self, makers: Mapping[str, Callable[[], UInt8Array]]) -> None:
        self._makers = makers
        self._made: dict[str, UInt8Array] = {}
        self.spent_ms = 0.0

    @property
    def prepared(self) -> int:
        """How many images were prepared."""
        return len(self._made)

    def __getitem__(self, key: str) -> UInt8Array:
        if key not in self._made:
            began = time.perf_counter()
            self._made[key] = self._makers[key]()
            self.spent_ms += 1e3 * (time.perf_counter() - began)
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
