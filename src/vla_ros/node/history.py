"""Keeps recent frames of the cameras whose past images a policy uses, with the measurements at each arrival."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from vla_ros.control.inputs import Snapshot
from vla_ros.vision.messages import CdrBytes

_SPARE = 0.25  # s kept beyond the oldest delta timestamp: frames arrive during preparation, and some arrive late


@dataclass(frozen=True, eq=False)
class Past:
    """An undecoded frame and the inputs at its arrival."""

    stamp: int
    data: CdrBytes | None
    inputs: Snapshot


class History:
    """Keeps references to messages without copying them. Thread-safe.

    ``spans`` maps positions in ``camera.topics`` to the seconds of frames to keep; frames of other cameras are
    not kept.
    """

    def __init__(self, spans: Mapping[int, float]) -> None:
        self._spans = {camera: round(1e9 * (seconds + _SPARE)) for camera, seconds in spans.items()}
        self._frames: dict[int, deque[Past]] = {camera: deque() for camera in spans}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return True if frames of any camera are kept."""
        return bool(self._spans)

    def add(self, camera: int, past: Past) -> None:
        """Add a frame; if the clock has jumped back, forget all earlier ones."""
        frames = self._frames.get(camera)
        if frames is None:
            return
        with self._lock:
            if frames and past.stamp < frames[-1].stamp:
                frames.clear()
            if not frames or past.stamp > frames[-1].stamp:
                self._append(camera, past)

    def at(self, camera: int, stamp: int, now: Past) -> Past:
        """Return the frame since :meth:`begin`, not newer than ``now``, that is nearest to ``stamp``."""
        with self._lock:
            frames = self._frames[camera]
            if not frames or frames[-1].stamp < now.stamp:
                self._append(camera, now)
            known = [past for past in frames if past.stamp <= now.stamp]
        return min((*known, now), key=lambda past: abs(past.stamp - stamp))

    def begin(self) -> None:
        with self._lock:
            for frames in self._frames.values():
                frames.clear()

    def _append(self, camera: int, past: Past) -> None:
        frames = self._frames[camera]
        frames.append(past)
        # Keep one frame older than the oldest delta timestamp: it may be the nearest to that time.
        while len(frames) > 1 and frames[1].stamp < past.stamp - self._spans[camera]:
            frames.popleft()
