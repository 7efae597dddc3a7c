import logging
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")

from test.policies.remote.golden import one
from test.policies.remote.links import GOOD, websocket
from vla_ros.config import Config, load
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.reasons import Level, Reason, reason_of
from vla_ros.errors import ConfigError, ServerLostError
from vla_ros.policies.base import create
from vla_ros.policies.remote import API_KEY
from vla_ros.policies.remote.dialects import GR00T, OPENPI
from vla_ros.policies.remote.messages import WireError, pack, unpack
from vla_ros.policies.remote.policy import RemotePolicy
from vla_ros.policies.remote.spec import decode_spec, encode_spec
from vla_ros.serve.cli import tls
from vla_ros.serve.service import Service
from vla_ros.types import ImageProcessor, Observation, PreviousChunk
from vla_ros.vision.processors import LiberoResize, ResizeNaive, ResizeWithPad

from .serving import PATIENCE, until

Start = Callable[..., tuple[Service, int]]
IMAGE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


def config(port: int, *more: str) -> Config:
    return load(
        (),
        [
            "policy.name:=remote",
            f"policy.server:=ws://127.0.0.1:{port}",
            "policy.connect_timeout:=10.0",
            f"timeouts.inference:={PATIENCE}",
            *more,
        ],
    )


def observation(text: str = "go", state: Any = (1.5, 2.0, 3.0)) -> Observation:
    return Observation({"image": IMAGE}, text, 42, state={"state": np.array(state)})


@pytest.fixture
def remote() -> Iterator[Callable[[Config], RemotePolicy]]:
    made: list[Any] = []

    def connect(options: Config) -> RemotePolicy:
        policy = create(options)
        assert isinstance(policy, RemotePolicy)
        made.append(policy)
        policy.load()
        return policy

    yield connect
    for policy in made:
        policy.close()


def test_chunks_are_equal_to_the_bit(serving: Start, remote, policy) -> None:
    _, port = serving()
    client = remote(config(port))
    session = client.start_session()
    own = policy.start_session()
    for number in range(3):
        asked = observation(state=(0.1 + number, 2, 3))
        mine, theirs = policy.infer(own, asked), client.infer(session, asked)
        assert theirs.actions.tobytes() == mine.actions.tobytes()
        assert (theirs.stamp, theirs.actions.dtype) == (42, np.float64)
        assert theirs.info["logit_margins"] == [0.5]
        assert {"encode", "round_trip", "server/infer", "server/queued"} <= set(theirs.stages_ms)
    noisy = replace(observation(), noise=np.random.default_rng(0).normal(size=(2, 3)))
    assert client.infer(session, noisy).actions.tobytes() == policy.infer(own, noisy).actions.tobytes()
    with pytest.raises(WireError, match=r"the noise is <f8 \[3\], expected \[2, 3\]"):
        client.infer(session, replace(noisy, noise=np.zeros(3)))
    continued = replace(noisy, previous=PreviousChunk(np.array([[0.1, 0.2, 0.4]]), 1))
    assert client.infer(session, continued).actions.tobytes() == policy.infer(own, continued).actions.tobytes()
    session.close()


def test_the_client_has_the_served_policys_spec(serving: Start, remote, policy) -> None:
    _, port = serving()
    assert remote(config(port)).spec == policy.spec
    assert decode_spec(encode_spec("mirror", policy.spec)) == policy.spec


def test_sessions_are_separate_and_can_be_reset(serving: Start, remote, policy) -> None:
    _, port = serving()
    client = remote(config(port))
    one, two = client.start_session(), client.start_session()
    seen = [client.infer(who, observation()).actions[0, 0] for who in (one, one, two)]
    one.reset()
    seen += [client.infer(who, observation()).actions[0, 0] for who in (one, two)]
    assert seen == [1, 2, 1, 1, 2]
    one.close()
    two.close()


def test_images_can_be_sent_as_jpegs(serving: Start, remote) -> None:
    _, port = serving()
    client = remote(config(port, "policy.jpeg_quality:=95"))
    session = client.start_session()
    assert client.infer(session, observation()).actions[0, 1] == pytest.approx(IMAGE.mean(), abs=3.0)
    session.close()


def test_a_missed_deadline_is_a_lost_server(serving: Start, remote, policy) -> None:
    _, port = serving()
    client = remote(config(port, "timeouts.inference:=0.2"))
    session = client.start_session()
    policy.may_answer.clear()
    began = time.monotonic()
    with pytest.raises(ServerLostError, match="no response within the deadline; reconnecting") as lost:
        client.infer(session, observation())
    assert time.monotonic() - began < 5.0
    assert reason_of(lost.value) is Reason.SERVER_LOST
    assert Reason.SERVER_LOST.level is Level.HOLD
    policy.may_answer.set()
    session.close()


