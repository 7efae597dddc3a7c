"""Sends requests and receives answers over a websocket, ZeroMQ or HTTP, each with a deadline.

Only one thread at a time may use a transport. Discard it after any error, because a late answer would be mistaken
for the answer to the next request.
"""

from __future__ import annotations

import http.client
import logging
import select
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import WebSocketURI, parse_uri

from vla_ros.errors import ServerLostError
from vla_ros.policies.remote.dialect import Dialect, Message
from vla_ros.policies.remote.messages import WireError, pack

_quiet = logging.getLogger("vla_ros.policies.remote.websocket")
_quiet.setLevel(logging.WARNING)  # its debug messages contain the API key

_READ = 1 << 18  # bytes
_BUFFER = 1 << 20  # bytes of the socket's send buffer, enough for two images
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

    def poll(self) -> None:  # noqa: B027 (HTTP and ZeroMQ have nothing to do)
        """Answer pings; call this regularly while no request is pending.

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
    """A websocket on a blocking socket.

    The blocking client of the package ``websockets`` reads on another thread, which costs 0.15 ms per request.
    """

    greets = True

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        self._messages: deque[Message] = deque()
        self._parts: list[bytes] = []
        self._text = False
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
        self._protocol.send_binary(message)
        self._flush(deadline)

    def receive(self, deadline: float) -> Message:
        """Return the next text or binary message, answering pings in the meantime."""
        while not self._messages:
            self._require_open()
            self._read(deadline)
        return self._messages.popleft()

    def poll(self) -> None:
        """Answer pings and detect a closed connection."""
        while select.select([self._socket], [], [], 0)[0] and self._protocol.state is State.OPEN:
            self._read(time.monotonic() + 1.0)
        if self._messages:
            raise WireError(f"{self._authority} sent an unexpected message")
        self._require_open()

    def close(self) -> None:
        """Send a close message and close the socket."""
        try:
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(1000)
                self._flush(time.monotonic() + 0.1)
        except (OSError, ServerLostError):
            pass
        finally:
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
        self._socket.connect(f"tcp://{self._authority}")

    def send(self, message: bytes, deadline: float) -> None:
        """Send one message."""
        self._wait(zmq.POLLOUT, deadline, "no connection")
        self._socket.send(with_token(message, self._key) if self._key else message, zmq.NOBLOCK)

    def receive(self, deadline: float) -> Message:
        """Return the answer."""
        self._wait(zmq.POLLIN, deadline, "no answer")
        return self._socket.recv(zmq.NOBLOCK)

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
        self._limit = target.max_answer
        self._headers = {"Content-Type": "application/json"}
        if target.api_key:
            self._headers["Authorization"] = f"Api-Key {target.api_key}"
        secure = urlsplit(target.url).scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(self._name, self._port, timeout=self._left(deadline, "no connection"))
        with self._reported():
            self._connection.connect()

    def send(self, message: bytes, deadline: float) -> None:
        """Send one request."""
        self._connection.sock.settimeout(self._left(deadline, "request not sent"))
        with self._reported():
            self._connection.request("POST", self._path, message, self._headers)

    def receive(self, deadline: float) -> Message:
        """Return the body of the answer."""
        body, allowed = b"", self._limit + 1
        self._connection.sock.settimeout(self._left(deadline, "no answer"))
        with self._reported():
            answer = self._connection.getresponse()
            while len(body) < allowed and (piece := answer.read1(min(_READ, allowed - len(body)))):
                body += piece
                if self._connection.sock is not None:
                    self._connection.sock.settimeout(self._left(deadline, "no answer"))
        answer.close()  # read1() leaves the connection busy after the last byte
        if len(body) > self._limit:
            raise WireError(f"{self._authority}: received an answer of more than {self._limit} bytes")
        if answer.status != http.HTTPStatus.OK:
            text = body[:200].decode("utf-8", "replace")
            raise WireError(f"{self._authority}: status {answer.status} {answer.reason}: {text}")
        return body

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within the deadline"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer (for a websocket server, use ws://)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refusal(response: Response) -> str:
    text = (response.body or b"")[:200].decode("utf-8", "replace").strip()
    key = "; set policy.api_key_file" if response.status_code == http.HTTPStatus.UNAUTHORIZED else ""
    return f"the server refuses this client: {response.status_code} {response.reason_phrase}. {text}".strip() + key
