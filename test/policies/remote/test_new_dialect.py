import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")
pytest.importorskip("prometheus_client", reason="the library prometheus_client is not installed (extra 'serve')")

from test.serve.conftest import Mirror
from test.serve.serving import PATIENCE, served
from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.base import create
from vla_ros.policies.remote.dialect import Message, Metadata, Request, Response, ServedDialect, ServerSaidError
from vla_ros.policies.remote.dialects import DIALECTS, register
from vla_ros.policies.remote.messages import WireError, finite
from vla_ros.types import Observation


class JsonLists(ServedDialect):
    """JSON texts with lists for arrays; each request has a verb."""

    name, path, reset_response = "json_lists", "/lists", '{"done": true}'

    def encode_request(self, request: Request, metadata: Metadata) -> bytes:
        lists = {key: value.tolist() for key, value in request.features.items()}
        return json.dumps({"verb": "infer", "task": request.instruction, **lists}).encode()

    def decode_request(self, message: Message) -> Request:
        content = json.loads(message)
        if content.pop("verb") == "reset":
            return Request(reset=True)
        task = content.pop("task")
        return Request({k: np.uint8(v) if k == "image" else np.float64(v) for k, v in content.items()}, task)

    def encode_response(self, response: Response) -> bytes:
        return json.dumps({name: value.tolist() for name, value in response.actions.items()}).encode()

    def decode_response(self, message: Message) -> Response:
        content = json.loads(message)
        if "fault" in content:
            raise ServerSaidError(content["fault"])
        return Response({name: finite(value, name) for name, value in content.items()})

    def encode_error(self, text: str) -> Message:
        return json.dumps({"fault": text}).encode()

    def encode_reset(self, session: str, metadata: Metadata) -> bytes:
        return b'{"verb": "reset"}'

    def check_reset(self, message: Message) -> None:
        assert message == self.reset_response

    def encode_metadata(self, name: str, spec: PolicySpec) -> bytes:
        return json.dumps({"horizon": spec.horizon}).encode()

    def decode_metadata(self, message: Message) -> Metadata:
        content: dict[str, Any] = json.loads(message)
        return content

    def horizon(self, metadata: Metadata) -> Any:
        return metadata.get("horizon")


@pytest.fixture
def dialect() -> Iterator[JsonLists]:
    own = JsonLists()
    register(own)
    yield own
    del DIALECTS[own.name]


@pytest.mark.parametrize("chosen_by", ["policy.dialect:=json_lists", "policy.server:=ws://127.0.0.1:PORT/lists"])
def test_a_new_dialect_is_one_class_and_its_registration(dialect: JsonLists, chosen_by: str) -> None:
    with served(Mirror(), dialect=dialect) as (_, port):
        options = [
            "policy.name:=remote",
            f"policy.server:=ws://127.0.0.1:{port}",
            f"timeouts.inference:={PATIENCE}",
        ]
        policy = create(load((), [*options, chosen_by.replace("PORT", str(port))]))
        policy.load()
        assert (policy.spec.horizon, policy.spec.takes_any_state) == (2, True)
        session = policy.start_session()
        image = np.full((4, 4, 3), 7, np.uint8)
        actions = [
            policy.infer(session, Observation({"image": image}, "go", 1, {"state": np.array([1.5, 0, 0])})).actions
            for _ in range(2)
        ]
        np.testing.assert_array_equal(actions, [[[count, 7, 1.5]] * 2 for count in (1, 2)])
        with pytest.raises(WireError, match="the server responded with an error: invalid request: no image"):
            policy.infer(session, Observation({}, "go", 1, {"state": np.zeros(3)}))
        session.reset()
        observation = Observation({"image": image}, "go", 1, {"state": np.zeros(3)})
        np.testing.assert_array_equal(policy.infer(session, observation).actions[0], [1, 7, 0])
        session.close()
        policy.close()


def test_an_unknown_dialect_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match=r"policy.dialect: found 'x', expected auto, openpi, .*, oft"):
        create(load((), ["policy.name:=remote", "policy.server:=ws://127.0.0.1:1", "policy.dialect:=x"]))


def test_a_dry_run_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--dry-run", "-p", "policy.name:=remote", "-p", "policy.server:=ws://localhost:1"]
    words += ["-p", "robot.urdf:=demo", "-p", "robot.gripper_joint_names:=[finger_left, finger_right]"]
    assert main([*words, "-p", "preset:=gr00t_droid"]) == 0
    table = capsys.readouterr().out
    assert "video.wrist_image_left" in table
    assert "arm.tip_rotation[rot6d]" in table
    assert main(words) == 1
    assert "features.action: not set" in capsys.readouterr().err
