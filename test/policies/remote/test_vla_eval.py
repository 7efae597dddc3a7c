from typing import Any

import msgpack
import numpy as np
import pytest

pytest.importorskip("vla_eval", reason="the library vla-eval is not installed (extra 'dev')")

from vla_eval import protocol
from vla_eval.protocol import messages, numpy_codec

from vla_ros.policies.remote.images import decode_encoded, is_encoded
from vla_ros.policies.remote.messages import WireError
from vla_ros.policies.remote.vla_eval import MESSAGE_TYPES, check_hello, hello, pack_message, unpack_message
from vla_ros.types import UInt8Array

RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (24, 32, 3), np.uint8)


def theirs(payload: Any, kind: str = "observation", seq: int = 7) -> bytes:
    message = protocol.Message(type=protocol.MessageType(kind), payload=payload, seq=seq)
    packed: bytes = protocol.pack_message(message)
    return packed


def forged(payload: Any, **changes: Any) -> bytes:
    message = {"type": "observation", "payload": payload, "seq": 1, "timestamp": 0.0} | changes
    packed: bytes = msgpack.packb({key: value for key, value in message.items() if value is not None})
    return packed


def pixels(value: Any) -> UInt8Array:
    return decode_encoded(value) if is_encoded(value) else value


def test_the_types_are_theirs() -> None:
    assert set(MESSAGE_TYPES) == {kind.value for kind in protocol.MessageType}


@pytest.mark.parametrize("image_format", ["png", "jpeg", "raw"])
def test_what_vla_eval_writes_is_read_with_the_pixels_that_it_reads_itself(monkeypatch, image_format: str) -> None:
    monkeypatch.setattr(numpy_codec, "_image_format", image_format)
    payload = {
        "images": {"agentview": IMAGE, "wrist": IMAGE[::-1]},
        "states": RNG.normal(size=8),
        "flags": np.array([True, False]),
        "history": [IMAGE, IMAGE[:1, :1]],
        "task_description": "put it down",
    }
    message = theirs(payload)
    found, expected = unpack_message(message), protocol.unpack_message(message)
    assert (found.kind, found.seq) == (expected.type.value, expected.seq)
    for name, image in found.payload["images"].items():
        assert is_encoded(image) == (image_format != "raw")
        np.testing.assert_array_equal(pixels(image), expected.payload["images"][name])
    for ours, image in zip(found.payload["history"], expected.payload["history"], strict=True):
        np.testing.assert_array_equal(pixels(ours), image)
    for key in ("states", "flags"):
        np.testing.assert_array_equal(found.payload[key], payload[key])
        assert found.payload[key].dtype == payload[key].dtype
    assert found.payload["task_description"] == "put it down"


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
def test_vla_eval_reads_what_is_written(kind: str) -> None:
    payload = {"actions": RNG.normal(size=7), "chunk": np.float32(RNG.normal(size=(3, 2))), "number": np.float64(2)}
    found = protocol.unpack_message(pack_message(kind, {**payload, "images": {"a": IMAGE}, "text": "x"}, 12))
    assert (found.type.value, found.seq) == (kind, 12)
    for key, value in payload.items():
        np.testing.assert_array_equal(found.payload[key], value)
    np.testing.assert_array_equal(found.payload["images"]["a"], IMAGE)


def test_a_hello_is_theirs_and_another_version_is_refused() -> None:
    theirs_says = unpack_message(theirs(messages.make_hello_payload(benchmark="a:B"), "hello")).payload
    assert hello(harness_version=theirs_says["harness_version"], benchmark="a:B") == theirs_says
    check_hello(theirs_says)
    with pytest.raises(WireError, match="found protocol_version 2, expected 1"):
        check_hello({**theirs_says, "protocol_version": 2})


def image(**changes: Any) -> dict[str, Any]:
    return {"i": {"__image__": True, "format": "raw", "data": b"abc", "dtype": "|u1", "shape": [1, 1, 3]} | changes}


PNG = numpy_codec.encode_ndarray(IMAGE)["data"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("text", "found a text message"),
        (b"\xc1", "not valid msgpack"),
        (msgpack.packb([1]), "the message is list, expected a map"),
        (forged({}, seq=None), "the message has no seq"),
        (forged({}, type="dance"), "found a message of type 'dance', expected one of hello"),
        (forged({}, seq="1"), "seq is the text '1', expected a whole number"),
        (forged({}, seq=-1), "seq is int, expected a whole number"),
        (forged([1]), "the payload is list, expected a map"),
        (forged({"a": {"__ndarray__": True, "data": b"", "dtype": "|O", "shape": [0]}}), "expected booleans"),
        (forged({"a": {"__ndarray__": True, "data": b"", "dtype": "<f8", "shape": [1 << 40]}}), "with 0 bytes"),
        (forged(image(shape=[1, 1, 2])), r"found an image of shape \[1, 1, 2\]"),
        (forged(image(shape=[2, 1, 3])), "with 3 bytes, expected 6"),
        (forged(image(dtype="<f4", data=bytes(12))), "expected uint8"),
        (forged(image(format="gif")), "found an image of format 'gif'"),
        (forged(image(format="png")), "found a damaged JPEG"),
        (forged(image(format="png", data=PNG[:20], shape=[24, 32, 3])), "found a damaged PNG"),
        (forged(image(format="png", data=PNG, shape=[24, 33, 3])), r"found an image of \[24, 32\] pixels, but"),
        (forged({f"k{number}": 1 for number in range(5000)}), "more than 4096|exceeds max_map_len"),
    ],
)
def test_what_is_not_understood_is_refused(message, said: str) -> None:
    with pytest.raises(WireError, match=said):
        unpack_message(message)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (PNG[:-40], "found a damaged PNG"),
        (PNG[:24] + b"\x10" + PNG[25:], "found a PNG of 16 bits and colour type 2, expected RGB of 8 bits"),
        (PNG[:16] + (1 << 20).to_bytes(4, "big") + PNG[20:], "found a PNG of 1048576x24, allowed 4096 per side"),
        (PNG[:16] + bytes(4) + PNG[20:], "found a PNG of 0x24"),
    ],
)
def test_a_png_that_is_damaged_or_large_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode_encoded(data)
