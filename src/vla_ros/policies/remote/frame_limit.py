"""Limits the rate of small websocket frames, which cost the receiver much more than their bytes do."""

from __future__ import annotations

import time
from collections.abc import Callable

from websockets.exceptions import ProtocolError
from websockets.frames import Frame
from websockets.protocol import Protocol

FRAMES_PER_SECOND = 250
"""Maximum average rate of small frames on one connection."""
_BURST = 500  # small frames at once


def limit_frames(
    protocol: Protocol, is_small: Callable[[Frame], bool], exceeded: Callable[[], None] = lambda: None
) -> None:
    """Fail a connection with code 1002 if its peer sends too many small frames; first call ``exceeded``.

    Frames are counted while they are parsed, so that no more of a full receive buffer is parsed.
    """
    parsed, allowed, counted = protocol.recv_frame, float(_BURST), time.monotonic()

    def receive(frame: Frame) -> None:
        nonlocal allowed, counted
        if is_small(frame):
            now = time.monotonic()
            allowed = min(float(_BURST), allowed + FRAMES_PER_SECOND * (now - counted)) - 1
            counted = now
            if allowed < 0:
                exceeded()
                raise ProtocolError(f"more than {FRAMES_PER_SECOND} small frames per second")
        parsed(frame)

    protocol.recv_frame = receive  # type: ignore[method-assign]
