"""Sends requests and receives answers over a websocket, ZeroMQ or HTTP, each with a deadline.

Only one thread at a time may use a transport. Discard it after any error, because a late answer would be mistaken
for the answer to the next request.
"""

from __future__ import annotations

import http.client
import io
import logging
import select
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import WebSocketURI, parse_uri

from vla_ros.errors import ServerLostError
from vla_ros.policies.remote.dialect import KEY_HINT, Dialect, Message
from vla_ros.policies.remote.messages import WireError, pack

_quiet = logging.getLogger("vla_ros.policies.remote.websocket")
_quiet.setLevel(logging.WARNING)  # its debug messages contain the API key

_READ = 1 << 13  # bytes; even if they are all tiny frames, they are parsed within a tenth of a second
_BUFFER = 1 << 20  # bytes of the socket's send buffer, enough for two images
_FLOOD = 1000  # control or empty frames in one exchange; servers ping every 20 s
_HINTS: dict[type[BaseException], str] = {
    ssl.SSLCertVerificationError: "; for a self-signed certificate, set SSL_CERT_FILE to its file",
    ssl.SSLEOFError: "; for a server without TLS, use ws://",
    InvalidMessage: "; for a server with TLS, use wss://",
}


@dataclass(frozen=True)
class Target:
    """The address of a server and how to talk to it."""

    url: str  # as the user wrote it
    dialect: Dialect  # includes the default port and path
    api_key: str = field(default="", repr=False)  # "" for none
    max_answer: int = 64 << 20  # bytes


class Transport(ABC):
    """A connection to one server."""

    greets = False
    """True if the server sends its metadata without a request."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._name, self._port = parts.hostname or "", parts.port or target.dialect.port
        self._path = parts.path if parts.path not in ("", "/") else target.dialect.path
        self._authority = f"[{self._name}]:{self._port}" if ":" in self._name else f"{self._name}:{self._port}"

    @abstractmethod
    def send(self, message: bytes, deadline: float) -> None:
        """Send one message before ``deadline``, a time of ``time.monotonic``."""

    @abstractmethod
    def receive(self, deadline: float) -> Message:
        """Return the next message before ``deadline``.

        Raises:
            ServerLostError: The connection was lost, or no message came.
            WireError: The message is longer than allowed.
        """

    @abstractmethod
    def poll(self, deadline: float) -> None:
        """Check the connection and answer pings, before each request and regularly while none is pending.

        Raises ServerLostError if the connection was lost, WireError if the server sent an unexpected message.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the socket at once."""

    def _left(self, deadline: float, what: str) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ServerLostError(f"{self._authority}: {what} within the deadline")
        return left

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Convert socket errors to :class:`ServerLostError` with the server's address."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ServerLostError(f"{self._authority}: {_reason(error)}") from error


def connect(target: Target, deadline: float) -> Transport:
    """Connect to a server before ``deadline``.

    Raises ServerLostError if the server cannot be reached, WireError if it refuses this client.
    """
    scheme = urlsplit(target.url).scheme
    if scheme in ("ws", "wss"):
        return WebSocket(target, deadline)
    return ZeroMq(target, deadline) if scheme in ("zmq", "tcp") else Http(target, deadline)


class WebSocket(Transport):
    """The protocol of the package ``websockets`` on a blocking socket.

    That package's own blocking client keeps no deadline: a server that sends pings and reads nothing blocks its
    reading thread, which then holds the lock that every request needs.
    """

    greets = True

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        self._messages: deque[Message] = deque()
        self._parts: list[bytes] = []
        self._text = False
        self._idle_frames = 0  # control and empty frames since the last request
        uri = parse_uri(f"{urlsplit(target.url).scheme}://{self._authority}{self._path}")
        self._protocol = ClientProtocol(uri, max_size=target.max_answer, logger=_quiet)
        with self._reported():
            self._socket = socket.create_connection((uri.host, uri.port), self._left(deadline, "no connection"))
        try:
            self._shake_hands(uri, target.api_key, deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, InvalidStatus):
                temporary = error.response.status_code >= http.HTTPStatus.INTERNAL_SERVER_ERROR
                kind = ServerLostError if temporary else WireError
                raise kind(f"{self._authority}: {_refusal(error.response)}") from None
            if isinstance(error, (OSError, InvalidHandshake, EOFError)):
                why = _reason(error) + _HINTS.get(type(error), "")
                raise ServerLostError(f"{self._authority}: the websocket handshake failed ({why})") from None
            raise

    def _shake_hands(self, uri: WebSocketURI, api_key: str, deadline: float) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        if uri.secure:
            context = ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=uri.host)
        request = self._protocol.connect()
        if api_key:
            request.headers["Authorization"] = f"Api-Key {api_key}"
        self._protocol.send_request(request)
        self._flush(deadline)
        while self._protocol.state is State.CONNECTING:
            self._read(deadline)
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc

    def send(self, message: bytes, deadline: float) -> None:
        """Send a binary message."""
        self._require_open()
        self._idle_frames = 0
        self._protocol.send_binary(message)
        self._flush(deadline)

    def receive(self, deadline: float) -> Message:
        """Return the next text or binary message, answering pings in the meantime."""
        while not self._messages:
            self._require_open()
            self._read(deadline)
        return self._messages.popleft()

    def poll(self, deadline: float) -> None:
        """Answer pings and detect a closed connection."""
        self._idle_frames = 0
        while _is_readable(self._socket) and self._protocol.state is State.OPEN:
            self._read(deadline)
        if self._messages:
            raise WireError(f"{self._authority} sent an unexpected message")
        self._require_open()

    def close(self) -> None:
        """Send a close message, if the socket's buffer has room for it, and close the socket."""
        with suppress(OSError):
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(1000)
                self._socket.settimeout(0)
                self._socket.sendall(b"".join(self._protocol.data_to_send()))
        self._socket.close()

    def _flush(self, deadline: float) -> None:
        for data in self._protocol.data_to_send():
            self._socket.settimeout(self._left(deadline, "request not sent"))
            with self._reported():
                if data:
                    self._socket.sendall(data)
                else:
                    self._socket.shutdown(socket.SHUT_WR)

    def _read(self, deadline: float) -> None:
        self._socket.settimeout(self._left(deadline, "no answer"))
        with self._reported():
            data = self._socket.recv(_READ)
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        events = self._protocol.events_received()
        try:
            self._flush(deadline)
        except ServerLostError:
            if not events:
                raise
        for event in events:
            if isinstance(event, Frame):
                self._take(event)
        error = self._protocol.parser_exc
        if isinstance(error, Exception) and not self._messages:
            raise (WireError if isinstance(error, PayloadTooBig) else ServerLostError)(
                f"{self._authority}: {error}"
            )

    def _take(self, frame: Frame) -> None:
        if not frame.data or frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._idle_frames += 1
            if self._idle_frames > _FLOOD:
                raise ServerLostError(f"{self._authority} sent {_FLOOD} empty frames or pings instead of an answer")
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return
        self._parts.append(bytes(frame.data))
        if frame.fin:
            message = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
            self._parts = []
            self._messages.append(message.decode("utf-8", "replace") if self._text else message)

    def _require_open(self) -> None:
        if self._protocol.state is not State.OPEN:
            close = self._protocol.close_rcvd
            why = f" ({close.code}{': ' + close.reason if close.reason else ''})" if close else ""
            raise ServerLostError(f"{self._authority} closed the connection{why}")


