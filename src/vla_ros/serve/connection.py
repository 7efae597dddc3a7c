"""Bounds what one connection, and all of them together, may cost the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame

from vla_ros.policies.remote.frame_limit import limit_frames

logger = logging.getLogger(__name__)

_SMALL = 1024  # bytes, below which a frame counts as small
ACCEPTED = 32
"""Maximum number of connections that are accepted before the first of them can be closed."""
_RESERVED = ACCEPTED + 16  # file descriptors that connections leave to the rest of the process
_LOGGED_EVERY = 60.0  # s
_PARTING = 0.5  # s
_FIRST = 10.0  # s that a client may be silent at first
_POST = b"POST "


class Refusals:
    """Logs that connections are refused, once a minute at most."""

    def __init__(self) -> None:
        self._logged = float("-inf")

    def log(self, reason: str) -> None:
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


Posted = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
"""Answers the requests of a connection."""


def bounded(most: int, refusals: Refusals, posted: Posted) -> type[ServerConnection]:
    """Return a class of connections: more than ``most`` at a time are closed before the handshake.

    A connection that sends too many small frames is closed with code 1002 and the reason. One that begins with a
    POST request, which websockets cannot read, goes to ``posted``.
    """
    connected: set[ServerConnection] = set()

    class Connection(ServerConnection):
        _silent: asyncio.Transport | None = None  # set until the client's first bytes tell its protocol
        _began = b""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            if len(connected) < most:
                connected.add(self)
                self._silent = transport
                self._timer = asyncio.get_running_loop().call_later(_FIRST, transport.abort)
                return
            transport.abort()
            refusals.log(f"{most} are open, all that --max-robots or ulimit -n allow")

        def data_received(self, data: bytes) -> None:
            if (transport := self._silent) is not None:
                self._began += data
                if len(self._began) < len(_POST) and _POST.startswith(self._began):
                    return
                data, self._silent = self._began, None
                self._timer.cancel()
                if data.startswith(_POST):
                    self._hand_over(transport, data)
                    return
                limit_frames(self.protocol, _is_small, partial(_end, transport))
                super().connection_made(transport)
            super().data_received(data)

        def _hand_over(self, transport: asyncio.Transport, began: bytes) -> None:
            loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    await posted(reader, writer)
                finally:
                    connected.discard(self)

            protocol = asyncio.StreamReaderProtocol(reader, answer, loop)
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            reader.feed_data(began)

        def eof_received(self) -> None:
            if self._silent is None:
                super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            if self in connected:
                connected.discard(self)
                if self._silent is None:
                    super().connection_lost(exc)
                else:
                    self._timer.cancel()

    return Connection


def _end(transport: asyncio.Transport) -> None:
    """Read no more from a client that floods, and leave it a moment to read why its connection ends."""
    transport.pause_reading()
    asyncio.get_running_loop().call_later(_PARTING, transport.abort)


def _is_small(frame: Frame) -> bool:
    """Return True for pings, pongs, fragments and messages of few bytes."""
    return len(frame.data) < _SMALL
