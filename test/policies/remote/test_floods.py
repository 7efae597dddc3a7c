import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from test.serve.serving import PATIENCE, until
from vla_ros.errors import VlaRosError
from vla_ros.policies.remote.dialects import OFT_HTTP, OPENPI, Dialect
from vla_ros.policies.remote.link import Link
from vla_ros.policies.remote.messages import pack

from .links import GOOD, REQUEST, connected, linked

SECONDS = 0.4
SLACK = 0.5  # s of a busy machine

DRIP = 0.01  # s between bytes


def frames(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=False)


PINGS = frames(Opcode.PING, b"p" * 125) * 200
PONGS = frames(Opcode.PONG) * 2000
EMPTY = frames(Opcode.CONT, fin=False) * 2000
FLOODS: dict[str, Iterable[bytes]] = {
    "pings": itertools.repeat(PINGS),
    "short pings": itertools.repeat(frames(Opcode.PING) * 2000),
    "pongs": itertools.repeat(PONGS),
    "empty frames": itertools.chain([frames(Opcode.BINARY, fin=False)], itertools.repeat(EMPTY)),
    "a frame byte by byte": itertools.chain([b"\x82\x7e\x40\x00"], itertools.repeat(b"x")),
}


class Flooding:
    """A server on a plain socket that answers, or floods while :attr:`flood` is set.

    ``reads`` tells whether it reads what the client sends during the flood.
    """

    def __init__(self, answer: Callable[..., None]) -> None:
        self.flood: Iterable[bytes] | None = None
        self.at_once = self.reads = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE)
                self._answer(self, connection)

    def send_flood(self, connection: socket.socket) -> None:
        """Send the flood until it ends or the client leaves."""
        flood = self.flood
        assert flood is not None
        for data in flood:
            if self.flood is not flood:
                return
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                connection.sendall(data)
            if len(data) == 1:
                time.sleep(DRIP)
            if self.reads:
                with contextlib.suppress(BlockingIOError):
                    connection.setblocking(False)
                    if not connection.recv(1 << 16):
                        return

    def close(self) -> None:
        self.flood = None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def websocket(server: Flooding, connection: socket.socket) -> None:
    protocol = ServerProtocol(max_size=None)

    def flush() -> None:
        for data in protocol.data_to_send():
            connection.sendall(data)

    while data := connection.recv(1 << 16):
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Request):
                protocol.send_response(protocol.accept(event))
                protocol.send_binary(pack({}))
                flush()
                if server.at_once and server.flood is not None:
                    server.send_flood(connection)
                    return
            elif event.opcode is Opcode.BINARY:  # type: ignore[union-attr]
                if server.flood is not None:
                    server.send_flood(connection)
                    return
                protocol.send_binary(GOOD)
        flush()


def http(server: Flooding, connection: socket.socket) -> None:
    body = b"[[0.5, 0.5]]"
    good = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with connection.makefile("rb") as asked:
        while asked.readline():
            length = 0
            while (line := asked.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            asked.read(length)
            if server.flood is not None:
                server.send_flood(connection)
                return
            connection.sendall(good)


HTTP_FLOODS: dict[str, Iterable[bytes]] = {
    "headers byte by byte": itertools.chain([b"HTTP/1.1 200 OK\r\nX: "], itertools.repeat(b"x")),
    "a body byte by byte": itertools.chain(
        [b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n"], itertools.repeat(b"x")
    ),
    "interim answers": itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 200),
    "chunks byte by byte": itertools.chain(
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], itertools.repeat(b"1")
    ),
}


@contextlib.contextmanager
def flooding(
    answer: Callable[[Flooding, socket.socket], None], dialect: Dialect, scheme: str
) -> Iterator[tuple[Flooding, Link]]:
    server = Flooding(answer)
    try:
        # Without the longer pauses after failed attempts.
        with linked(server.port, dialect, scheme, wait=lambda event, pause: event.wait(min(pause, 0.1))) as link:
            yield server, link
    finally:
        server.close()


def keeps_deadline(link: Link, seconds: float = SECONDS) -> None:
    began = time.monotonic()
    with pytest.raises(VlaRosError):
        link.request(REQUEST, seconds)
    assert time.monotonic() - began < 1.2 * seconds + SLACK


def recovers(link: Link) -> bool:
    with contextlib.suppress(VlaRosError):
        return bool(link.request(REQUEST, PATIENCE).actions)
    return False


@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "reads"])
@pytest.mark.parametrize("at_once", [False, True], ids=["as answer", "at once"])
@pytest.mark.parametrize("kind", FLOODS)
def test_a_websocket_server_that_floods(kind: str, at_once: bool, reads: bool) -> None:
    with flooding(websocket, OPENPI, "ws") as (server, link):
        assert recovers(link)
        server.at_once, server.reads, server.flood = at_once, reads, FLOODS[kind]
        for _ in range(3):
            keeps_deadline(link)
            until(lambda: at_once or connected(link))
        server.flood = None
        until(lambda: recovers(link))


@pytest.mark.parametrize("kind", HTTP_FLOODS)
def test_an_http_server_that_drips(kind: str) -> None:
    with flooding(http, OFT_HTTP, "http") as (server, link):
        assert recovers(link)
        server.flood = HTTP_FLOODS[kind]
        for _ in range(2):
            keeps_deadline(link)
            until(lambda: connected(link))
        server.flood = None
        until(lambda: recovers(link))
