import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from vla_ros.cli.main import main
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Policy
from vla_ros.policies.remote.messages import WireError, pack, unpack
from vla_ros.serve.service import Limits, Service

from .serving import PATIENCE, until

Start = Callable[..., tuple[Service, int]]


def request(level: int = 0, **more: Any) -> bytes:
    image = np.full((4, 4, 3), level, np.uint8)
    return pack({"image": image, "state": np.array([level, 0, 0], np.float32), "prompt": "go", **more})


@contextmanager
def robot(port: int, **given: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None, **given) as connection:
        assert unpack(connection.recv(PATIENCE))["server"] == "vla_ros"
        yield connection


def ask(connection: ClientConnection, frame: bytes | str) -> Any:
    connection.send(frame)
    answer = connection.recv(PATIENCE)
    return answer if isinstance(answer, str) else unpack(answer)


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_answers_contain_chunks_and_times(serving: Start) -> None:
    _, port = serving()
    with robot(port) as one:
        first, second = ask(one, request(3)), ask(one, request(5))
    np.testing.assert_array_equal(first["actions"], [[1, 3, 3]] * 2)
    np.testing.assert_array_equal(second["actions"], [[2, 5, 5]] * 2)
    assert "prev_total_ms" not in first["server_timing"]
    assert {"infer_ms", "prev_total_ms", "queued_ms", "batch"} == set(second["server_timing"])


def test_disconnected_robots_do_not_count_as_waiting(serving: Start, policy) -> None:
    service, port = serving(limits=Limits(max_batch=1, seconds=10.0))
    with robot(port) as first, robot(port) as last, ThreadPoolExecutor(2) as pool:
        ask(first, request())
        service.worker._batch_seconds = 4.0  # behind three requests it would be 20 s
        policy.may_answer.clear()
        answers = [pool.submit(ask, first, request())]
        assert policy.asked.acquire(timeout=PATIENCE)  # of the first request, above
        assert policy.asked.acquire(timeout=PATIENCE)
        for count in range(1, 4):
            with robot(port) as gone:
                gone.send(request())
                until(lambda count=count: service.worker.waiting >= count)
        until(lambda: sum(not job.wanted() for job in list(service._futures)) == 3)
        answers.append(pool.submit(ask, last, request()))
        until(lambda: service.worker.waiting >= 4 or answers[1].done())
        policy.may_answer.set()
        assert [isinstance(answer.result(PATIENCE), dict) for answer in answers] == [True, True]


def test_simultaneous_requests_are_one_batch(serving: Start, policy) -> None:
    service, port = serving(limits=Limits(max_batch=8))
    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        robots = [stack.enter_context(robot(port)) for _ in range(5)]
        policy.may_answer.clear()
        first = pool.submit(ask, robots[0], request(0))
        assert policy.asked.acquire(timeout=PATIENCE)
        others = [pool.submit(ask, each, request(level)) for level, each in enumerate(robots[1:], 1)]
        until(lambda: service.worker.waiting == 4)
        policy.may_answer.set()
        answers = [each.result(PATIENCE)["actions"][0, 1] for each in (first, *others)]
    assert answers == [0, 1, 2, 3, 4]
    assert policy.batches == [1, 4]


def test_healthz_and_new_robots_are_served_during_an_inference(serving: Start, policy) -> None:
    _, port = serving()
    with robot(port) as one:
        policy.may_answer.clear()
        one.send(request())
        assert policy.asked.acquire(timeout=PATIENCE)
        assert get(port, "/healthz") == (200, "OK\n")
        with robot(port):
            status, text = get(port, "/metrics")
        policy.may_answer.set()
        assert "actions" in unpack(one.recv(PATIENCE))
    assert status == 200
    assert "vla_ros_serve_robots 2.0" in text


