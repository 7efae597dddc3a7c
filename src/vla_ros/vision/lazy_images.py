"""The images of an observation, each oriented and resized on first access; unused images cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from vla_ros.types import UInt8Array


class LazyImages(Mapping[str, UInt8Array]):
    """Maps image keys to uint8 [H, W, 3]; each image is prepared on first access.

    ``makers`` maps a key to the function that prepares its image. ``spent_ms`` is the total preparation time.
    """

    def __init__(self, makers: Mapping[str, Callable[[], UInt8Array]]) -> None:
        self._makers = makers
        self._made: dict[str, UInt8Array] = {}
        self.spent_ms = 0.0

    @property
    def prepared(self) -> int:
        """Number of images prepared so far."""
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