def test_the_answer_to_another_request_is_refused(serving: Start, remote, monkeypatch) -> None:
    _, port = serving()
    client = remote(config(port))
    session = client.start_session()
    other = pack({"actions": np.ones((2, 3)), "vla_ros": {"number": 7}})
    with monkeypatch.context() as patched:
        patched.setattr("vla_ros.policies.remote.link._exchange", lambda *_: other)
        with pytest.raises(WireError, match="responded to another request: found 7, expected 1"):
            client.infer(session, observation())
    until(lambda: answers(client, session))
    session.close()


def answers(client: RemotePolicy, session: Any) -> bool:
    try:
        return client.infer(session, observation()).actions.shape == (2, 3)
    except ServerLostError:
        return False


def test_the_key_is_read_from_a_file_or_the_environment_and_not_shown(
    serving: Start, remote, tmp_path, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.DEBUG)
    _, port = serving(key="a-secret-of-mine")
    with pytest.raises(WireError, match="401 Unauthorized"):
        remote(config(port))
    (tmp_path / "key").write_text("a-secret-of-mine\n")
    options = config(port, f"policy.api_key_file:={tmp_path / 'key'}")
    assert "secret" not in repr(options)
    remote(options)
    monkeypatch.setenv(API_KEY, "a-secret-of-mine")
    remote(config(port))
    assert "a-secret-of-mine" not in caplog.text
    with pytest.raises(ConfigError, match=r"policy.api_key_file"):
        remote(config(port, "policy.api_key_file:=/nowhere"))


def test_robots_connect_over_tls(serving: Start, remote, tmp_path, monkeypatch) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=robot -addext subjectAltName=IP:127.0.0.1 -keyout"
    command = f"{openssl} {words} {key} -out {certificate}".split()
    subprocess.run(command, capture_output=True, check=True)
    _, port = serving(tls=tls(Namespace(tls_certificate=certificate, tls_key=key)))
    with pytest.raises(ServerLostError, match=r"certificate.*set SSL_CERT_FILE"):
        remote(config(port, f"policy.server:=wss://127.0.0.1:{port}", "policy.connect_timeout:=0.5"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    client = remote(config(port, f"policy.server:=wss://127.0.0.1:{port}"))
    session = client.start_session()
    assert client.infer(session, observation()).actions.shape == (2, 3)
    session.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"images": {}},
        {"images": 5},
        {"images": {"a": 5}},
        {"images": {"a": {"delta_timestamps": []}}},
        {"images": {"a": {"delta_timestamps": [[1, 0]]}}},
        {"images": {"a": {"delta_timestamps": [[0, 0.0]] * 65}}},
        {"dimension": "7"},
        {"horizon": 10**9},
        {"action": ["arm.nothing"]},
        {"action": 5},
        {"noise": [0]},
        {"rate_hz": np.nan},
    ],
)
def test_damaged_metadata_are_refused(policy, changed: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=r"do not describe a policy .*(found|Error)"):
        decode_spec({**encode_spec("mirror", policy.spec), **changed})


ARENA = {
    "image_resolution": [224, 224],
    "needs_wrist_camera": True,
    "n_external_cameras": 1,
    "needs_stereo_camera": False,
    "needs_session_id": False,
    "action_space": "joint_velocity",
}
PI = {"object": "action.metadata", "input": {"image_keys": ["base_0_rgb"]}}
DROID = (
    'features.images:=["observation/exterior_image_0_left = front", "observation/wrist_image_left = wrist"]',
    'features.action:=["arm.joint_velocity[1]", "arm.gripper"]',
)
MODALITIES = {
    "version": "nd",
    "video": {"modality_keys": ["front"], "delta_indices": [0]},
    "state": {"modality_keys": ["single_arm"], "delta_indices": [0]},
    "action": {"modality_keys": ["single_arm", "gripper"], "delta_indices": [0, 1]},
}
ARM = {**MODALITIES, "action": {"modality_keys": ["arm"]}}
BEFORE = {**MODALITIES, "video": {"modality_keys": ["front"], "delta_indices": [-15, 0]}}
FRONT = ('features.images:=["video.front = f"]', 'features.state:=["state.single_arm[5] = arm.joint_position"]')


