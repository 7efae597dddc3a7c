"""Frames between the thread that receives and the thread that answers; neither ever waits for the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

S = TypeVar("S")


@dataclass(frozen=True)
class Held(Generic[S]):
    """The newest frame, until it is given back.

    Attributes:
        slot: Its buffer.
        stamp: What :meth:`FrameRing.put` was told.
        overwritten: Frames since the last one taken that came and went unseen.
    """

    slot: S
    stamp: int
    overwritten: int


class FrameRing(Generic[S]):
    """Three buffers: one being written, one with the newest frame, one being read (uploaded).

    With three there is always one to write to, so that the receiver's callback costs one copy and nothing else.

    Args:
        allocate: Makes one buffer, called three times at once: pinned memory is slow to get.
    """

    def __init__(self, allocate: Callable[[], S]) -> None:
        self._slots = tuple(allocate() for _ in range(3))
        self._lock = threading.Lock()  # held for a few assignments, never for a copy
        self._newest: int | None = None
        self._reading: int | None = None
        self._stamp = 0
        self._overwritten = 0

    def put(self, write: Callable[[S], None], stamp: int) -> None:
        """Fill a free buffer and make it the newest. One thread only.

        Args:
            write: Copies the frame into the buffer.
            stamp: Kept with it.
        """
        with self._lock:
            index = next(i for i in range(3) if i not in (self._newest, self._reading))
        write(self._slots[index])
        with self._lock:
            self._overwritten += self._newest is not None
            self._newest, self._stamp = index, stamp

    def take(self) -> Held[S] | None:
        """The newest frame that was not taken yet, or None. It stays untouched until the next :meth:`take`."""
        with self._lock:
            if self._newest is None:
                return None
            self._reading, self._newest = self._newest, None
            overwritten, self._overwritten = self._overwritten, 0
            return Held(self._slots[self._reading], self._stamp, overwritten)


def pinned_frame(height: int, width: int) -> NDArray[np.uint8]:
    """A uint8 [height, width, 3] array in page-locked memory where there is CUDA, else an ordinary one."""
    import torch

    pin = torch.cuda.is_available()
    return np.asarray(torch.empty(height, width, 3, dtype=torch.uint8, pin_memory=pin).numpy())
