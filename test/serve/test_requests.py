from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simplejpeg

from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.remote.dialect import Request, Response
from vla_ros.policies.remote.messages import WireError, pack, unpack
from vla_ros.policies.remote.openpi import OPENPI
from vla_ros.policies.remote.spec import OWN
from vla_ros.serve.requests import RequestSchema, check_request, observation
from vla_ros.vision.processors import ResizeNaive

SPEC = PolicySpec((ImageFeature("image", ResizeNaive((8, 8))),), (StateFeature("state", size=2),))
ONE = RequestSchema(SPEC)
IMAGE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
GOOD: dict[str, Any] = {"observation/image": IMAGE, "observation/state": np.array([1.0, 2.0]), "prompt": "go"}


def read(message: Any, schema: RequestSchema = ONE) -> Request:
    return check_request(OPENPI.decode_request(pack(message)), schema)


@pytest.mark.parametrize(
    "names",
    [
        ("observation/image", "observation/state"),
        ("image", "state"),
        ("images.image", "observation.state"),
        ("observation.images.image", "state"),
        ("anything", "state"),
    ],
)
def test_features_are_found_under_the_names_of_known_clients(names: tuple[str, str]) -> None:
    request = read({names[0]: IMAGE, names[1]: [1, 2], "prompt": "go"})
    np.testing.assert_array_equal(request.features["image"], IMAGE)
    np.testing.assert_array_equal(request.features["state"], [1.0, 2.0])
    assert request.instruction == "go"


def test_channels_of_nested_images_are_moved_to_the_end() -> None:
    request = read({"images": {"image": np.moveaxis(IMAGE, -1, 0)}, "state": [1, 2], "prompt": "go"})
    np.testing.assert_array_equal(request.features["image"], IMAGE)


def test_an_alias_replaces_the_other_names() -> None:
    known = RequestSchema(SPEC, {"image": "observation/exterior_image_0_left"})
    message = {**GOOD, "observation/exterior_image_0_left": IMAGE + 1}
    np.testing.assert_array_equal(read(message, known).features["image"], IMAGE + 1)
    with pytest.raises(WireError, match="no image 'observation/exterior_image_0_left'"):
        read({**GOOD, "wrist": IMAGE}, known)


def test_an_observation_is_processed_as_on_the_robot() -> None:
    found = observation(read(GOOD), ONE, 7)
    np.testing.assert_array_equal(found.images["image"], ResizeNaive((8, 8))(IMAGE))
    np.testing.assert_array_equal(found.raw_images["image"].pixels, IMAGE)
    assert (found.stamp, found.instruction) == (7, "go")


def test_jpegs_are_decoded() -> None:
    jpeg = simplejpeg.encode_jpeg(np.zeros((16, 24, 3), np.uint8), quality=95)
    found = observation(read({**GOOD, "observation/image": jpeg}), ONE, 0)
    assert found.raw_images["image"].pixels.shape == (16, 24, 3)
    with pytest.raises(WireError, match="damaged JPEG"):
        observation(read({**GOOD, "observation/image": jpeg[:40]}), ONE, 0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"observation/image": None}, "no image 'image'"),
        ({"observation/image": IMAGE.astype(np.float32)}, r"<f4 \[4, 6, 3\], expected uint8"),
        ({"observation/image": IMAGE[..., :2]}, r"\[4, 6, 2\], expected uint8"),
        ({"observation/image": IMAGE[:0]}, r"\[0, 6, 3\], expected uint8"),
        ({"observation/image": np.zeros((1, 5000, 3), np.uint8)}, "sides of 1 to 4096"),
        ({"observation/image": "image"}, "the text 'image'"),
        ({"observation/image": b"bytes"}, "bytes, expected uint8"),
        ({"observation/state": None}, "no state 'state'"),
        ({"observation/state": [1, float("nan")]}, "not finite"),
        ({"observation/state": [1, 2, 3]}, r"expected \[2\]"),
        ({"observation/state": "12"}, "expected numbers"),
        ({"prompt": None}, r"no instruction: found \['observation/image', .*expected 'prompt'"),
        ({"prompt": "  "}, "the prompt is the text"),
        ({"prompt": 5}, "the prompt is int"),
        ({"prompt": "x" * 501}, "501 characters, allowed 500"),
        ({"session_id": 5}, "session_id is int"),
    ],
)
def test_a_wrong_request_is_refused(changed: dict[str, Any], reason: str) -> None:
    message = {key: value for key, value in {**GOOD, **changed}.items() if value is not None}
    with pytest.raises(WireError, match=reason):
        read(message)


def test_a_request_without_a_prompt_gets_the_servers() -> None:
    """As openpi's servers have a default prompt, which its ALOHA clients rely on."""
    known = RequestSchema(SPEC, instruction="uncap the pen")
    without = {key: value for key, value in GOOD.items() if key != "prompt"}
    assert read(without, known).instruction == "uncap the pen"
    assert read(GOOD, known).instruction == GOOD["prompt"]
    with pytest.raises(WireError, match="the prompt is the text"):
        read({**without, "prompt": " "}, known)
    with pytest.raises(WireError, match=r"-p policy\.instruction:=TEXT"):
        read(without)


