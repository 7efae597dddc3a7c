"""Serves the page, and talks to it over a websocket: what is shown goes out, requests come in."""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import logging
import time
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from vla_ros.console.admission import Desk, Gate, read_request
from vla_ros.console.images import ENCODER
from vla_ros.console.panel import Act, Panel
from vla_ros.errors import VlaRosError, one_line

logger = logging.getLogger(__name__)

_PERIOD, _STEP = 0.1, 0.02  # s between two views, and between looks for a change of the state
_TAKES = 10.0  # s after which a page that has not taken a view is disconnected
_IMAGES = 0.2  # s between two images of a topic
_SEND = 2.0  # s in which a page must take a message
_PAGES, _MESSAGES = 8, 100  # connections at a time; messages of each within a second
_HUNG = 2.0  # s without a turn of the thread that spins
_ROOT = files("vla_ros.console")
_PARTS = {name: _ROOT.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_PAGE = _PARTS["html"].replace("/*css*/", _PARTS["css"]).replace("/*js*/", _PARTS["js"])
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    f"style-src {_hash(_PARTS['css'])}; script-src {_hash(_PARTS['js'])}",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Console:
    """The ASGI application."""

    def __init__(self, panel: Panel, gate: Gate) -> None:
        self._panel, self._gate = panel, gate
        self._numbers, self._open = itertools.count(1), 0
        routes = [Route("/healthz", self._health), Route("/", self._page), WebSocketRoute("/live", self._live)]
        self._app: ASGIApp = Starlette(routes=routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse every request for another host, then answer it."""
        if scope["type"] != "lifespan" and not self._gate.is_host(_headers(HTTPConnection(scope), "host")):
            if scope["type"] == "http":
                await PlainTextResponse("this server has another name\n", 403)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
            return
        await self._app(scope, receive, send)

    async def _health(self, _: Request) -> Response:
        hung = time.monotonic() - self._panel.turned > _HUNG
        return PlainTextResponse("the graph's thread hangs\n" if hung else "ok\n", 503 if hung else 200)

    async def _page(self, request: Request) -> Response:
        if not self._gate.knows(request.query_params.getlist("token")):
            return PlainTextResponse("open the address that `vla-ros console` has printed\n", 403, _HEADERS)
        return HTMLResponse(_PAGE, headers=_HEADERS)

    async def _live(self, socket: WebSocket) -> None:
        of_page = self._gate.is_origin(_headers(socket, "origin"), _headers(socket, "host"))
        if not (of_page and self._gate.knows(socket.query_params.getlist("token"))):
            logger.warning("refused a connection from %s: wrong origin or token", _address(socket))
            await socket.close(1008)
            return
        if self._open >= _PAGES:
            await socket.close(1013)
            return
        self._open += 1
        try:
            await socket.accept()
            await Page(socket, self._panel, f"{_address(socket)}, page {next(self._numbers)}").serve()
        finally:
            self._open -= 1


class Page:
    """One connection of a page."""

    def __init__(self, socket: WebSocket, panel: Panel, origin: str) -> None:
        self._socket, self._panel, self._origin = socket, panel, origin
        self._desk, self._node, self._seen, self._sees = Desk(time.monotonic), "", "", False
        self._received: list[float] = []

    async def serve(self) -> None:
        """Send and receive until either ends."""
        logger.info("%s connected", self._origin)
        tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            logger.info("%s disconnected", self._origin)
            with contextlib.suppress(Exception):
                await self._socket.close()

    @property
    def _name(self) -> str:
        """The node that the page shows: the first one unless it has chosen."""
        return self._node or min(self._panel.views, default="")

    async def _send(self) -> None:
        images: dict[str, tuple[int, float]] = {}  # by topic: the number of the last one, and when it was sent
        while True:
            name = self._name
            self._panel.look_at(name)
            number, view = self._panel.views.get(name, (0, ""))
            beat = self._desk.show(number)
            await self._put(f'{{"beat": "{beat}", "at": {time.monotonic():.3f}, "view": {view or "null"}}}')
            await self._wait(beat, name, number)
            if self._sees:
                await self._send_images(name, images)

    async def _wait(self, beat: str, name: str, number: int) -> None:
        """Wait until the state has changed or it is time, and the page has taken this view: none waits for it."""
        while (lag := self._desk.lag(beat)) < _TAKES:
            changed = self._panel.views.get(name, (0, ""))[0] != number
            if self._seen == beat and (changed or lag > _PERIOD):
                return
            await asyncio.sleep(_STEP)
        raise TimeoutError(f"{self._origin} does not take what it is shown")

    async def _send_images(self, name: str, sent: dict[str, tuple[int, float]]) -> None:
        source, now = self._panel.images(name), time.monotonic()
        for index, topic in enumerate(source.names if source else ()):
            number, at = sent.get(f"{name} {topic}", (0, -1e9))
            if now - at < _IMAGES:
                continue
            found = await asyncio.get_running_loop().run_in_executor(ENCODER, source.newer, topic, number)
            if found:
                sent[f"{name} {topic}"] = found[0], now
                await self._put(bytes([index]) + found[1])

    async def _put(self, message: str | bytes) -> None:
        """Send a message; a page that does not take it in time is disconnected."""
        sent = self._socket.send_text(message) if isinstance(message, str) else self._socket.send_bytes(message)
        await asyncio.wait_for(sent, _SEND)

    async def _receive(self) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                self._hear(await self._socket.receive_text())
                now = time.monotonic()
                self._received = [at for at in self._received if now - at < 1.0] + [now]
                if len(self._received) > _MESSAGES:
                    logger.warning("%s: more than %d messages in a second", self._origin, _MESSAGES)
                    return

    def _hear(self, text: str) -> None:
        request = read_request(text)
        if request is None:
            self._look(text)
            return
        name = self._name
        try:
            until = self._desk.admit(request, self._panel.views.get(name, (0, ""))[0])
            if request.do not in ("press", "release"):
                self._panel.ask(Act(request, name, self._origin, until))
        except VlaRosError as error:
            self._panel.ask(Act(request, name, self._origin, refused=str(error)))

    def _look(self, text: str) -> None:
        """Take what a page has shown, and the node that it wants to show; ignore anything else."""
        try:
            said: Any = json.loads(text)
            self._seen, self._sees = str(said["seen"])[:100], said.get("images") is True
            if (node := str(said.get("node", ""))) in self._panel.views:
                self._node = node
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            logger.debug("%s: ignored %s", self._origin, one_line(text))


def _headers(connection: HTTPConnection, name: str) -> list[str]:
    return connection.headers.getlist(name)


def _address(connection: HTTPConnection) -> str:
    return f"{connection.client.host}:{connection.client.port}" if connection.client else "unknown"
