import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest
import zmq
from websockets.sync.server import ServerConnection

from test.serve.serving import PATIENCE, until
from vla_ros.policies.remote.dialect import Request, ServerSaidError
from vla_ros.policies.remote.dialects import GR00T, OFT_HTTP, OPENPI, ROBOARENA
from vla_ros.policies.remote.messages import WireError, pack, unpack
from vla_ros.policies.remote.transport import Target

from .golden import one, recorded
from .links import GOOD, REQUEST, connected, link_to, linked, websocket


def test_roboarena_is_recognised_and_receives_resets() -> None:
    requests = []

    def arena(connection: ServerConnection) -> None:
        for data in connection:
            requests.append(unpack(bytes(data))["endpoint"])  # type: ignore[arg-type]
            connection.send("reset successful" if requests[-1] == "reset" else GOOD)

    greeting = one("roboarena", "default_config", 2).payload
    with websocket(arena, greeting=greeting) as port, linked(port) as link:
        assert link.peer.dialect is ROBOARENA
        link.request(replace(REQUEST, begins=True), PATIENCE)
        link.request(REQUEST, PATIENCE)
    assert requests == ["reset", "infer", "infer"]


@contextlib.contextmanager
def gr00t(answers: dict[str, bytes]) -> Iterator[int]:
    """A REP socket with an answer for each endpoint."""
    context = zmq.Context()
    responder = context.socket(zmq.REP)
    responder.setsockopt(zmq.LINGER, 0)
    port = responder.bind_to_random_port("tcp://127.0.0.1")
    ending = threading.Event()

    def run() -> None:
        while not ending.is_set():
            if responder.poll(20):
                message = unpack(responder.recv())
                responder.send(answers.get(message["endpoint"], b"ERROR"))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield port
    finally:
        ending.set()
        thread.join(PATIENCE)
        context.destroy(linger=0)


def test_gr00t_over_zeromq() -> None:
    scenario = [one("gr00t", "main_basic", number).payload for number in (11, 15, 19)]
    answers = dict(zip(("get_modality_config", "get_action", "reset"), scenario, strict=True))
    query = Request(
        {"video.wrist_image_left": np.zeros((8, 8, 3), np.uint8), "state.joint_position": np.ones(7)}, "go"
    )
    with gr00t(answers) as port, linked(port, GR00T, "zmq") as link:
        assert link.peer.metadata["version"] == "nd"
        assert link.request(replace(query, begins=True), PATIENCE).actions["joint_position"].shape == (40, 7)
        answers["get_action"] = pack({"error": "camera 2 lost"})
        with pytest.raises(ServerSaidError, match="camera 2 lost"):
            link.request(query, PATIENCE)
        answers["get_action"] = b"\xc1"
        with pytest.raises(WireError, match="not valid msgpack"):
            link.request(query, PATIENCE)
        until(lambda: connected(link))
        answers["get_action"] = scenario[1]
        link.request(query, PATIENCE)


def test_gr00t_n15_is_not_asked_to_reset() -> None:
    hello, action, unknown = (one("gr00t", "n15_basic", number).payload for number in (11, 15, 23))
    answers = {"get_modality_config": hello, "get_action": action, "reset": unknown}
    query = Request({"video.webcam": np.zeros((12, 16, 3), np.uint8), "state.single_arm": np.ones(5)}, "go")
    with gr00t(answers) as port, linked(port, GR00T, "zmq") as link:
        for _ in range(2):
            assert link.request(replace(query, begins=True), PATIENCE).actions["single_arm"].shape == (16, 5)


def test_a_gr00t_server_that_leaves_is_lost_before_the_next_request() -> None:
    hello = one("gr00t", "main_basic", 11).payload
    with contextlib.ExitStack() as stack:
        with gr00t({"get_modality_config": hello}) as port:
            link = stack.enter_context(linked(port, GR00T, "zmq"))
            assert link.lost is None
        until(lambda: link.lost is not None)


def test_a_wrong_gr00t_token_names_the_option() -> None:
    refused = one("gr00t", "main_token", 15).payload
    named = pytest.raises(ServerSaidError, match=r"Invalid API token; set policy.api_key_file")
    with gr00t({"get_modality_config": refused}) as port, named:
        link_to(port, GR00T, "zmq").start(PATIENCE)


class Act(BaseHTTPRequestHandler):
    """Answers with the next of ``replies``, the last one again and again."""

    protocol_version = "HTTP/1.1"
    replies: ClassVar[list[tuple[int, bytes]]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, data = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


CHUNK = next(message.payload for message in recorded("openvla_oft") if message.number == 1)


@contextlib.contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()


def test_an_http_server_may_close_idle_connections() -> None:
    """As uvicorn does after 5 s."""
    connections = []

    class Brief(Act):
        timeout = 0.15  # s without a request
        replies: ClassVar = [(200, CHUNK)]

        def setup(self) -> None:
            connections.append(time.monotonic())
            super().setup()

    with contextlib.ExitStack() as stack:
        with http_server(Brief) as port:
            link = stack.enter_context(linked(port, OFT_HTTP, "http"))
            for count in range(1, 4):
                assert link.request(REQUEST, PATIENCE).actions["actions"].shape == (25, 14)
                assert link.lost is None
                until(lambda count=count: len(connections) > count)  # type: ignore[misc]
        until(lambda: link.lost is not None)


def test_oft_over_http() -> None:
    class Failing(Act):
        replies: ClassVar = [(200, CHUNK), (200, b'"error"'), (500, b"down"), (200, bytes(2 << 20)), (200, CHUNK)]

    with http_server(Failing) as port, linked(port, OFT_HTTP, "http") as link:
        assert link.request(REQUEST, PATIENCE).actions["actions"].shape == (25, 14)
        for reason in ("responded with an error: error", "status 500", "a response of more than"):
            until(lambda: connected(link))
            with pytest.raises(WireError, match=reason):
                link.request(REQUEST, PATIENCE)
        until(lambda: connected(link))
        assert link.request(REQUEST, PATIENCE).actions["actions"].shape == (25, 14)


def test_the_key_is_not_shown() -> None:
    target = Target("ws://host", OPENPI, "a-secret-of-mine")
    assert "secret" not in repr(target) + str(target)
