"""Resize with pad against Pillow, torch and images recorded from openpi and LeRobot."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vla_ros.vision.processors import fitted_size, resize_with_pad, resize_with_pad_linear

DATA = Path(__file__).parents[1] / "data" / "pi"
SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def arrays(name):
    with np.load(DATA / f"{name}.npz") as file:
        return {key: file[key] for key in file}


def decode(value):
    return np.asarray(Image.open(io.BytesIO(value.tobytes())))


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_openpis_images_are_bit_identical(name):
    cases = arrays(name)
    compared = 0
    for number in range(6):
        for slot, key in enumerate(SLOTS):
            stored = cases.get(f"{number:02d}_image_{key}")
            if stored is None:
                continue
            resized = resize_with_pad(decode(stored)).transpose(2, 0, 1)
            np.testing.assert_array_equal(resized[:, ::37, ::41], cases[f"{number:02d}_pixel_probe"][slot])
            compared += 1
    assert compared == 12


@pytest.mark.parametrize(("name", "count"), [("pi0_lerobot", 3), ("pi05_lerobot", 8)])
def test_lerobots_images_are_equal_in_float32(name, count):
    cases = arrays(name)
    for number in range(count):
        for slot, key in enumerate(("image", "image2")):
            resized = resize_with_pad_linear(decode(cases[f"{number:02d}_{key}"])).transpose(2, 0, 1)
            probe = cases[f"{number:02d}_pixel_probe"][slot]
            np.testing.assert_allclose(resized[:, ::37, ::41] * 2 - 1, probe, rtol=0, atol=5e-7)


@given(height=st.integers(1, 700), width=st.integers(1, 700), seed=st.integers(0, 9))
def test_the_image_is_centred_on_black(height, width, seed):
    image = np.random.default_rng(seed).integers(1, 256, (height, width, 3), np.uint8)
    tall, wide = fitted_size((height, width), (224, 224))
    assert max(tall, wide) in (223, 224)
    top, left = (224 - tall) // 2, (224 - wide) // 2
    for result in (resize_with_pad(image), resize_with_pad_linear(image)):
        assert result.shape == (224, 224, 3)
        inside = np.zeros((224, 224), bool)
        inside[top : top + tall, left : left + wide] = True
        assert not result[~inside].any()
        assert (result[inside] > 0).all()


def test_an_image_of_the_right_size_passes_untouched():
    image = np.random.default_rng(1).integers(0, 256, (224, 224, 3), np.uint8)
    assert resize_with_pad(image) is image
    np.testing.assert_array_equal(np.rint(resize_with_pad_linear(image) * 255), image)


@pytest.mark.parametrize("size", [(100, 224), (480, 640), (300, 200), (7, 5)])
def test_torch_agrees_with_the_linear_form(size):
    torch = pytest.importorskip("torch")
    image = np.random.default_rng(2).integers(0, 256, (*size, 3), np.uint8)
    tall, wide = fitted_size(size, (224, 224))
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
    expected = torch.nn.functional.interpolate(pixels, (tall, wide), mode="bilinear", align_corners=False)[0]
    top, left = (224 - tall) // 2, (224 - wide) // 2
    found = resize_with_pad_linear(image)[top : top + tall, left : left + wide]
    np.testing.assert_allclose(found, expected.permute(1, 2, 0), rtol=0, atol=1e-6)