def test_the_metrics_count_requests_by_outcome(serving: Start) -> None:
    _, port = serving()
    with robot(port) as one:
        for frame in (request(), request(), request(prompt="raise"), b"\xc1", "hello"):
            ask(one, frame)
    text = get(port, "/metrics")[1]
    for outcome, count in {"answered": 2, "failed": 1, "invalid": 2}.items():
        assert f'vla_ros_serve_requests_total{{outcome="{outcome}"}} {count}.0' in text


@pytest.mark.parametrize("given", [None, "Api-Key wrong", "Bearer right-key", "Api-Key right-key "[:-2]])
def test_a_client_without_the_key_is_refused(serving: Start, given: str | None) -> None:
    _, port = serving(key="right-key")
    headers = {"Authorization": given} if given else {}
    with pytest.raises(InvalidStatus, match="401"), robot(port, additional_headers=headers):
        pass
    assert get(port, "/metrics", headers)[0] == 401
    assert get(port, "/healthz")[0] == 200
    with robot(port, additional_headers={"Authorization": "Api-Key right-key"}) as one:
        assert "actions" in ask(one, request())


def test_robots_above_the_limit_are_refused(serving: Start) -> None:
    _, port = serving(limits=Limits(max_robots=1))
    with robot(port), pytest.raises(InvalidStatus) as refused, robot(port):
        pass
    assert refused.value.response.status_code == 503
    assert b"over capacity: 1 robots are connected, allowed 1" in refused.value.response.body


def test_a_reset_a_session_a_flag_or_an_instruction_begins_an_episode(serving: Start) -> None:
    _, port = serving()
    with robot(port) as one:
        seen = [ask(one, request())["actions"][0, 0] for _ in range(2)]
        assert ask(one, pack({"endpoint": "reset"})) == "reset successful"
        seen += [ask(one, request(endpoint="infer"))["actions"][0, 0] for _ in range(2)]
        seen += [ask(one, request(session_id="B"))["actions"][0, 0] for _ in range(2)]
        seen += [ask(one, request(session_id="B", vla_ros={"begins": True}))["actions"][0, 0]]
        seen += [ask(one, request(session_id="B", prompt="stop"))["actions"][0, 0] for _ in range(2)]
    assert seen == [1, 2, 1, 2, 1, 2, 1, 1, 2]


def test_an_expired_request_is_answered_without_inference(serving: Start, policy) -> None:
    _, port = serving()
    with robot(port) as one:
        assert "deadline exceeded: " in ask(one, request(vla_ros={"deadline_ms": -5.0}))
        assert "actions" in ask(one, request())
    assert policy.batches == [1]


def test_a_robot_that_disconnects_is_forgotten(serving: Start, policy) -> None:
    service, port = serving()
    policy.may_answer.clear()
    with robot(port) as one, robot(port) as two:
        one.send(request())
        assert policy.asked.acquire(timeout=PATIENCE)
        two.send(request())
        until(lambda: service.worker.waiting == 1)
        two.close()
        policy.may_answer.set()
        assert "actions" in unpack(one.recv(PATIENCE))
        until(lambda: (service.robots, service.answering) == (1, 0))
    until(lambda: service.robots == 0 and policy.sessions[0].closed)


def test_a_message_that_is_too_long_ends_only_its_connection(serving: Start) -> None:
    _, port = serving(limits=Limits(max_message=1 << 16))
    with robot(port) as one, pytest.raises(ConnectionClosedError, match="1009"):
        ask(one, bytes(1 << 17))
    with robot(port) as two:
        assert "actions" in ask(two, request())


def test_metadata_can_be_replaced(serving: Start) -> None:
    arena = {"image_resolution": [224, 224], "action_space": "joint_velocity"}
    _, port = serving(read_metadata=arena)
    with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None) as one:
        assert unpack(one.recv(PATIENCE)) == arena


