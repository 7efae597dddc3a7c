"""Sends requests and receives responses over a websocket, ZeroMQ or HTTP, each with a deadline.

Only one thread at a time may use a transport. Discard it after any error, because a late response would be mistaken
for the response to the next request.
"""

from __future__ import annotations

import http.client
import logging
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.sync import client

from vla_ros.errors import ServerLostError
from vla_ros.policies.remote.dialect import KEY_HINT, Dialect, Message
from vla_ros.policies.remote.frame_limit import limit_frames
from vla_ros.policies.remote.messages import WireError, pack

_quiet = logging.getLogger("vla_ros.policies.remote.websocket")
_quiet.setLevel(logging.CRITICAL)  # its debug messages contain the API key, its errors are reported here

_BUFFER = 1 << 20  # bytes of the socket's send buffer, enough for two images
_GOODBYE = 0.1  # s to wait for a server's part of the closing handshake
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
    max_response: int = 64 << 20  # bytes

    @property
    def shown(self) -> str:
        """The address for the log, without its query, which may have a secret."""
        return self.url.partition("?")[0]


class Transport(ABC):
    """A connection to one server."""

    greets = False
    """True if the server sends its metadata without a request."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._name, self._port = parts.hostname or "", parts.port or target.dialect.port
        self._path = parts.path if parts.path not in ("", "/") else target.dialect.path
        self._path += f"?{parts.query}" if parts.query else ""
        self._authority = f"[{self._name}]:{self._port}" if ":" in self._name else f"{self._name}:{self._port}"
        self._key = target.api_key
        self._headers = {"Authorization": f"{target.dialect.authorization} {self._key}"} if self._key else {}

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

    def abort(self) -> None:  # noqa: B027 (ZeroMQ never blocks)
        """End calls that another thread has not returned from; the transport can then only be closed."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; wait at most 0.1 s for the server."""

    def _left(self, deadline: float, what: str) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ServerLostError(f"{self._authority}: {what} within the deadline")
        return left

    @contextmanager
    def _reported(self, deadline: float) -> Iterator[None]:
        """Convert the libraries' errors to ServerLostError with the server's address, or to WireError."""
        try:
            yield
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                raise WireError(f"{self._authority}: {error.sent}") from None
            self._left(deadline, "no response")  # of a connection that was aborted
            why = f" ({error.rcvd.code} {error.rcvd.reason}".rstrip() + ")" if error.rcvd else ""
            raise ServerLostError(f"{self._authority} closed the connection{why}") from None
        except (OSError, http.client.HTTPException) as error:
            self._left(deadline, "no response")
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
    """A connection of the package ``websockets``, whose thread reads messages and answers pings."""

    greets = True

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        try:
            self._connection = client.connect(
                f"{urlsplit(target.url).scheme}://{self._authority}{self._path}",
                additional_headers=self._headers,
                open_timeout=self._left(deadline, "no connection"),
                close_timeout=_GOODBYE,
                ping_interval=None,  # openpi's server answers no ping during an inference
                max_size=target.max_response,
                max_queue=4,  # frames that are received before they are read
                compression=None,
                proxy=None,
                logger=_quiet,
            ).__enter__()
        except InvalidStatus as error:
            temporary = error.response.status_code >= http.HTTPStatus.INTERNAL_SERVER_ERROR
            kind = ServerLostError if temporary else WireError
            raise kind(f"{self._authority}: {_refusal(error.response)}") from None
        except (InvalidHandshake, EOFError, ssl.SSLError, TimeoutError) as error:
            why = _reason(error) + _HINTS.get(type(error), "")
            raise ServerLostError(f"{self._authority}: the websocket handshake failed ({why})") from None
        except OSError as error:
            raise ServerLostError(f"{self._authority}: {_reason(error)}") from None
        self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        limit_frames(self._connection.protocol, _is_idle)

    def send(self, message: bytes, deadline: float) -> None:
        with self._reported(deadline):
            self._connection.send(message)

    def receive(self, deadline: float) -> Message:
        with self._reported(deadline):
            return self._connection.recv(max(0.0, deadline - time.monotonic()))

    def poll(self, deadline: float) -> None:
        with self._reported(deadline):
            try:
                self._connection.recv(0)
            except TimeoutError:
                return
        raise WireError(f"{self._authority} sent an unexpected message")

    def abort(self) -> None:
        _abort(self._connection.socket)

    def close(self) -> None:
        self._connection.close()


class ZeroMq(Transport):
    """A REQ socket to a GR00T server, which expects the API token in each request."""

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, target.max_response)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{self._authority}")

    def send(self, message: bytes, deadline: float) -> None:
        self._wait(zmq.POLLOUT, deadline, "no connection")
        self._socket.send(with_token(message, self._key) if self._key else message, zmq.NOBLOCK)

    def receive(self, deadline: float) -> Message:
        self._wait(zmq.POLLIN, deadline, "no response")
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
    """Append the API token to a request, a map of fewer than 15 entries, where GR00T's client puts it."""
    return bytes([request[0] + 1]) + request[1:] + pack("api_token") + pack(key)


class Http(Transport):
    """POST requests over one persistent connection."""

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target)
        self._limit = target.max_response
        self._headers["Content-Type"] = "application/json"
        secure = urlsplit(target.url).scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(self._name, self._port)
        self._connect(deadline)

    def _connect(self, deadline: float) -> None:
        self._connection.timeout = self._left(deadline, "no connection")
        with self._reported(deadline):
            self._connection.connect()

    def poll(self, deadline: float) -> None:
        """Connect again if the server closed the connection, as it does with connections that are idle."""
        sock = self._connection.sock
        if sock is None or select.select([sock], [], [], 0)[0]:
            self._connection.close()
            self._connect(deadline)

    def send(self, message: bytes, deadline: float) -> None:
        with self._reported(deadline):
            self._connection.sock.settimeout(self._left(deadline, "request not sent"))
            self._connection.request("POST", self._path, message, self._headers)

    def receive(self, deadline: float) -> Message:
        with self._reported(deadline):
            self._connection.sock.settimeout(self._left(deadline, "no response"))
            with self._connection.getresponse() as response:
                body = response.read(self._limit + 1)
        if len(body) > self._limit:
            raise WireError(f"{self._authority}: received a response of more than {self._limit} bytes")
        if response.status != http.HTTPStatus.OK:
            text = body[:200].decode("utf-8", "replace")
            raise WireError(
                f"{self._authority}: status {response.status} {response.reason}: {text}{_hint(response.status)}"
            )
        return body

    def abort(self) -> None:
        if (sock := self._connection.sock) is not None:
            _abort(sock)

    def close(self) -> None:
        self._connection.close()


def _abort(sock: socket.socket) -> None:
    """End blocked calls; closing the socket then resets the connection, even if the server reads nothing."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)


def _is_idle(frame: Frame) -> bool:
    return not frame.data or frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no response within the deadline"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without a response (for a websocket server, use ws://)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refusal(response: Response) -> str:
    text = (response.body or b"")[:200].decode("utf-8", "replace").strip()
    said = f"{response.status_code} {response.reason_phrase}. {text}".strip()
    return f"the server refuses this client: {said}{_hint(response.status_code)}"


def _hint(status: int) -> str:
    return KEY_HINT if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN) else ""
