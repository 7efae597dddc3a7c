import base64
import json
from typing import Any

import numpy as np
import pytest

from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import Dialect, Request, ServerSaidError, read_map
from vla_ros.policies.remote.dialects import (
    DIALECTS,
    GR00T,
    GR00T_FLAT,
    OFT_HTTP,
    OPENPI,
    ROBOARENA,
    SGLANG,
    VLLM_OMNI,
    by_address,
    by_metadata,
)
from vla_ros.policies.remote.messages import WireError, pack, unpack
from vla_ros.policies.remote.transport import with_token

from .golden import Recorded, built, one, recorded


def query_of(meaning: Any, **given: Any) -> Request:
    """The query that a recorded request holds, made from its patterns and values."""
    message = built(meaning)
    features: dict[str, Any] = {}
    for key, value in message.items():
        if key == "images":
            chw = next(iter(value.values())).shape[0] == 3
            features |= {f"images.{n}": np.moveaxis(v, 0, -1) if chw else v for n, v in value.items()}
        elif isinstance(value, np.ndarray):
            features[key] = value
    return Request(features, message.get("prompt", ""), message.get("session_id", ""), **given)


@pytest.mark.parametrize(
    ("dialect", "family", "scenario", "number"),
    [
        (OPENPI, "openpi", "droid", 3),
        (OPENPI, "openpi", "droid", 5),
        (OPENPI, "openpi", "libero", 3),
        (OPENPI, "openpi", "libero", 5),
        (OPENPI, "openpi", "aloha", 3),
        (ROBOARENA, "roboarena", "default_config", 3),
        (ROBOARENA, "roboarena", "default_config", 7),
        (VLLM_OMNI, "vllm_omni", "sessions", 5),
        (VLLM_OMNI, "vllm_omni", "errors", 9),
        (SGLANG, "sglang", "openpi_policy", 3),
    ],
)
def test_a_query_is_the_real_clients_to_the_byte(dialect: Dialect, family: str, scenario: str, number: int) -> None:
    sent, greeting = one(family, scenario, number), one(family, scenario, 2)
    assert dialect.encode_request(query_of(sent.meaning), dialect.decode_metadata(greeting.frame)) == sent.payload


def test_roboarena_receives_the_session_if_it_asks_for_it() -> None:
    sent, greeting = (one("roboarena", "stereo_session", number) for number in (3, 2))
    mine = read_map(ROBOARENA.encode_request(query_of(sent.meaning), read_map(greeting.frame, "")), "")
    theirs = read_map(sent.frame, "")
    assert set(mine) == set(theirs)  # in another order
    assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("dialect", "family", "scenario", "number", "session"),
    [
        (ROBOARENA, "roboarena", "default_config", 5, ""),
        (ROBOARENA, "roboarena", "stereo_session", 5, "38DSA3hd3"),
        (VLLM_OMNI, "vllm_omni", "sessions", 11, "A"),
        (GR00T, "gr00t", "main_basic", 17, ""),
        (GR00T, "gr00t", "n16_basic", 17, ""),
    ],
)
def test_a_reset_is_the_real_clients(
    dialect: Dialect, family: str, scenario: str, number: int, session: str
) -> None:
    reset = dialect.encode_reset(session, {})
    assert reset is not None
    assert unpack(reset) == unpack(one(family, scenario, number).payload)


def gr00t_query(sent: Recorded) -> Request:
    data = built(sent.meaning)["data"]
    found = data.get("observation", data)
    if "video" in found:
        video = {f"video.{key}": value[0] for key, value in found["video"].items()}
        features = video | {f"state.{key}": value[0, 0] for key, value in found["state"].items()}
        [[[text]]] = found["language"].values()
        return Request(features, text)
    batch = "observation" in data
    features = {key: value[0] if batch else value for key, value in found.items() if isinstance(value, np.ndarray)}
    [[text]] = [value for value in found.values() if isinstance(value, list)]
    return Request(features, text)


