"""Bounds what one websocket connection, and all of them together, may cost the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ProtocolError
from websockets.frames import Frame

logger = logging.getLogger(__name__)

FRAMES_PER_SECOND = 250
"""Maximum rate of small frames (pings, pongs, empty fragments, tiny messages) of one connection, on average."""
_BURST = 500  # small frames at once
_SMALL = 1024  # bytes, below which a frame counts as small
ACCEPTED = 32
"""Maximum number of connections that are accepted before the first of them can be closed."""
_RESERVED = ACCEPTED + 16  # file descriptors that connections leave to the rest of the process
_LOGGED_EVERY = 60.0  # s


class Refusals:
    """Logs that connections are refused, once a minute at most."""

    def __init__(self) -> None:
        self._logged = float("-inf")

    def log(self, reason: str) -> None:
        """Log the reason, unless one was logged in the last minute."""
        if time.monotonic() > self._logged + _LOGGED_EVERY:
            self._logged = time.monotonic()
            logger.warning("refusing connections: %s", reason)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an event loop's exception; if no file descriptor is left, log it as a refusal."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self.log(f"{error.strerror}; raise ulimit -n")
        else:
            loop.default_exception_handler(context)


def most_connections(wanted: int) -> int:
    """Return ``wanted``, or how many connections the process's file descriptors allow if that is less."""
    try:
        used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        used = 0
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(wanted, allowed - used - _RESERVED))


def bounded(most: int, refusals: Refusals) -> type[ServerConnection]:
    """Return a class of connections: more than ``most`` at a time are closed before the handshake.

    A connection that sends too many small frames is closed with code 1002 and the reason.
    """
    connected: set[ServerConnection] = set()

    class Connection(ServerConnection):
        _tokens, _counted = float(_BURST), 0.0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            if len(connected) < most:
                connected.add(self)
                self._parsed = self.protocol.recv_frame
                self.protocol.recv_frame = self._receive  # type: ignore[method-assign]
                super().connection_made(transport)
                return
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            refusals.log(f"{most} are open, all that --max-robots or ulimit -n allow")

        def connection_lost(self, exc: Exception | None) -> None:
            if self in connected:
                connected.discard(self)
                super().connection_lost(exc)

        def _receive(self, frame: Frame) -> None:
            """Count a frame while it is parsed, so that no more of a full receive buffer is parsed."""
            if len(frame.data) < _SMALL:
                now = time.monotonic()
                self._tokens = min(float(_BURST), self._tokens + FRAMES_PER_SECOND * (now - self._counted)) - 1
                self._counted = now
                if self._tokens < 0:
                    self.transport.pause_reading()  # until the closing handshake times out
                    raise ProtocolError(f"more than {FRAMES_PER_SECOND} small frames per second")
            self._parsed(frame)

    return Connection
