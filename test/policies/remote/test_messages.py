from typing import Any

import msgpack
import numpy as np
import pytest

from vla_ros.policies.remote.messages import WireError, finite, nd, npy, openpi, pack, unpack

from .golden import LAYOUTS, Recorded, agrees, layout_of, nodes, whole

FAMILIES = ("openpi", "roboarena", "vllm_omni", "sglang", "gr00t")
PLAIN = "biuf"


def foreign(message: Recorded) -> list[str]:
    """Dtypes of a recorded message that this package does not accept, and keys other than text."""
    found = [value["dtype"] for kind, value in nodes(message.meaning) if kind == "ndarray"]
    bad = [dtype for dtype in found if np.dtype(dtype).kind not in PLAIN]
    keys = [key for kind, value in nodes(message.meaning) if kind == "map" for key, _ in value]
    return bad + [str(key) for key in keys if "int" in key]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_recorded_message_is_read_and_written_again_to_the_byte(family: str) -> None:
    again = refused = 0
    for message in whole(family):
        if foreign(message):
            with pytest.raises(WireError):
                unpack(message.payload)
            refused += 1
            continue
        value = unpack(message.payload)
        assert agrees(value, message.meaning), message
        if message.scenario not in ("other_array_markers", "foreign_array_markers"):
            assert pack(value, LAYOUTS[layout_of(message.meaning)]) == message.payload, message
            again += 1
    assert again >= 10
    assert (refused > 0) == (family in ("openpi", "gr00t"))


@pytest.mark.parametrize("layout", [openpi, npy, nd])
@pytest.mark.parametrize(
    "held",
    [
        np.arange(24, dtype=np.int32).reshape(4, 6)[::2, 1::2],
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.broadcast_to(np.array([1, 2, 3], np.int16), (2, 3)),
        np.zeros((0, 7), np.float32),
        np.array(3.5, ">f8"),
        np.array([True, False]),
    ],
)
def test_views_byte_orders_and_empty_arrays_are_preserved(layout, held) -> None:
    found = unpack(pack({"a": held}, layout))["a"]
    np.testing.assert_array_equal(found, held)
    assert found.dtype == held.dtype
    assert not found.flags.writeable