@pytest.mark.parametrize("scenario", ["main_basic", "n17_basic", "n16_basic", "n15_basic"])
def test_a_gr00t_query_is_written_as_the_servers_own_client_does(scenario: str) -> None:
    hello, config, sent = (one("gr00t", scenario, number) for number in (9, 11, 13))
    assert GR00T.hello == hello.payload
    metadata = GR00T.decode_metadata(config.frame)
    versions = {"main_basic": "nd", "n17_basic": "npy", "n16_basic": "npy", "n15_basic": "n1.5"}
    assert metadata["version"] == versions[scenario]
    assert GR00T.encode_request(gr00t_query(sent), metadata) == sent.payload


@pytest.mark.parametrize("scenario", ["main_flat_sim_wrapper", "n17_flat_sim_wrapper", "n16_flat_sim_wrapper"])
def test_a_gr00t_server_with_the_simulation_wrapper_gets_flat_keys(scenario: str) -> None:
    config, sent, back = (one("gr00t", scenario, number) for number in (7, 9, 11))
    metadata = GR00T_FLAT.decode_metadata(config.frame)
    assert GR00T_FLAT.encode_request(gr00t_query(sent), metadata) == sent.payload
    assert " ".join(GR00T_FLAT.decode_response(back.frame).actions) == "x y z roll pitch yaw gripper"
    with pytest.raises(ServerSaidError, match=r"Video key 'video.image' must be in observation"):
        GR00T.decode_response(one("gr00t", scenario, 15).frame)


def test_gr00ts_token_is_where_its_client_puts_it() -> None:
    message = pack({"endpoint": "ping"})
    assert with_token(message, "wrong") == one("gr00t", "main_token", 13).payload
    with pytest.raises(ServerSaidError, match="Unauthorized: Invalid API token"):
        GR00T.decode_response(one("gr00t", "main_token", 15).frame)


def values(meaning: Any) -> Any:
    message = built(meaning)
    return message["actions"] if isinstance(message, dict) and "actions" in message else message


@pytest.mark.parametrize(
    ("dialect", "family", "scenario", "number"),
    [
        (OPENPI, "openpi", "droid", 4),
        (OPENPI, "openpi", "libero", 6),
        (OPENPI, "openpi", "aloha", 4),
        (ROBOARENA, "roboarena", "default_config", 4),
        (ROBOARENA, "roboarena", "bare_ndarray", 4),
        (VLLM_OMNI, "vllm_omni", "openpi_client", 4),
        (VLLM_OMNI, "vllm_omni", "errors", 10),
        (SGLANG, "sglang", "openpi_policy", 4),
        (OPENPI, "vllm_omni", "openpi_client", 4),
    ],
)
def test_actions_arrive_as_the_server_sent_them(dialect: Dialect, family: str, scenario: str, number: int) -> None:
    message = one(family, scenario, number)
    found = dialect.decode_response(message.frame).actions["actions"]
    np.testing.assert_array_equal(found, np.float64(values(message.meaning)))
    assert found.dtype == np.float64


def test_the_servers_stage_times_are_read() -> None:
    timing = OPENPI.decode_response(one("openpi", "droid", 6).frame).timing_ms
    assert set(timing) == {"server/infer", "policy/infer"}
    assert timing["policy/infer"] == 12.5


@pytest.mark.parametrize(
    ("dialect", "message", "shapes"),
    [
        (VLLM_OMNI, ("vllm_omni", "sessions", 4), {"joint_position": (8, 7), "gripper_position": (8, 1)}),
        (
            GR00T,
            ("gr00t", "main_basic", 15),
            {"eef_9d": (40, 9), "gripper_position": (40, 1), "joint_position": (40, 7)},
        ),
        (GR00T, ("gr00t", "n16_basic", 15), {"joint_position": (32, 7), "gripper_position": (32, 1)}),
        (GR00T, ("gr00t", "n15_basic", 15), {"single_arm": (16, 5), "gripper": (16, 1)}),
    ],
)
def test_named_actions_are_chunks(dialect: Dialect, message: tuple[str, str, int], shapes: Any) -> None:
    found = dialect.decode_response(one(*message).frame).actions
    assert {name: value.shape for name, value in found.items()} == shapes