def test_a_policy_without_instructions_needs_none() -> None:
    known = RequestSchema(PolicySpec((), (StateFeature("state", size=2),), uses_instruction=False))
    assert read({"state": [1, 2]}, known).instruction == ""
    assert read({"state": [1, 2], "prompt": "go"}, known).instruction == "go"
    with pytest.raises(WireError, match="the prompt is int"):
        read({"state": [1, 2], "prompt": 5}, known)


def test_images_of_several_times_and_optional_ones() -> None:
    now = (DeltaTimestamp(-15), DeltaTimestamp())
    front, low = (
        ImageFeature("front", ResizeNaive((2, 2)), delta_timestamps=now),
        ImageFeature("low", required=False),
    )
    known = RequestSchema(PolicySpec((front, low), (StateFeature("state", delta_timestamps=now),)))
    message = {"front": np.stack([IMAGE, IMAGE + 1]), "state": np.ones((2, 3)), "prompt": "go"}
    found = observation(read(message, known), known, 0)
    assert found.images["front"].shape == (2, 2, 2, 3)
    assert (list(found.images), dict(found.raw_images)) == (["front"], {})
    for changed in ({"front": IMAGE}, {"front": np.stack([IMAGE] * 3)}, {"state": np.ones(3)}):
        with pytest.raises(WireError, match=r"expected (uint8 \[2, 'H', 'W', 3\]|\[2, 'N'\])"):
            read({**message, **changed}, known)


def test_an_error_about_a_missing_image_lists_the_policys_images() -> None:
    two = RequestSchema(PolicySpec((ImageFeature("front"), ImageFeature("wrist"))))
    with pytest.raises(WireError, match=r"no image 'front'.*takes the images \['front', 'wrist'\]"):
        read(GOOD, two)


@pytest.mark.parametrize("message", ["text", b"", b"\xc1", pack([1]), pack({b"a": 1}), b"\x81\xa1a"])
def test_other_messages_than_requests_are_refused(message: bytes | str) -> None:
    with pytest.raises(WireError):
        OPENPI.decode_request(message)


def test_a_reset_has_no_observation() -> None:
    request = read({"endpoint": "reset", "session_id": "A"})
    assert (request.reset, request.session, request.features) == (True, "A", {})


def test_a_response_is_openpis_and_extended_for_our_client() -> None:
    actions = np.arange(6.0).reshape(2, 3)
    plain = Response({"actions": actions}, {"infer_ms": 2.0}, normalized=np.ones((2, 3)))
    assert set(unpack(OPENPI.encode_response(plain))) == {"actions", "server_timing"}
    request = read({**GOOD, OWN: {"number": 5, "deadline_ms": 250, "begins": True}})
    assert (request.number, request.deadline_s, request.begins) == (5, 0.25, True)
    extended = replace(plain, number=5, tokens=np.arange(3), info={"margins": (0.5, 1.0)})
    found = OPENPI.decode_response(OPENPI.encode_response(extended))
    np.testing.assert_array_equal(found.actions["actions"], actions)
    np.testing.assert_array_equal(found.tokens, np.arange(3))
    np.testing.assert_array_equal(found.normalized, np.ones((2, 3)))
    assert (found.number, found.info, found.timing_ms) == (5, {"margins": [0.5, 1.0]}, {"server/infer": 2.0})


@pytest.mark.parametrize("extension", [5, {"number": "x"}, {"deadline_ms": "soon"}, {"deadline_ms": np.nan}])
def test_a_wrong_extension_is_ignored(extension) -> None:
    request = read({**GOOD, OWN: extension})
    assert (request.number, request.deadline_s, request.begins) == (None, 0.0, False)


@pytest.mark.parametrize(
    ("continues", "previous", "reason"),
    [
        (True, {"actions": np.zeros((3, 2)), "delay": 2}, ""),
        (True, {"actions": np.zeros((0, 2)), "delay": 0}, ""),
        (True, {"actions": np.zeros((5, 2)), "delay": 0}, r"\[5, 2\] and delay 0, expected \[0 to 4, 2\]"),
        (True, {"actions": np.zeros((3, 3)), "delay": 0}, r"\[3, 3\] and"),
        (True, {"actions": np.zeros(3), "delay": 0}, r"\[3\] and"),
        (True, {"actions": np.zeros((3, 2)), "delay": 4}, "delay 4"),
        (True, {"actions": np.zeros((3, 2)), "delay": -1}, "delay -1"),
        (True, {"actions": np.zeros((3, 2)), "delay": True}, "delay True"),
        (True, {"actions": np.full((3, 2), np.nan), "delay": 0}, "6 of 6 numbers are not finite"),
        (True, {"delay": 0}, "NoneType, expected numbers"),
        (True, 5, "the previous chunk is int, expected a map"),
        (False, {"actions": np.zeros((3, 2)), "delay": 0}, "this policy cannot continue"),
    ],
)
def test_the_chunk_to_continue_is_checked(continues: bool, previous, reason: str) -> None:
    known = RequestSchema(PolicySpec(dimension=2, horizon=4, continues_chunks=continues))
    message = {"image": IMAGE, "prompt": "go", OWN: {"previous": previous}}
    if reason:
        with pytest.raises(WireError, match=reason):
            read(message, known)
        return
    found = observation(read(message, known), known, 0).previous
    assert found is not None
    assert (found.actions.shape, found.delay) == (previous["actions"].shape, previous["delay"])
