import io
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from websockets.exceptions import ConnectionClosedError, WebSocketException
from websockets.sync.client import connect

from vla_ros.policies.remote.messages import WireError, pack, unpack
from vla_ros.serve.service import Limits

from .serving import PATIENCE, until
from .test_server import Start, ask, get, request, robot


def test_a_flood_of_pings_ends_its_connection(serving: Start) -> None:
    _, port = serving()
    with robot(port) as good, robot(port) as flood:
        with suppress(OSError):
            flood.socket.sendall(b"\x89\x80\x00\x00\x00\x00" * 100_000)
        with pytest.raises(ConnectionClosedError, match="more than 250 small frames per second"):
            flood.recv(PATIENCE)
        assert "actions" in ask(good, request())


def test_as_many_pings_as_keepalive_needs_are_answered(serving: Start) -> None:
    _, port = serving()
    with robot(port) as one:
        for _ in range(100):
            assert one.ping().wait(PATIENCE)
        assert "actions" in ask(one, request())


def test_a_request_of_many_entries_is_refused_before_it_is_built() -> None:
    hostile = pack({f"key{number}": number for number in range(60_000)})
    began = time.thread_time()
    with pytest.raises(WireError, match="exceeds max_map_len"):
        unpack(hostile, 4096)
    assert time.thread_time() - began < 0.01
    nested = pack({"a": [[number] for number in range(4000)]})
    with pytest.raises(WireError, match="more than 4096 entries"):
        unpack(nested, 4096)


def test_invalid_requests_in_a_row_leave_the_server_to_others(serving: Start) -> None:
    _, port = serving()
    hostile = pack({"a": {f"key{number}": number for number in range(4000)}})
    with robot(port) as good, ExitStack() as stack:
        floods = [stack.enter_context(robot(port, max_size=None, close_timeout=0.1)) for _ in range(4)]
        for flood in floods:
            for _ in range(20):
                flood.send(hostile)
        taken = []
        for _ in range(10):
            began = time.monotonic()
            assert "actions" in ask(good, request())
            taken.append(time.monotonic() - began)
        assert sorted(taken)[5] < 0.1
        assert "invalid request" in str(floods[0].recv(PATIENCE))


def test_a_jpeg_of_too_many_pixels_is_refused_without_decoding(serving: Start) -> None:
    _, port = serving()
    image = simplejpeg.encode_jpeg(np.zeros((4096, 4096, 3), np.uint8))
    with robot(port) as one:
        assert "found a JPEG of 4096x4096, allowed" in ask(one, request(image=image))
        large = simplejpeg.encode_jpeg(np.zeros((1080, 1920, 3), np.uint8))
        assert "actions" in ask(one, request(image=large))


def test_a_policy_that_hangs_leaves_no_request_without_an_answer(serving: Start, policy) -> None:
    _, port = serving(limits=Limits(seconds=0.3))
    with robot(port) as one, robot(port) as other:
        policy.may_answer.clear()
        for client, more in ((one, {}), (other, {"vla_ros": {"deadline_ms": 100.0}})):
            began = time.monotonic()
            assert "deadline exceeded: the policy did not answer within" in ask(client, request(**more))
            assert time.monotonic() - began < 5
        policy.may_answer.set()
        until(lambda: "actions" in ask(one, request()))


def scans(count: int, side: int) -> bytes:
    """A progressive JPEG with ``count`` scans more than usual."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + b"\xff\xd9"


def test_a_jpeg_of_many_scans_is_refused_and_delays_no_other(serving: Start) -> None:
    _, port = serving()
    small = simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))
    with robot(port) as good, ExitStack() as stack:
        hostile = [stack.enter_context(robot(port)) for _ in range(4)]
        assert "found a damaged JPEG (12010 scans, allowed 64)" in ask(
            hostile[0], request(image=scans(12_000, 1000))
        )
        for one in hostile:
            one.send(request(image=scans(50, 2000)))
        taken = []
        for _ in range(5):
            began = time.monotonic()
            assert "actions" in ask(good, request(image=small))
            taken.append(time.monotonic() - began)
        assert sorted(taken)[2] < 0.5
        assert all(isinstance(one.recv(PATIENCE), bytes | str) for one in hostile)


@contextmanager
def few_descriptors(tmp_path: Path, most: int) -> Iterator[tuple[int, Path]]:
    """A server process that may open ``most`` files; yields its port and its log."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "vla_ros.cli", "serve", "--policy", "hold", "--port", "0"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=limit) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, log.read_text()
            yield int(line.rsplit(":", 1)[1]), log
        finally:
            server.terminate()


def test_a_server_out_of_file_descriptors_refuses_and_recovers(tmp_path) -> None:
    with few_descriptors(tmp_path, 100) as (port, log):
        with ExitStack() as stack:
            for _ in range(150):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            until(lambda: "refusing connections" in log.read_text())
            # The server may close the connection before or after the client's request.
            with pytest.raises((WebSocketException, OSError)), connect(f"ws://127.0.0.1:{port}", proxy=None):
                pass

        def healthy() -> bool:
            with suppress(OSError):
                return get(port, "/healthz")[0] == 200
            return False

        until(healthy)
        said = log.read_text()
        assert "Traceback" not in said
        assert said.count("refusing connections") == 1
