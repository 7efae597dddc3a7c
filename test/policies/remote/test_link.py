import contextlib
import logging
import socket
import threading
import time

import numpy as np
import pytest
from websockets.sync.server import ServerConnection

from test.serve.serving import PATIENCE, until
from vla_ros.errors import ServerLostError, VlaRosError
from vla_ros.policies.remote.dialects import OPENPI
from vla_ros.policies.remote.link import FIRST_PAUSE, LONGEST_PAUSE, Link, pause
from vla_ros.policies.remote.messages import WireError, pack
from vla_ros.policies.remote.transport import Target

from .links import GOOD, REQUEST, connected, link_to, linked, obliging, websocket


def test_attempts_are_made_after_growing_pauses() -> None:
    waited: list[float] = []
    enough = threading.Event()

    def wait(event: threading.Event, seconds: float) -> bool:
        if connected(link):  # between looks at an idle connection
            return event.wait(0.01)
        waited.append(seconds)
        if len(waited) < 9:
            return False
        enough.set()
        return event.wait(PATIENCE)

    with websocket(obliging) as port:
        link = link_to(port, chance=lambda: 1.0, wait=wait)
        link.start(PATIENCE)
    assert enough.wait(PATIENCE)
    link.close()
    assert waited[:9] == [min(FIRST_PAUSE * 2**failures, LONGEST_PAUSE) for failures in range(9)]
    assert pause(3, 0.0) == pause(3, 1.0) / 2


def test_a_loss_is_noticed_without_a_request() -> None:
    with contextlib.ExitStack() as stack:
        with websocket(obliging) as port:
            link = stack.enter_context(linked(port))
            link.request(REQUEST, PATIENCE)
            assert link.lost is None
            ended = time.monotonic()
        until(lambda: link.lost is not None)
        lost = link.lost
        assert lost is not None
        assert "closed the connection" in lost.why or "refused" in lost.why  # by then it has tried to reconnect
        assert lost.seconds <= time.monotonic() - ended


def test_a_loss_ends_with_the_next_answer_if_a_request_was_lost() -> None:
    good = threading.Event()
    good.set()

    def leave(connection: ServerConnection) -> None:
        for _ in connection:
            if not good.is_set():
                return
            connection.send(GOOD)

    with websocket(leave) as port, linked(port) as link:
        link.request(REQUEST, PATIENCE)
        good.clear()
        for _ in range(3):
            until(lambda: connected(link))
            with pytest.raises(ServerLostError, match=r"closed the connection \(1000\); reconnecting"):
                link.request(REQUEST, PATIENCE)
            assert link.lost is not None
        until(lambda: connected(link))
        assert link.lost is not None
        good.set()
        link.request(REQUEST, PATIENCE)
        assert link.lost is None


def test_without_a_connection_requests_fail_at_once() -> None:
    with websocket(obliging) as port:
        link = link_to(port)
        link.start(PATIENCE)
    until(lambda: not connected(link))
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(ServerLostError, match="reconnecting"):
            link.request(REQUEST, PATIENCE)
    assert time.monotonic() - began < 1.0
    link.close()


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    late = threading.Event()
    seen = []

    def slow(connection: ServerConnection) -> None:
        for frame in connection:
            seen.append(frame)
            if len(seen) == 1:
                assert late.wait(PATIENCE)
                connection.send(pack({"actions": np.full((2, 7), 5.0)}))
            else:
                connection.send(GOOD)

    with websocket(slow) as port, linked(port) as link:
        with pytest.raises(ServerLostError, match="no response within the deadline"):
            link.request(REQUEST, 0.1)
        late.set()
        until(lambda: connected(link))
        assert link.request(REQUEST, PATIENCE).actions["actions"][0, 0] == 1.0


def test_an_unexpected_message_ends_the_connection() -> None:
    def twice(connection: ServerConnection) -> None:
        for _ in connection:
            connection.send(GOOD)
            connection.send(GOOD)

    with websocket(twice) as port, linked(port) as link:
        link.request(REQUEST, PATIENCE)
        until(lambda: not connected(link) or refused(link, "sent an unexpected message"))


def refused(link: Link, reason: str) -> bool:
    try:
        link.request(REQUEST, PATIENCE)
    except VlaRosError as error:
        return reason in str(error) or "reconnecting" in str(error)
    return False


def test_pings_are_answered_between_requests() -> None:
    def ping(connection: ServerConnection) -> None:
        assert connection.ping().wait(PATIENCE)
        obliging(connection)

    with websocket(ping) as port, linked(port) as link:
        link.request(REQUEST, PATIENCE)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("Traceback\nValueError: no camera called wrist", "error: ValueError: no camera called wrist"),
        (pack({"error": "out of memory"}), "error: out of memory"),
        (pack({"actions": np.full((2, 7), np.inf)}), "not finite"),
        (pack({}), "expected a map with actions"),
        (GOOD[:-3], "not valid msgpack"),
        (bytes(2 << 20), "1009|exceeds|over|limit|too big"),
    ],
)
def test_the_link_survives_a_hostile_answer(answer: bytes | str, reason: str) -> None:
    hostile = threading.Event()
    hostile.set()

    def answers(connection: ServerConnection) -> None:
        for _ in connection:
            connection.send(answer if hostile.is_set() else GOOD)

    with websocket(answers) as port, linked(port) as link:
        with pytest.raises(WireError, match=reason):
            link.request(REQUEST, PATIENCE)
        hostile.clear()
        until(lambda: connected(link))
        assert link.request(REQUEST, PATIENCE).actions["actions"].shape == (2, 7)


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"\x00" * 100, b"SSH-2.0-OpenSSH\r\n"])
def test_another_server_than_a_websocket_is_reported(first: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(1 << 16)
                    connection.sendall(first)
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(VlaRosError, match=r"handshake failed|tried for 0.3 s|refuses this client: 200"):
            link_to(listener.getsockname()[1]).start(0.3)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_missing_server_is_reported_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ServerLostError, match=r"Connection refused \(tried for 0.3 s\); check that the server"):
        link_to(port).start(0.3)
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("address", "path"), [("", "/"), ("?key=a%20b&n=1", "/?key=a%20b&n=1"), ("/robots/7?key=a", "/robots/7?key=a")]
)
def test_the_query_of_the_address_is_sent_and_not_logged(address: str, path: str, caplog) -> None:
    asked: list[str] = []

    def answer(connection: ServerConnection) -> None:
        asked.append(connection.request.path if connection.request else "")
        obliging(connection)

    with websocket(answer) as port, caplog.at_level(logging.INFO, "vla_ros"):
        link = Link(Target(f"ws://127.0.0.1:{port}{address}", OPENPI))
        link.start(PATIENCE)
        try:
            link.request(REQUEST, PATIENCE)
        finally:
            link.close()
    assert asked == [path]
    assert "connected to" in caplog.text
    assert "key=" not in caplog.text
