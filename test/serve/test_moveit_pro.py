import base64
import gzip
import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from test.policies.golden import IN_FLOAT32
from vla_ros.config import load
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import StateFeature
from vla_ros.policies.base import Policy, create
from vla_ros.serve.service import Limits, Service
from vla_ros.types import ActionChunk, Observation, PreviousChunk
from vla_ros.vision.jpeg import decode_jpeg

from .conftest import Mirror
from .serving import PATIENCE, served, until

DATA = Path(__file__).parents[1] / "data"
CHUNK = 5e-5
Start = Callable[..., tuple[Service, int]]
RATE = load((), ["control.rate_hz:=20.0"])
GREY = base64.b64encode(simplejpeg.encode_jpeg(np.full((8, 8, 3), 100, np.uint8))).decode()
ASKED = {"state": [1.0, 2.0, 3.0], "task": "go", "images": {"image": GREY}, "new_episode": True}


@pytest.fixture(autouse=True)
def unnamed(policy: Mirror) -> None:
    """The actions of ``policy`` are three numbers without a name."""
    policy.spec = replace(policy.spec, action=())


def post(port: int, body: Any = ASKED, path: str = "/infer", **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "application/json"
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def test_an_observation_is_answered_by_a_chunk_and_the_duration_of_a_step(serving: Start) -> None:
    _, port = serving(config=RATE)
    status, answer = post(port)
    chunk = [[1.0, pytest.approx(100.0, abs=1), 1.0]] * 2
    assert (status, list(answer)) == (200, ["action_chunk", "action_chunk_raw", "dt"])
    assert (answer["action_chunk"], answer["dt"]) == (chunk, 0.05)
    assert answer["action_chunk_raw"] == answer["action_chunk"]


def test_the_rest_of_a_chunk_comes_back_and_is_continued(serving: Start, policy: Mirror) -> None:
    _, port = serving(config=RATE)
    rest = post(port)[1]["action_chunk_raw"][1:]
    seen: list[Any] = []
    infer = policy.infer

    def watched(session: Any, asked: Observation) -> ActionChunk:
        seen.append(asked.previous)
        return infer(session, asked)

    policy.infer = watched  # type: ignore[method-assign]
    more = {"prev_chunk_left_over": rest, "inference_delay": 1, "guidance_horizon": 18}
    status, answer = post(port, {**ASKED, **more})
    assert (status, seen[0].delay, seen[0].guided) == (200, 1, 18)
    assert answer["action_chunk"][0][0] == pytest.approx(1 + np.sum(rest))


def test_a_policy_that_continues_no_chunk_offers_nothing_to_carry_over(serving: Start, policy: Mirror) -> None:
    policy.spec = replace(policy.spec, continues_chunks=False)
    _, port = serving(config=RATE)
    assert list(post(port)[1]) == ["action_chunk", "dt"]


def test_the_state_holds_the_policys_vectors_in_turn(serving: Start, policy: Mirror) -> None:
    policy.spec = replace(policy.spec, state=(StateFeature("gripper", size=1), StateFeature("state", size=2)))
    _, port = serving(config=RATE)
    assert post(port)[1]["action_chunk"][0][2] == 2.0


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"state": [1.0, 2.0]}, 400, "state 'state' is"),
        ({"state": [1.0, True, "3"]}, 400, "expected numbers"),
        ({"images": {}}, 400, "no image 'image'"),
        ({"images": {"image": "not base64"}}, 400, "expected a JPEG in base64"),
        ({"images": {"image": base64.b64encode(b"GIF89a").decode()}}, 400, "is not a JPEG"),
        ({"task": None}, 400, "task is"),
        ({"task": " "}, 400, "expected the instruction"),
        ({"prev_chunk_left_over": [[1.0, 2.0]]}, 400, "previous chunk has shape"),
        ({"prev_chunk_left_over": [[1.0], [2.0, 3.0]]}, 400, "prev_chunk_left_over"),
        ({"inference_delay": -1}, 400, "inference_delay"),
        ({"guidance_horizon": 1.5}, 400, "guidance_horizon"),
        ({"task": "raise"}, 500, "a bad request"),
    ],
)
def test_what_is_wrong_is_said_in_json(serving: Start, change: dict[str, Any], status: int, text: str) -> None:
    _, port = serving(config=RATE)
    found, answer = post(port, {**ASKED, **change})
    assert (found, list(answer)) == (status, ["error"])
    assert text in answer["error"]
    assert post(port)[0] == 200


@pytest.mark.parametrize("body", [b"\xff", b"[]", b'{"state": NaN}', b"[" * 100_000, b""])
def test_what_is_no_request_is_refused(serving: Start, body: bytes) -> None:
    _, port = serving(config=RATE)
    assert post(port, body)[0] == 400


def test_actions_that_moveit_pro_cannot_execute_are_refused(serving: Start, policy: Mirror) -> None:
    _, port = serving()
    assert "start the server with -p control.rate_hz:=HZ" in post(port)[1]["error"]
    policy.spec = replace(policy.spec, action=parse_components("arm.tip_delta + arm.gripper", action=True))
    _, port = serving(config=RATE)
    assert "the policy's actions have tip_delta" in post(port)[1]["error"]


def test_the_key_is_a_bearer_token(serving: Start) -> None:
    _, port = serving(config=RATE, key="long enough")
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Api-Key long enough"}):
        status, answer = post(port, **given)
        assert (status, answer) == (401, {"error": "a valid API key is needed: Authorization: Bearer KEY"})
    assert post(port, Authorization="Bearer long enough")[0] == 200


