"""Depth images against the published codec, and ImageError for all other input."""

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.errors import ImageError
from vla_ros.vision.depth import decode_compressed_depth, decode_depth
from vla_ros.vision.messages import encode_compressed, encode_image

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "depth" / "golden.npz")
ENCODINGS = ("16UC1", "32FC1")


def metres(values: np.ndarray) -> np.ndarray:
    """What ``depth_traits.hpp`` makes of a depth image; NaN where it is not valid, and for 65535, on purpose."""
    if values.dtype == np.uint16:
        unknown = (values == 0) | (values == 65535)
        return np.where(unknown, np.nan, values * np.float32(0.001)).astype(np.float32)
    return np.where(np.isfinite(values), values, np.nan)


def raw(values: np.ndarray, encoding: str, *, padding: int = 0) -> bytes:
    row = values.shape[1] * values.itemsize
    return encode_image(np.ascontiguousarray(values)[..., None].view(np.uint8), 7, "depth", encoding, row + padding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("padding", [0, 6])
def test_raw_depth_is_in_metres(encoding: str, padding: int) -> None:
    values = GOLDEN[f"depth_{encoding}"]
    found = decode_depth(raw(values, encoding, padding=padding))
    np.testing.assert_array_equal(found.depth, metres(values))
    assert (found.depth.dtype, found.stamp, found.frame_id) == (np.float32, 7, "depth")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_big_endian_depth_is_read(encoding: str) -> None:
    values = GOLDEN[f"depth_{encoding}"]
    message = bytearray(raw(values.byteswap(), encoding))
    message[message.index(encoding.encode()) + len(encoding) + 1] = 1  # is_bigendian follows the encoding
    np.testing.assert_array_equal(decode_depth(message).depth, metres(values))


def test_what_no_sensor_measures_is_unknown() -> None:
    values = np.array([[0.0, -1.0, np.inf, -np.inf, np.nan, 0.5]], np.float32)
    np.testing.assert_array_equal(decode_depth(raw(values, "32FC1")).depth, [[np.nan] * 5 + [0.5]])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rvl_is_decoded_as_the_published_codec_does(encoding: str) -> None:
    message = encode_compressed(GOLDEN[f"rvl_{encoding}"].tobytes(), 7, "depth", f"{encoding}; compressedDepth rvl")
    found = decode_compressed_depth(message)
    np.testing.assert_array_equal(found.depth, metres(GOLDEN[f"decoded_{encoding}"]))
    assert (found.stamp, found.frame_id) == (7, "depth")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("format", ["{}; compressedDepth png", "{}; compressedDepth", "{}"])
def test_png_is_decoded_as_the_published_codec_does(encoding: str, format: str) -> None:
    """The published quantisation and header, with a PNG of the same 16 bits."""
    header = bytes(GOLDEN[f"rvl_{encoding}"][:12])
    decoded = GOLDEN[f"decoded_{encoding}"]
    if encoding == "32FC1":
        _, a, b = struct.unpack("<i2f", header)
        stored = np.where(np.isnan(decoded), 0, np.rint(a / decoded + b)).astype(np.uint16)
    else:
        stored = decoded
    data = header + cv2.imencode(".png", stored)[1].tobytes()
    found = decode_compressed_depth(encode_compressed(data, 7, "depth", format.format(encoding)))
    np.testing.assert_array_equal(found.depth, metres(decoded))


@pytest.mark.parametrize(
    ("cdr", "text"),
    [
        (encode_image(np.zeros((2, 2, 3), np.uint8), 0, ""), "found encoding 'rgb8', expected depth"),
        (encode_image(np.zeros((2, 2), np.uint8), 0, "", "16UC1"), "found step 2, expected at least 4"),
        (encode_image(np.zeros((0, 2), np.uint8), 0, "", "16UC1"), "found size 2 x 0"),
    ],
)
def test_what_is_no_depth_image_is_refused(cdr: bytes, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        decode_depth(cdr)


RVL = "16UC1; compressedDepth rvl"
HEADER = bytes(12)


@pytest.mark.parametrize(
    ("data", "format", "text"),
    [
        (b"", RVL, "found 0 bytes"),
        (HEADER + b"1234", "rgb8; jpeg compressed bgr8", "expected depth"),
        (HEADER + b"1234", "16UC1; compressedDepth zstd", "expected depth"),
        (HEADER + b"1234", "mono16; compressedDepth png", "expected depth"),
        (HEADER + b"1234", "16UC1; compressedDepth png", "found no PNG"),
        (HEADER + b"1234", RVL, "found 4 bytes of RVL"),
        (HEADER + struct.pack("<2I", 0, 5) + bytes(8), RVL, "found size 0 x 5"),
        (HEADER + struct.pack("<2I", 60000, 60000) + bytes(8), RVL, "found size 60000 x 60000"),
        (HEADER + struct.pack("<2I", 4, 4), RVL, "found no number"),
        (HEADER + struct.pack("<2I", 4, 4) + b"\xff" * 8, RVL, "found no number"),
        (HEADER + struct.pack("<2I", 4, 4) + b"\xff" * 12 + bytes(4), RVL, "without an end"),
        (HEADER + struct.pack("<2I", 4, 4) + bytes(8), RVL, "of 0 pixels, expected 16"),
        (GOLDEN["rvl_16UC1"][:-400].tobytes(), RVL, "pixels, expected 3072"),
        (
            HEADER + cv2.imencode(".png", np.ones((3, 3), np.uint8))[1].tobytes(),
            "16UC1",
            "uint8 .* expected uint16",
        ),
        (HEADER + cv2.imencode(".png", np.ones((3, 3), np.uint16))[1].tobytes()[:45], "16UC1", "cannot be decoded"),
    ],
)
def test_damaged_data_are_refused(data: bytes, format: str, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        decode_compressed_depth(encode_compressed(data, 0, "", format))


@given(st.binary(max_size=64), st.sampled_from([RVL, "32FC1; compressedDepth png", "16UC1"]))
@settings(max_examples=300, deadline=None)
def test_random_bytes_end_in_an_image_or_an_image_error(data: bytes, format: str) -> None:
    for begin in (b"", HEADER + struct.pack("<2I", 3, 2)):
        try:
            found = decode_compressed_depth(encode_compressed(begin + data, 0, "", format))
        except ImageError:
            continue
        assert found.depth.ndim == 2