ARRAY: dict[Any, Any] = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**ARRAY, b"shape": [3]}, "8 bytes, expected 12"),
        ({**ARRAY, b"shape": [-2]}, "8 lengths of 0 or more"),
        ({**ARRAY, b"shape": [True, 2]}, "8 lengths of 0 or more"),
        ({**ARRAY, b"shape": [1 << 62, 1 << 62]}, "bytes, expected"),
        ({**ARRAY, b"shape": [2, *[1] * 9]}, "up to 8 lengths"),
        ({**ARRAY, b"shape": None}, "up to 8 lengths"),
        ({**ARRAY, b"dtype": "|O"}, "dtype"),
        ({**ARRAY, b"dtype": "<f4,<f4"}, "dtype"),
        ({**ARRAY, b"dtype": "<U1"}, "expected one text"),
        ({**ARRAY, b"dtype": "<U2", b"shape": [], b"data": b"\xff\xff\xff\xff" * 2}, "no text"),
        ({**ARRAY, b"dtype": "|S2", b"shape": [], b"data": "ab"}, "expected one text"),
        ({**ARRAY, b"dtype": "<U99999999"}, "dtype"),
        ({**ARRAY, b"dtype": None}, "dtype"),
        ({**ARRAY, b"data": "text"}, "expected bytes"),
        ({b"nd": True, b"type": "<f4", b"kind": b"O", b"shape": [1], b"data": b""}, "objects and records"),
        ({b"nd": True, b"type": "<f4", b"kind": "i", b"shape": [1], b"data": bytes(4)}, "kind i and type '<f4'"),
        ({b"nd": True, b"type": "<f4", b"kind": 5, b"shape": [1], b"data": bytes(4)}, "kind 5"),
        ({b"nd": True, b"type": [["a", "<f4"]], b"kind": b"V", b"shape": [1], b"data": b""}, "objects and records"),
        ({b"__npgeneric__": True, b"dtype": "|u1", b"data": 300}, "number of dtype"),
        ({b"__npgeneric__": True, b"dtype": "<f4", b"data": "x"}, "number of dtype"),
        ({"__ndarray_class__": True, "as_npy": b"\x93NUMPY\x01\x00\x05\x00(((((((" * 2}, "not a .npy file"),
        ({"__ndarray_class__": True, "as_npy": b"pickle"}, "not a .npy file"),
        (msgpack.ExtType(3, b"x"), "extension"),
    ],
)
def test_a_forged_array_is_refused(message, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack(msgpack.packb({"a": message}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x91" * 100 + b"\x01", "nested more than 12 levels deep"),
        (b"\x91" * 5000, "not valid msgpack"),
        (msgpack.packb([[0] * 40_000, [0] * 40_000]), "entries"),
        (b"\x93" * 30_000 + b"\x80" * 60_001, "not valid|entries"),
        (b"\x81\xa1a" + b"\xdf\x00\x00\xff\xff" + b"\x01\xc0" * 0xFFFF, "duplicate|not valid"),
        (b"\x82\xa1a\xc0\xa1a\xc0", "a map with a duplicate key"),
        (b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
        (b"\x82\xa1a\x01", "not valid msgpack"),
        (b"\x81\xa1a\x01\x01", "not valid msgpack"),
        (b"\x81\xa1\xff\x01", "not valid msgpack"),
        (b"\x81\x01\x02", "not valid msgpack"),
        (b"", "not valid msgpack"),
        (b"\xc1", "not valid msgpack"),
    ],
)
def test_a_damaged_message_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack(data)


def test_objects_are_refused_when_writing() -> None:
    for value in (np.array([object()]), np.array(["a"]), object(), {1 + 2j}):
        with pytest.raises(WireError, match=r"cannot be encoded|dtype"):
            pack({"a": value})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            (np.array([1.0, np.nan]), [1.0, float("inf")], np.float32("nan")),
            r"state: 1 of \d numbers are not finite",
        ),
        ((None, "1", [[1], [1, 2]], {"a": 1}, b"12"), "state: .*(expected|not an array of) numbers"),
    ],
)
def test_a_state_must_be_finite_numbers(values: tuple[Any, ...], reason: str) -> None:
    for value in values:
        with pytest.raises(WireError, match=reason):
            finite(value, "state")


def test_the_limits_leave_room_for_real_messages() -> None:
    images = {f"image_{i}": np.zeros((1080, 1920, 3), np.uint8) for i in range(4)}
    assert len(unpack(pack(images))) == 4


@pytest.mark.parametrize("text", ["pick up the cup", "hebe die Tasse für mich auf", "", "カップ"])
def test_a_text_in_an_array_is_that_text(text: str) -> None:
    """As openpi's client packs NumPy's strings: an array of no or one axis, or a scalar."""
    for held in (np.array(text), np.array([text]), np.array(text).astype(">U40"), np.array(text.encode())):
        entry = {b"__ndarray__": True, b"data": held.tobytes(), b"dtype": held.dtype.str, b"shape": held.shape}
        assert unpack(msgpack.packb({"prompt": entry})) == {"prompt": text}
        entry = {b"nd": True, b"type": held.dtype.str, b"kind": b"", b"shape": held.shape, b"data": held.tobytes()}
        assert unpack(msgpack.packb({"prompt": entry})) == {"prompt": text}
    scalar = {b"__npgeneric__": True, b"data": np.str_(text).item(), b"dtype": np.str_(text).dtype.str}
    assert unpack(msgpack.packb({"prompt": scalar})) == {"prompt": text}


@pytest.mark.parametrize(
    ("dtype", "kind"), [("<f4", "f"), ("<f8", b"f"), ("<i8", "i"), ("|u1", b"u"), ("|b1", "b")]
)
def test_an_array_may_state_its_kind(dtype: str, kind: str | bytes) -> None:
    held = np.ones((2, 7), dtype)
    entry = {"nd": True, "type": dtype, "kind": kind, "shape": [2, 7], "data": held.tobytes()}
    np.testing.assert_array_equal(unpack(msgpack.packb({"a": entry}))["a"], held)
