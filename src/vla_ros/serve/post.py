"""POST requests on the port of the websockets, for clients that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http
import io
import json
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler

from vla_ros.policies.remote.dialect import Message
from vla_ros.serve.service import POST, Service

_IDLE, _BODY = 10.0, 30.0  # s that a client may take to send a request's head, and its body
_HEAD = 1 << 16  # bytes of a request line and headers
_STATUS = {"invalid": 400, "refused": 503, "expired": 504, "failed": 500}
"""Maps outcomes of :meth:`Service.converse` to statuses; all others are 200."""


class _Head(BaseHTTPRequestHandler):
    """The request line and headers, read by the standard library; ``problem`` is empty if they are valid."""

    def __init__(self, head: bytes) -> None:
        self.problem, self.status, self.length = "", 400, 0
        self.rfile, self.wfile = io.BytesIO(head), io.BytesIO()
        self.raw_requestline = self.rfile.readline()
        self.protocol_version = "HTTP/1.1"  # connections persist
        if not self.parse_request():
            return
        try:
            self.length = int(self.headers["Content-Length"])
        except (TypeError, ValueError):
            self.length = -1
        if self.command != "POST":
            self.send_error(405, f"found {self.command}, expected POST")
        elif self.length < 0:
            self.send_error(411, "found no Content-Length")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.status, self.problem = code, message or "invalid request"
        self.close_connection = True

    def handle_expect_100(self) -> bool:
        return True  # the body comes anyway, and curl waits a second at most


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: Service, key: str) -> None:
    """Answer the POST requests of one connection with ``service`` until the client closes it."""
    head: _Head | None = None

    async def reply(status: int, body: bytes, last: bool) -> None:
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nServer: vla_ros\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n" if last else "\r\n"
        writer.write(head.encode() + body)
        await asyncio.wait_for(writer.drain(), _IDLE)

    async def discard(length: int) -> None:
        left = min(length, service.limits.max_message)
        while left > 0 and (data := await reader.read(min(left, _HEAD))):
            left -= len(data)

    async def next_request() -> _Head | None:
        """Read the head of the next request; one that is refused is answered."""
        head = _Head(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _IDLE))
        refused = (head.status, head.problem.encode()) if head.problem else None
        if not refused and head.length > service.limits.max_message:
            refused = 413, f"found a request of {head.length} bytes, allowed {service.limits.max_message}".encode()
        if not refused:
            given = [value.encode("latin-1") for value in head.headers.get_all("Authorization") or ()]
            refused = service.http(POST + head.path.partition("?")[0], key, given)
        if refused is None:
            return head
        await asyncio.wait_for(discard(head.length), _IDLE)  # an answer that overtakes the body may get lost
        await reply(refused[0], json.dumps({"error": refused[1].decode().strip()}).encode(), True)
        return None

    def connected() -> bool:
        return not (reader.at_eof() or writer.is_closing())

    async def send(message: Message, outcome: str) -> None:
        assert isinstance(message, bytes)
        assert head is not None
        await reply(_STATUS.get(outcome, 200), message, head.close_connection)

    async def messages() -> AsyncIterator[Message]:
        nonlocal head
        while head is not None:
            yield await asyncio.wait_for(reader.readexactly(head.length), _BODY)
            head = None if head.close_connection else await next_request()

    lost = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError)
    try:
        with contextlib.suppress(*lost):
            head = await next_request()
            if head is not None:
                await service.converse(messages(), send, connected, POST + head.path.partition("?")[0])
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
