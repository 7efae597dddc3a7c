"""The policy server as an ASGI application, for hosts such as Ray Serve's proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from vla_ros.serve.service import Service

Event = Mapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]


class Application:
    """Serves robots over websockets, ``GET /healthz`` and ``/metrics``; an empty ``api_key`` admits everybody."""

    def __init__(self, service: Service, api_key: str = "") -> None:
        self.service, self._key = service, api_key

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, send)
        else:
            await self._websocket(scope, receive, send)

    def _answer(self, scope: Event) -> tuple[int, bytes] | None:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return self.service.http(scope["path"], self._key, given)

    async def _http(self, scope: Event, send: Send) -> None:
        status, body = self._answer(scope) or (426, b"this is a websocket\n")
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _websocket(self, scope: Event, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        if self._answer(scope) is not None:
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "websocket.accept"})
        gone = asyncio.Event()

        async def answer(frame: bytes | str) -> None:
            if not gone.is_set():
                kind = "text" if isinstance(frame, str) else "bytes"
                await send({"type": "websocket.send", kind: frame})

        async def frames() -> AsyncIterator[bytes | str]:
            while True:
                event = await receive()
                if event["type"] == "websocket.disconnect":
                    gone.set()
                    return
                data = event.get("bytes")
                yield data if data is not None else event.get("text") or ""

        await self.service.converse(frames(), answer, lambda: not gone.is_set())


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
