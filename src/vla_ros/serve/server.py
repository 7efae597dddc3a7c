"""The policy server's transport: websockets, POST, health, metrics, API key, TLS, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from vla_ros.policies.remote.vla_eval import PATH
from vla_ros.process import keep_prompt
from vla_ros.serve.connection import ACCEPTED, Refusals, bounded, most_connections
from vla_ros.serve.post import answer
from vla_ros.serve.service import Service
from vla_ros.serve.worker import WorkerState

logger = logging.getLogger(__name__)

_PING = 20.0  # s between pings, and timeout of a ping
_CLOSE = 2.0  # s, timeout of a closing handshake
_SEND = 10.0  # s, timeout of an opening handshake and of sending an answer


@dataclass(frozen=True)
class Address:
    """Where a server listens and which clients it admits."""

    host: str = "127.0.0.1"  # this machine's address or name
    port: int = 8000  # TCP port; 0 takes a free one
    api_key: str = ""  # key that robots must send; "" admits every client
    tls: ssl.SSLContext | None = None  # certificate and key; None for plain websockets


async def run(
    service: Service, address: Address, drain: float, ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve a loaded policy until SIGTERM or SIGINT.

    Waiting requests are then answered for up to ``drain`` seconds. ``ready`` is called with the port once the
    server listens. Raises OSError if the address is not available.
    """
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not on the main thread
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
    async with listening(service, address) as server:
        ready(next(iter(server.sockets)).getsockname()[1])
        keep_prompt()
        try:
            await _until(ending, service)
            logger.info("shutting down: %d robots are connected", service.robots)
            service.worker.drain()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_idle(service), drain)
        finally:
            gc.unfreeze()


@contextlib.asynccontextmanager
async def listening(service: Service, address: Address) -> AsyncIterator[Server]:
    """Accept connections; at the end, close them."""
    posts: set[asyncio.Task[Any]] = set()

    async def posted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        posts.add(task)
        try:
            await answer(reader, writer, service, address.api_key)
        finally:
            posts.discard(task)

    async def converse(connection: ServerConnection) -> None:
        loop = asyncio.get_running_loop()

        async def send(message: bytes | str, outcome: str) -> None:
            watch = loop.call_later(_SEND, connection.transport.abort)  # cheaper than a task with a timeout
            try:
                await connection.send(message)
            finally:
                watch.cancel()

        with contextlib.suppress(ConnectionClosed):
            request = connection.request
            path = request.path.partition("?")[0] if request else "/"
            await service.converse(aiter(connection), send, lambda: connection.close_code is None, path)

    def admit(connection: ServerConnection, request: Request) -> Response | None:
        given = [value.encode("utf-8", "surrogateescape") for value in request.headers.get_all("Authorization")]
        path = request.path.partition("?")[0]
        if path.endswith(PATH):
            connection.ping_timeout = None  # a benchmark may load a scene for minutes before it answers a ping
        answer = service.http(path, address.api_key, given)
        return answer and connection.respond(http.HTTPStatus(answer[0]), answer[1].decode())

    refusals = Refusals()
    asyncio.get_running_loop().set_exception_handler(refusals.handle)
    quiet = logging.getLogger("vla_ros.serve.websockets")
    quiet.setLevel(logging.CRITICAL)  # failed handshakes are not logged
    listener = serve(
        converse,
        address.host,
        address.port,
        process_request=admit,
        # Handshakes, /healthz and refusals need connections beside those of the robots.
        create_connection=bounded(
            most_connections(2 * service.limits.max_robots + 64),
            refusals,
            posted,
        ),
        backlog=ACCEPTED,
        compression=None,
        max_size=service.limits.max_message,
        max_queue=2,
        ping_interval=_PING,
        ping_timeout=_PING,
        close_timeout=_CLOSE,
        open_timeout=_SEND,
        server_header="vla_ros",
        ssl=address.tls,
        logger=quiet,
    )
    async with listener as server:
        yield server
        for task in posts:
            task.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


async def _until(ending: asyncio.Event, service: Service) -> None:
    """Wait until shutdown is requested, or the worker can no longer answer."""
    while not ending.is_set() and service.worker.state is not WorkerState.FAILED:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ending.wait(), 0.2)


async def _idle(service: Service) -> None:
    while service.answering:
        await asyncio.sleep(0.01)
