"""Bayer mosaics and 16-bit channels, with swapped colours and bytes as past regressions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_ros.vision.decode import ENCODINGS, decode_image
from vla_ros.vision.messages import encode_image

WIDE = [name for name in ENCODINGS if name.startswith("bayer") or name.endswith("16")]
COLOURS = {"red": (200, 0, 0), "green": (0, 150, 0), "blue": (0, 0, 100), "grey": (90, 90, 90)}


def mosaic(rgb: np.ndarray, order: str) -> np.ndarray:
    """What a sensor with the filters ``order`` (upper left two by two, row by row) sees."""
    seen = np.zeros(rgb.shape[:2], rgb.dtype)
    for place, colour in enumerate(order):
        row, column = divmod(place, 2)
        seen[row::2, column::2] = rgb[row::2, column::2, "rgb".index(colour)]
    return seen


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("order", ["rggb", "bggr", "gbrg", "grbg"])
def test_one_colour_through_a_mosaic_is_that_colour(colour: str, order: str) -> None:
    expected = np.full((8, 12, 3), COLOURS[colour], np.uint8)
    image = decode_image(encode_image(mosaic(expected, order)[..., None], 1, "cam", f"bayer_{order}8")).image
    np.testing.assert_array_equal(image, expected)


def with_16_bits(serialize, values: np.ndarray, encoding: str, big_endian: bool) -> bytes:
    data = values.astype(">u2" if big_endian else "<u2").tobytes()
    height, width = values.shape[:2]
    fields = {"height": height, "width": width, "encoding": encoding, "is_bigendian": int(big_endian)}
    return serialize("Image", **fields, step=len(data) // height, data=data)


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("encoding", ["rgb16", "bgr16", "rgba16", "bgra16"])
def test_16_bits_become_8(serialize, encoding: str, big_endian: bool) -> None:
    rgb = np.random.default_rng(2).integers(0, 65536, (6, 8, 3), np.uint16)
    values = rgb if encoding.startswith("rgb") else rgb[..., ::-1]
    if encoding.endswith("a16"):
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=2)
    image = decode_image(with_16_bits(serialize, values, encoding, big_endian)).image
    assert np.abs(image - rgb / 257.0).max() <= 0.5
    assert image.max() > 200


@pytest.mark.parametrize("big_endian", [False, True])
def test_a_mosaic_of_16_bits(serialize, big_endian: bool) -> None:
    expected = np.full((8, 8, 3), COLOURS["red"], np.uint16) * 257
    cdr = with_16_bits(serialize, mosaic(expected, "grbg"), "bayer_grbg16", big_endian)
    np.testing.assert_array_equal(decode_image(cdr).image, expected // 257)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WIDE), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_any_size_gives_an_image_of_that_size(encoding: str, height: int, width: int, padding: int) -> None:
    raw = np.full((height, width, ENCODINGS[encoding].pixel_bytes), 7, np.uint8)
    step = raw.shape[1] * raw.shape[2] + padding
    image = decode_image(encode_image(raw, 1, "cam", encoding, step=step)).image
    assert (image.shape, image.dtype) == ((height, width, 3), np.uint8)