@pytest.mark.parametrize(
    ("reason", "metadata", "features"),
    [
        ("", ARENA, DROID),
        ("needs the images", ARENA, DROID[1:]),
        ("returns 'joint_velocity', but features.action", ARENA, DROID[:1]),
        ("takes the video .'front'., but features.images has", MODALITIES, DROID),
        (
            "takes the state .'single_arm'., but features.state",
            MODALITIES,
            ('features.images:=["video.front = front"]', 'features.state:=["arm = arm.joint_position"]'),
        ),
        ("", MODALITIES, FRONT),
        (r"actions .'arm'., but policy.action_keys has .'gripper'.", ARM, FRONT),
        ("", BEFORE, (*FRONT, 'features.delta_indices:=["video.front = -15, 0"]')),
        (r"takes the video at steps .-15, 0., but video.front has .0.", BEFORE, FRONT),
        ("", PI, ('features.images:=["images.base_0_rgb = front"]',)),
        ("takes the images .'images.base_0_rgb'., but features.images has", PI, DROID),
        ("has .'images.base_0_rgb.'.", PI, ('features.images:=["images.base_0_rgb? = front"]',)),
        ("takes the images", PI, ('features.images:=["images.base_0_rgb = a", "images.left = b"]',)),
    ],
)
def test_metadata_are_compared_with_the_features(
    reason: str, metadata: dict[str, Any], features: tuple[str, ...]
) -> None:
    bound = complete_spec(PolicySpec((), (), (), 0, 64, takes_any_state=True), config(1, *features))
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        (GR00T if "version" in metadata else OPENPI).check(metadata, bound, ("gripper",))


def test_the_order_of_named_actions_is_logged_once(caplog) -> None:
    policy = create(config(1))
    assert isinstance(policy, RemotePolicy)
    named = {"arm": np.zeros((2, 5)), "gripper": np.ones((2, 1))}
    assert [policy._joined(named).shape for _ in range(2)] == [(2, 6)] * 2
    assert [record.message for record in caplog.records] == [
        "actions are taken in the server's order, arm [5], gripper [1]; policy.action_keys changes it"
    ]


@pytest.mark.parametrize("processor", [ResizeWithPad((48, 64)), ResizeNaive((48, 64))])
def test_images_are_resized_on_the_robot_without_a_difference(processor: ImageProcessor) -> None:
    spec = PolicySpec((ImageFeature("image", processor),))
    assert decode_spec(encode_spec("p", spec)).images == (ImageFeature("image", processor),)
    for height, width in ((720, 1280), (33, 90), (48, 64), (10, 7)):
        image = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
        sent = processor(image)
        np.testing.assert_array_equal(processor(sent), sent)


@pytest.mark.parametrize("processor", [ResizeNaive((48, 64), 0.9), LiberoResize((48, 64)), None])
def test_other_processors_need_the_whole_image(processor: ImageProcessor | None) -> None:
    spec = PolicySpec((ImageFeature("image", processor),))
    assert decode_spec(encode_spec("p", spec)).images[0].processor is None


@pytest.mark.parametrize(("family", "scenario"), [("roboarena", "default_config"), ("sglang", "openpi_policy")])
def test_images_get_the_size_that_another_server_states(family: str, scenario: str, remote) -> None:
    requests = []

    def answers(connection: Any) -> None:
        for data in connection:
            requests.append(data)
            connection.send("reset successful" if b"reset" in data else GOOD)

    keys = {
        "roboarena": ["observation/wrist_image_left", "observation/exterior_image_0_left"],
        "sglang": ["images.base_0_rgb", "images.left_wrist_0_rgb", "images.right_wrist_0_rgb"],
    }[family]
    image = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), np.uint8)
    with websocket(answers, greeting=one(family, scenario, 2).payload) as port:
        names = f"[{', '.join(f'c{number}' for number in range(len(keys)))}]"
        pairs = ", ".join(f'"{key} = c{number}"' for number, key in enumerate(keys))
        options = [f"camera.keys:={names}", f"features.images:=[{pairs}]", f"camera.topics:={names}"]
        client = remote(config(port, *options, "features.action:=['arm.joint_position', 'arm.gripper']"))
        session = client.start_session()
        client.infer(session, Observation(dict.fromkeys(keys, image), "go", 1))
        session.close()
    sent = unpack(requests[-1])
    found = sent["images"]["base_0_rgb"] if family == "sglang" else sent["observation/wrist_image_left"]
    np.testing.assert_array_equal(found, ResizeWithPad((224, 224))(image))
    assert len(requests[-1]) < 500_000