def test_gr00t_with_two_robots_in_one_answer_is_refused() -> None:
    with pytest.raises(WireError, match=r"eef_9d: <f4 \[2, 40, 9\], expected a chunk"):
        GR00T.decode_response(one("gr00t", "main_basic", 27).frame)


@pytest.mark.parametrize(
    ("dialect", "family", "scenario", "number", "reason"),
    [
        (OPENPI, "openpi", "policy_exception", 6, "ValueError: no camera called wrist"),
        (OPENPI, "openpi", "bad_truncated", 4, "incomplete input"),
        (ROBOARENA, "roboarena", "no_endpoint_key", 4, "KeyError: 'endpoint'"),
        (VLLM_OMNI, "vllm_omni", "errors", 4, "Internal inference error"),
        (OPENPI, "vllm_omni", "errors", 6, "Invalid request payload"),
        (VLLM_OMNI, "vllm_omni", "no_policy", 2, "Robot policy not available"),
        (SGLANG, "sglang", "openpi_policy_error", 4, "the server responded with an error"),
        (GR00T, "gr00t", "main_errors", 11, "Unknown endpoint: get_actoin"),
        (GR00T, "gr00t", "main_errors", 31, "camera 2 lost – ünlesbar"),
        (GR00T, "gr00t", "main_bad_messages", 7, r"\(empty\)"),
        (GR00T, "gr00t", "n15_basic", 19, "'video.webcam'"),
    ],
)
def test_an_error_of_the_server_is_never_an_action(
    dialect: Dialect, family: str, scenario: str, number: int, reason: str
) -> None:
    with pytest.raises(ServerSaidError, match=reason):
        dialect.decode_response(one(family, scenario, number).frame)