def test_one_connection_serves_many_requests(serving: Start) -> None:
    service, port = serving(config=RATE)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    for number, begins in enumerate((True, False, False, True)):
        connection.request("POST", "/infer", json.dumps({**ASKED, "new_episode": begins}))
        answer = json.loads(connection.getresponse().read())
        assert answer["action_chunk"][0][0] == (1, 2, 3, 1)[number]  # observations of the episode
    assert service.robots == 1
    connection.close()
    until(lambda: not service.robots)


def test_limits_and_unknown_paths(serving: Start) -> None:
    service, port = serving(limits=Limits(max_message=1 << 16), config=RATE)
    assert post(port, path="/elsewhere")[0] == 404
    status, answer = post(port, b" " * (1 << 17))
    assert (status, answer["error"]) == (413, "found a request of 131072 bytes, allowed 65536")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.putrequest("POST", "/infer")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()
    until(lambda: not service.robots)


def test_a_request_that_waits_too_long_is_answered(serving: Start, policy: Mirror) -> None:
    _, port = serving(limits=Limits(seconds=0.3), config=RATE)
    policy.may_answer.clear()
    status, answer = post(port)
    assert (status, answer["error"][:17]) == (504, "deadline exceeded")


def test_websockets_and_posts_share_the_port(serving: Start) -> None:
    _, port = serving(config=load((), ["control.rate_hz:=20.0", "policy.instruction:=go"]))
    client = create(load((), ["policy.name:=remote", f"policy.server:=ws://127.0.0.1:{port}"]))
    client.load()
    assert post(port)[0] == 200
    asked = Observation({"image": np.zeros((8, 8, 3), np.uint8)}, "go", 1, {"state": np.ones(3)})
    with closing(client.start_session()) as session:
        assert client.infer(session, asked).actions.shape == (2, 3)
    client.close()


def test_the_node_asks_such_a_server(serving: Start) -> None:
    _, port = serving(config=RATE, key="long enough")
    options = ["policy.name:=remote", f"policy.server:=http://127.0.0.1:{port}/infer", "policy.horizon:=2"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLA_ROS_API_KEY", "long enough")
        client = create(load((), options))
    client.load()
    asked = Observation({"image": np.full((8, 8, 3), 100, np.uint8)}, "go", 1, {"state": np.arange(3.0)})
    with closing(client.start_session()) as session:
        assert client.infer(session, asked).actions[0].tolist() == [1.0, pytest.approx(100.0, abs=1), 0.0]
    client.close()


RECORDED = DATA / "wire" / "moveit_pro.json.gz"
"""What MoveIt Pro's adapter sent to its own server, and its answers, for ``data/smolvla/default``."""


@pytest.fixture(scope="module")
def conversation() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return found


@pytest.fixture(scope="module")
def smolvla() -> Iterator[tuple[Policy, int]]:
    pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    folder, words = (
        DATA / "smolvla",
        ["policy.seed:=7", "policy.rtc_schedule:=exp", "policy.rtc_horizon:=11", *IN_FLOAT32],
    )
    options = [f"policy.checkpoint:={folder / 'default'}", f"policy.vlm:={folder / 'vlm'}", "control.rate_hz:=10.0"]
    config = load((), ["policy.name:=smolvla", *options, *words])
    policy = create(config)
    with served(policy, config=config, key="moveit-secret-key") as (_, port):
        yield policy, port


def sent(port: int, recorded: dict[str, Any], **changed: Any) -> tuple[int, dict[str, Any]]:
    """Send a recorded request byte by byte, but for ``changed`` entries of its body; return the answer."""
    head, body = recorded["head"], recorded["body"]
    if changed:
        body = json.dumps({**json.loads(body), **changed})
        head = re.sub(r"(?m)^(Content-Length: )\d+", rf"\g<1>{len(body)}", head)
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, json.loads(response.read())


def test_the_adapters_conversation_has_the_answers_of_moveit_pros_server(smolvla, conversation) -> None:
    _, port = smolvla
    first, guided, unguided, *_ = (one["answer"] for one in conversation)
    status, answer = sent(port, conversation[0])
    assert (status, list(answer), answer["dt"]) == (200, list(first), first["dt"])
    np.testing.assert_allclose(answer["action_chunk"], first["action_chunk"], rtol=0, atol=CHUNK)
    assert np.shape(answer["action_chunk_raw"]) == np.shape(first["action_chunk_raw"])
    rest = answer["action_chunk_raw"][20:]  # as the adapter returned that of its own server
    for recorded, theirs in zip(conversation[1:3], (guided, unguided), strict=True):
        status, answer = sent(port, recorded, prev_chunk_left_over=rest)
        assert status == 200
        np.testing.assert_allclose(answer["action_chunk"], theirs["action_chunk"], rtol=0, atol=CHUNK)
    assert np.abs(np.subtract(guided["action_chunk"], unguided["action_chunk"])).max() > 10 * CHUNK


def test_its_chunks_are_those_of_the_policy(smolvla, conversation) -> None:
    policy, port = smolvla
    asked = json.loads(conversation[1]["body"])
    images = {key: decode_jpeg(base64.b64decode(image)) for key, image in asked["images"].items()}
    previous = PreviousChunk(np.array(asked["prev_chunk_left_over"]), asked["inference_delay"], 5)
    observation = Observation(images, asked["task"], 1, {"state": np.array(asked["state"])}, previous=previous)
    answer = sent(port, conversation[1])[1]
    assert answer["action_chunk"] == policy.infer(policy.start_session(), observation).actions.tolist()


def test_what_its_server_refuses_is_refused(smolvla, conversation) -> None:
    _, port = smolvla
    for recorded in conversation[3:]:
        status, answer = sent(port, recorded)
        assert (status, list(answer)) == (int(recorded["status"].split()[1]), ["error"])