def test_the_server_survives_damaged_requests_and_broken_handshakes(serving: Start) -> None:
    _, port = serving()
    generator, good = random.Random(5), request(7)
    with robot(port) as one:
        for _ in range(300):
            data = bytearray(good)
            for _ in range(generator.randint(1, 4)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            ask(one, bytes(data[: generator.randint(0, len(data))] if generator.random() < 0.3 else data))
    for junk in (b"", b"\x00" * 50, b"GET / HTTP/1.1\r\n", b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 9000)):
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as raw:
            raw.sendall(junk)
    with robot(port) as two:
        assert "actions" in ask(two, request())
    assert get(port, "/healthz")[0] == 200


def test_a_wrong_alias_is_reported_before_the_policy_is_loaded(policy, monkeypatch) -> None:
    loaded: list[float] = []
    monkeypatch.setattr(policy, "load", lambda progress: loaded.append(1.0))
    with pytest.raises(ConfigError, match="no feature front; its features are image, state"):
        Service(policy, aliases={"front": "x"}).load()
    assert not loaded
    monkeypatch.setattr(policy, "describe", lambda: PolicySpec((), takes_any_state=True))
    with pytest.raises(ConfigError, match="no feature"):
        Service(policy, aliases={"front": "x"}).load()
    assert loaded
    with pytest.raises(WireError, match="cannot be encoded"):
        Service(policy, read_metadata={"day": date(2026, 1, 1)})


@pytest.mark.parametrize("kind", ["points", "depth"])
@pytest.mark.parametrize("described", [True, False])
def test_a_policy_with_points_or_depth_is_refused_before_a_robot_connects(
    policy, monkeypatch, kind: str, described: bool
) -> None:
    policy.spec = replace(policy.spec, **{kind: (("image", "near"),)})
    loaded: list[float] = []
    monkeypatch.setattr(policy, "load", lambda progress: loaded.append(1.0))
    if not described:
        monkeypatch.setattr(policy, "describe", partial(Policy.describe, object()))
    with pytest.raises(ConfigError, match=r"needs 'near' .points or depth of 'image'.*vla-ros run"):
        Service(policy).load()
    assert bool(loaded) is not described


def test_the_command_listens_on_loopback_and_shuts_down_cleanly(tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("a-secret-of-mine\n")
    command = [sys.executable, "-m", "vla_ros.cli", "serve", "--port", "0", "--policy", "hold", "--api-key-file"]
    process = subprocess.Popen([*command, str(key)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        listening = Path(f"/proc/{process.pid}/net/tcp").read_text()
        assert f"0100007F:{port:04X} 00000000:0000 0A" in listening
        with robot(port, additional_headers={"Authorization": "Api-Key a-secret-of-mine"}) as one:
            assert ask(one, request())["actions"].shape == (1, 7)
            process.send_signal(signal.SIGTERM)
            closed = threading.Thread(target=lambda: list(one))
            closed.start()
            closed.join(PATIENCE)
            assert one.protocol.close_code == 1001
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "a-secret-of-mine" not in errors


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--host", "0.0.0.0"], "give --api-key-file, or --no-api-key"),
        (["--tls-key", "x"], "expected both"),
        (["--tls-key", "x", "--tls-certificate", "y"], "--tls-certificate: y"),
        (["--api-key-file", os.devnull], "does not contain a key"),
        (["--image", "front"], "expected KEY=NAME"),
        (["--image", "front=a", "--image", "front=b"], "found front=a front=b, expected each KEY once"),
        (["--image", "front=x"], "the policy has no feature front; its features are"),
        (["--metadata", os.devnull], "expected a regular file"),
        (["--host", "192.0.2.1", "--no-api-key"], "cannot listen on 192.0.2.1"),
    ],
)
def test_wrong_options_are_refused(words: list[str], reason: str, capsys) -> None:
    interval = sys.getswitchinterval()
    try:
        assert main(["serve", "--policy", "hold", "--port", "0", *words]) == 1
    finally:
        sys.setswitchinterval(interval)
    assert reason in capsys.readouterr().err