@pytest.mark.parametrize(
    ("dialect", "message", "reason"),
    [
        (OPENPI, {"actions": np.full((2, 7), np.nan, np.float32)}, "14 of 14 numbers are not finite"),
        (OPENPI, {"actions": np.zeros((0, 7))}, "expected a chunk"),
        (OPENPI, {"actions": np.zeros((2, 3, 7))}, "expected a chunk"),
        (OPENPI, {"actions": 3.0}, "expected a chunk"),
        (OPENPI, {"actions": "up"}, "the text 'up', expected numbers"),
        (OPENPI, {"actions": None}, "NoneType, expected numbers"),
        (OPENPI, {"actions": {"a": 1}}, "a map with the keys"),
        (OPENPI, {}, "expected a map with actions"),
        (OPENPI, {"status": "reset successful"}, "expected a map with actions"),
        (OPENPI, [1, 2], "list, expected a map with actions"),
        (
            OPENPI,
            {"status": "error", "debug_image": np.zeros((4, 7))},
            r"keys \['status', 'debug_image'\], expected",
        ),
        (OPENPI, {"joint_position": np.zeros((4, 7))}, r"keys \['joint_position'\], expected a map with actions"),
        (OPENPI, {"actions": ["1", "2"]}, "list, expected numbers|<U1"),
        (OPENPI, {"actions": [["0.1", 2.0]]}, "expected numbers"),
        (OPENPI, {"actions": [[None, 2.0]]}, "expected numbers"),
        (OPENPI, {"actions": [[1.0], [1.0, 2.0]]}, "not an array of numbers"),
        (ROBOARENA, {"joint_position": np.zeros((4, 7))}, "expected a map with actions"),
        (VLLM_OMNI, {"status": "error", "debug_image": np.zeros((4, 7))}, "expected a map with actions"),
        (VLLM_OMNI, {"a": np.zeros((2, 2, 2))}, "expected a chunk"),
        (OFT_HTTP, b'[["1", "2"]]', "expected numbers"),
        (GR00T, b"ERROR", "ERROR and nothing else"),
        (GR00T, "text", "ERROR and nothing else"),
        (GR00T, [], "expected a map of actions"),
        (GR00T, {}, "expected a map of actions"),
        (GR00T, {"a": 1}, "expected a chunk"),
        (GR00T, [{"a": np.zeros((1, 4, 2))}, {}, 1], "expected a map of actions"),
        (GR00T, b"\xc1", "not valid msgpack"),
        (OFT_HTTP, b'"error"', "responded with an error: error"),
        (OFT_HTTP, b"[]", "expected a list of actions"),
        (OFT_HTTP, b"[[1, 2], [1]]", "expected equal lengths"),
        (OFT_HTTP, b"[[1, NaN]]", "NaN"),
        (OFT_HTTP, b'[{"__numpy__": "AAAA", "dtype": "|O", "shape": [1]}]', "dtype"),
        (OFT_HTTP, b'[{"__numpy__": "A", "dtype": "|u1", "shape": [1]}]', "base64"),
        (OFT_HTTP, b"[" * 100_000, "not valid JSON"),
        (OFT_HTTP, b"{", "not valid JSON"),
    ],
)
def test_an_answer_without_a_chunk_is_refused(dialect: Dialect, message, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        dialect.decode_response(message if isinstance(message, (bytes, str)) else pack(message))


@pytest.mark.parametrize(
    "entry", [1, {}, {"__ModalityConfig__": True}, {"__ModalityConfig_class__": True, "as_json": "{"}]
)
def test_a_wrong_modality_configuration_is_refused(entry) -> None:
    with pytest.raises(WireError, match="modality"):
        GR00T.decode_metadata(pack({"video": entry}))


def test_oft_speaks_json_numpy_as_recorded() -> None:
    body = {message.number: message.payload for message in recorded("openvla_oft")}
    asked = json.loads(body[0])
    features = {
        key: np.frombuffer(base64.b64decode(value["__numpy__"]), value["dtype"]).reshape(value["shape"])
        for key, value in asked.items()
        if isinstance(value, dict)
    }
    assert json.loads(OFT_HTTP.encode_request(Request(features, asked["instruction"]), {})) == asked
    plain, encoded = (OFT_HTTP.decode_response(body[number]).actions["actions"] for number in (1, 3))
    assert plain.shape == encoded.shape == (25, 14)
    np.testing.assert_array_equal(plain, encoded)


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ("ws://127.0.0.1:8000", "openpi"),
        ("wss://host/any", "openpi"),
        ("wss://host/any?token=a", "openpi"),
        ("ws://host:8000/v1/realtime/robot/openpi", "vllm_omni"),
        ("ws://host:30000/openpi/policy", "sglang"),
        ("zmq://host:5555", "gr00t"),
        ("http://host:8777/act", "oft"),
    ],
)
def test_the_address_chooses_the_dialect(server: str, name: str) -> None:
    assert by_address(server).name == by_address(server, name).name == name


@pytest.mark.parametrize(
    ("server", "name", "reason"),
    [
        *((server, "auto", r"policy\.server: found") for server in ("", "host:8000", "ftp://host", "ws://")),
        ("grpc://robot:8080", "auto", "pickle"),
        ("ws://user:secret@robot:8000", "auto", "the address has a user"),
        ("zmq://robot:5555?token=secret", "auto", "the address has a query"),
        ("ws://robot:8000/#secret", "auto", "the address has a fragment"),
        ("ws://robot", "gr00t", r"found 'ws://robot', expected zmq://, tcp:// for policy.dialect 'gr00t'"),
    ],
)
def test_an_address_that_does_not_fit_is_refused(server: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        by_address(server, name)
    assert "secret" not in str(caught.value)


def test_the_metadata_choose_the_dialect() -> None:
    arena = read_map(one("roboarena", "default_config", 2).frame, "")
    assert by_metadata(OPENPI, arena) is ROBOARENA
    assert by_metadata(VLLM_OMNI, arena) is VLLM_OMNI
    assert by_metadata(OPENPI, read_map(one("sglang", "openpi_policy", 2).frame, "")) is SGLANG
    assert by_metadata(OPENPI, {}) is OPENPI
    assert set(DIALECTS) == {
        "openpi",
        "roboarena",
        "vllm_omni",
        "sglang",
        "gr00t",
        "gr00t_flat",
        "oft",
        "vla_eval",
        "moveit_pro",
    }
