"""Links to servers in this process."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from test.serve.serving import PATIENCE
from vla_ros.errors import ServerLostError
from vla_ros.policies.remote.dialect import Request
from vla_ros.policies.remote.dialects import OPENPI, Dialect
from vla_ros.policies.remote.link import Link
from vla_ros.policies.remote.messages import pack
from vla_ros.policies.remote.transport import Target

REQUEST = Request({"observation/image": np.zeros((8, 8, 3), np.uint8), "observation/state": np.ones(3)}, "go", "A")
GOOD = pack({"actions": np.ones((2, 7), np.float32)})
Handler = Callable[[ServerConnection], None]


@contextlib.contextmanager
def websocket(handler: Handler, port: int = 0, greeting: bytes = pack({}), **given: Any) -> Iterator[int]:
    """A server that sends ``greeting`` as its metadata, then calls ``handler``; yields its port."""
    connections = []

    def greet(connection: ServerConnection) -> None:
        connections.append(connection)
        with contextlib.suppress(ConnectionClosed, OSError):
            connection.send(greeting)
            handler(connection)

    with serve(greet, "127.0.0.1", port, compression=None, max_size=None, **given) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            for connection in connections:  # before version 17, the library leaves them open
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)


def obliging(connection: ServerConnection) -> None:
    for _ in connection:
        connection.send(GOOD)


def link_to(port: int, dialect: Dialect = OPENPI, scheme: str = "ws", **given: Any) -> Link:
    target = Target(f"{scheme}://127.0.0.1:{port}", dialect, max_response=given.pop("max_response", 1 << 20))
    return Link(target, **given)


@contextlib.contextmanager
def linked(port: int, *args: Any, **given: Any) -> Iterator[Link]:
    link = link_to(port, *args, **given)
    link.start(PATIENCE)
    try:
        yield link
    finally:
        link.close()


def connected(link: Link) -> bool:
    try:
        return link.peer is not None
    except ServerLostError:
        return False