class ZeroMq(Transport):
    """A REQ socket to a GR00T server, which expects the API token in each request."""

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        self._key = target.api_key
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, target.max_answer)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{self._authority}")

    def send(self, message: bytes, deadline: float) -> None:
        """Send one message."""
        self._wait(zmq.POLLOUT, deadline, "no connection")
        self._socket.send(with_token(message, self._key) if self._key else message, zmq.NOBLOCK)

    def receive(self, deadline: float) -> Message:
        """Return the answer."""
        self._wait(zmq.POLLIN, deadline, "no answer")
        return self._socket.recv(zmq.NOBLOCK)

    def poll(self, deadline: float) -> None:
        """Detect a closed connection, which ZeroMQ would replace in silence."""
        if self._monitor.poll(0):
            raise ServerLostError(f"{self._authority} closed the connection")

    def _wait(self, event: int, deadline: float, what: str) -> None:
        while not self._socket.poll(max(1, int(1000 * self._left(deadline, what))), event):
            pass

    def close(self) -> None:
        """Discard pending messages and close the socket."""
        self._context.destroy(linger=0)


def with_token(request: bytes, key: str) -> bytes:
    """Append the API token to a request, where GR00T's client puts it.

    The request must be a map of fewer than 15 entries.
    """
    return bytes([request[0] + 1]) + request[1:] + pack("api_token") + pack(key)


class Http(Transport):
    """POST requests over one persistent connection."""

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        self._limit, self._deadline = target.max_answer, deadline
        self._headers = {"Content-Type": "application/json"}
        if target.api_key:
            self._headers["Authorization"] = f"Api-Key {target.api_key}"
        secure = urlsplit(target.url).scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(self._name, self._port)
        self._connection.response_class = self._response  # type: ignore[assignment]
        self._connect(deadline)

    def _connect(self, deadline: float) -> None:
        self._connection.timeout = self._left(deadline, "no connection")
        with self._reported():
            self._connection.connect()

    def _response(self, sock: socket.socket, **given: Any) -> http.client.HTTPResponse:
        answer = http.client.HTTPResponse(sock, **given)
        answer.fp.close()
        answer.fp = io.BufferedReader(_DeadlineReader(sock, lambda: self._left(self._deadline, "no answer")))
        return answer

    def poll(self, deadline: float) -> None:
        """Connect again if the server closed the connection, as it does with connections that are idle."""
        if self._connection.sock is None or _is_readable(self._connection.sock):
            self._connection.close()
            self._connect(deadline)

    def send(self, message: bytes, deadline: float) -> None:
        """Send one request."""
        self._connection.sock.settimeout(self._left(deadline, "request not sent"))
        with self._reported():
            self._connection.request("POST", self._path, message, self._headers)

    def receive(self, deadline: float) -> Message:
        """Return the body of the answer."""
        self._deadline = deadline
        with self._reported(), self._connection.getresponse() as answer:
            body = answer.read(self._limit + 1)
        if len(body) > self._limit:
            raise WireError(f"{self._authority}: received an answer of more than {self._limit} bytes")
        if answer.status != http.HTTPStatus.OK:
            text = body[:200].decode("utf-8", "replace")
            raise WireError(
                f"{self._authority}: status {answer.status} {answer.reason}: {text}{_hint(answer.status)}"
            )
        return body

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket, waiting at most ``left()`` seconds each time."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self._socket, self._left = sock, left
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open until the body was read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._left())
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _is_readable(sock: socket.socket) -> bool:
    """Return True if data have arrived, or the connection was closed."""
    return bool(select.select([sock], [], [], 0)[0])


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within the deadline"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer (for a websocket server, use ws://)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refusal(response: Response) -> str:
    text = (response.body or b"")[:200].decode("utf-8", "replace").strip()
    said = f"{response.status_code} {response.reason_phrase}. {text}".strip()
    return f"the server refuses this client: {said}{_hint(response.status_code)}"


def _hint(status: int) -> str:
    return KEY_HINT if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN) else ""
