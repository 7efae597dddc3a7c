"""Copies camera frames into memory that the policy's device reads by itself, so that an inference copies none."""

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from vla_ros.config import CameraConfig
from vla_ros.types import UInt8Array
from vla_ros.vision.messages import CdrBytes, image_header

_SLOTS = 4
"""Per camera: a frame that arrives, one that waits, one in an inference, one of the last chunk's observation."""

_HEADER = 1024  # bytes of a message beside its pixels, at most


class FrameSlots:
    """Slots for the frames of one camera, ``buffers``. :meth:`keep` is called from one thread."""

    def __init__(self, buffers: list[UInt8Array]) -> None:
        self._free = deque(buffers)

    def keep(self, data: CdrBytes) -> CdrBytes:
        """Return a message in a slot, which is free again once nothing refers to it.

        Returns ``data`` itself if no slot is free or large enough, or if the host must decode the pixels. Never
        waits and never calls the device.
        """
        if not self._free or len(data) > len(self._free[0]) or image_header(data).encoding != "rgb8":
            return data
        slot = self._free.popleft()
        held = slot[: len(data)]
        np.copyto(held, np.frombuffer(data, np.uint8))  # without the interpreter's lock, unlike bytes
        weakref.finalize(held, self._free.append, slot).atexit = False
        return held.data


def slots_of(camera: CameraConfig, page_locked: Callable[[int], UInt8Array | None]) -> list[FrameSlots]:
    """Return the slots of each camera: none for compressed images, or where ``page_locked`` returns None."""
    buffers = [
        [page_locked(3 * one.width * one.height + _HEADER) for _ in range(_SLOTS if one.transport == "raw" else 0)]
        for one in camera.each
    ]
    return [FrameSlots([each for each in some if each is not None]) for some in buffers]
