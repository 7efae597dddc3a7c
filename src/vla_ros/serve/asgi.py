"""The policy server as an ASGI application, for hosts such as Ray Serve's proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from vla_ros.serve.service import Service

_Event = Mapping[str, Any]
Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]


class Application:
    """Serves websockets, ``GET /healthz`` and ``/metrics``; an empty ``api_key`` admits every client."""

    def __init__(self, service: Service, api_key: str = "") -> None:
        self.service, self._key = service, api_key

    async def __call__(self, scope: _Event, receive: Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, send)
        else:
            await self._websocket(scope, receive, send)

    def _answer(self, scope: _Event) -> tuple[int, bytes] | None:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return self.service.http(scope["path"], self._key, given)

    async def _http(self, scope: _Event, send: _Send) -> None:
        status, body = self._answer(scope) or (426, b"this is a websocket\n")
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _websocket(self, scope: _Event, receive: Receive, send: _Send) -> None:
        await receive()  # websocket.connect
        if self._answer(scope) is not None:
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "websocket.accept"})
        connected = True

        async def answer(message: bytes | str, outcome: str) -> None:
            if connected:
                await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})

        async def messages() -> AsyncIterator[bytes | str]:
            nonlocal connected
            while (event := await receive())["type"] != "websocket.disconnect":
                data = event.get("bytes")
                yield data if data is not None else event.get("text") or ""
            connected = False

        await self.service.converse(messages(), answer, lambda: connected, scope["path"])


async def _lifespan(receive: Receive, send: _Send) -> None:
    kind = ""
    while kind != "lifespan.shutdown":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
