"""The processors against recorded results of TensorFlow, OpenVLA, openpi, LeRobot, and against Pillow and torch."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vla_ros.errors import ConfigError, ImageError
from vla_ros.vision.processors import (
    PROCESSORS,
    LiberoResize,
    ResizeNaive,
    crop_center,
    fitted_size,
    jpeg_round_trip,
    resize_bicubic,
    resize_lanczos3,
    resize_with_pad,
    resize_with_pad_linear,
)
from vla_ros.vision.resample import crop_taps, lanczos3_matrix

MEAN = np.array([0.485, 0.456, 0.406, 0.5, 0.5, 0.5])[:, None, None]
STD = np.array([0.229, 0.224, 0.225, 0.5, 0.5, 0.5])[:, None, None]


def normalized(image: np.ndarray) -> np.ndarray:
    """Both towers' input, float [6, 224, 224], DINOv2 channels first."""
    channels = image.transpose(2, 0, 1) / 255.0
    return (np.concatenate([channels, channels]) - MEAN) / STD


def sha256(image: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(image)).hexdigest()


def upright(image: np.ndarray) -> np.ndarray:
    return image[::-1, ::-1]


@pytest.mark.parametrize("case", range(4))
def test_libero_pipeline_matches_tensorflow(golden_image, tensorflow, case):
    image = upright(golden_image(f"vision/libero_{case}_image"))
    jpeg = jpeg_round_trip(image)
    resized = resize_lanczos3(jpeg)
    cropped = crop_center(resized, 0.9)
    assert {"jpeg": sha256(jpeg), "resized": sha256(resized), "cropped": sha256(cropped)} == tensorflow[case]
    assert np.array_equal(LiberoResize(crop_area=0.9)(image), cropped)
    assert np.array_equal(LiberoResize()(image), resized)


@pytest.mark.parametrize(("source", "target"), [((120, 160), (224, 224)), ((150, 200), (40, 60)), ((9, 5), (3, 7))])
def test_lanczos3_sums_in_tensorflows_order(source, target):
    """On noise, and on stripes whose sums lie between two levels."""
    rng = np.random.default_rng(2)
    noise = rng.integers(0, 256, (*source, 3), dtype=np.uint8)
    stripes = np.broadcast_to((np.arange(source[1]) % 2)[:, None], (*source, 3)).astype(np.uint8)
    for image in (noise, stripes, np.ascontiguousarray(stripes * 255)):
        expected = image.astype(np.float32)
        for axis in (0, 1):
            matrix, lines = lanczos3_matrix(source[axis], target[axis]), np.moveaxis(expected, axis, 0)
            sums = np.zeros((target[axis], *lines.shape[1:]), np.float32)
            for at, line in enumerate(lines):
                sums += matrix[:, at, None, None] * line
            expected = np.moveaxis(sums, 0, axis)
        assert np.array_equal(resize_lanczos3(image, target), np.clip(np.rint(expected), 0, 255))


def test_lanczos3_is_bit_identical_at_odd_sizes(data_folder):
    with np.load(data_folder / "vision" / "lanczos3.npz", allow_pickle=False) as recorded:
        for source in recorded.files:
            assert np.array_equal(lanczos3_matrix(int(source), 224), recorded[source]), source
    rng = np.random.default_rng(424)
    for size, expected in json.loads((data_folder / "vision" / "lanczos3.json").read_text()).items():
        height, width = map(int, size.split("x"))
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        assert sha256(resize_lanczos3(image)) == expected, size


@pytest.mark.parametrize("case", ["00", "03", "04", "09"])
def test_openvla_pipeline_equals_the_processor(golden_image, data_folder, case):
    expected = np.load(data_folder / "openvla" / "probes.npz", allow_pickle=False)
    pixels = normalized(ResizeNaive()(golden_image(f"openvla/{case}")))
    np.testing.assert_allclose(pixels[:, ::37, ::41], expected[f"{case}_pixel_probe"], atol=2e-6)
    np.testing.assert_allclose(pixels.mean((1, 2)), expected[f"{case}_pixel_mean"], atol=1e-5)


@pytest.mark.parametrize("shape", [(640, 480), (480, 640), (300, 224), (100, 90), (224, 224), (1, 1), (3, 700)])
def test_bicubic_is_pillows(shape):
    image = np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8)
    expected = Image.fromarray(image).resize((224, shape[0]), Image.Resampling.BICUBIC)
    expected = np.array(expected.resize((224, 224), Image.Resampling.BICUBIC))
    assert np.array_equal(resize_bicubic(image), expected)


def test_crop_against_the_formula():
    """A ramp sampled at the crop's coordinates: corners of the box are corners of the result."""
    ramp = np.linspace(0, 1, 101)
    side = np.sqrt(0.25)
    expected = np.linspace(0.5 - side / 2, 0.5 + side / 2, 11)
    taps = crop_taps(101, 11, 0.25)
    found = ramp[taps.below] + (ramp[taps.above] - ramp[taps.below]) * taps.share
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["openvla", "libero"])
@pytest.mark.parametrize("area", [1.0, 0.9])
def test_shape_channels_and_input_untouched(name, area, sample):
    image = sample.copy()
    image.setflags(write=False)
    result = PROCESSORS[name]((100, 60), area)(image[::-1])  # any strides
    assert result.shape == (100, 60, 3)
    assert result.dtype == np.uint8
    assert np.array_equal(image, sample)
    small = np.array(Image.fromarray(np.ascontiguousarray(sample[::-1])).resize((60, 100)))
    assert np.abs(result.astype(int) - small).mean() < 12  # same image: no channel or axis changed places


def test_values_out_of_range():
    with pytest.raises(ConfigError, match="crop_area: found 0"):
        LiberoResize(crop_area=0.0)
    with pytest.raises(ConfigError, match="image size"):
        LiberoResize((0, 224))


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_only_rgb_images(image):
    with pytest.raises(ImageError, match="expected uint8"):
        ResizeNaive()(image)


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
