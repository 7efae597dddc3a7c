"""From message to the policy's image: orientation, crop box, the stages in their order, without heavy imports."""

import hashlib
import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vla_ros.config.sections import ORIENTATIONS, CameraConfig
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.vision.messages import encode_compressed, encode_image
from vla_ros.vision.preprocess import TURNS, Preprocessor, process
from vla_ros.vision.processors import LiberoResize, ResizeNaive
from vla_ros.vision.resample import center_crop_box

SPEC = PolicySpec((ImageFeature("image", ResizeNaive()),))
LIBERO = CameraConfig(orientation=("rotate_180",), processor=("libero",), crop_area=(0.9,))


def test_raw_message(sample):
    raw = Preprocessor(CameraConfig(), SPEC)(encode_image(sample, 77, "cam"), 0)
    assert np.array_equal(process(raw), ResizeNaive()(sample))
    assert (raw.stamp, raw.processor) == (77, ResizeNaive())
    assert np.array_equal(raw.pixels, sample)


def test_libero_camera_matches_tensorflow(golden_image, tensorflow):
    cdr = encode_image(np.ascontiguousarray(golden_image("vision/libero_0_image")[..., ::-1]), 0, "cam", "bgr8")
    found = np.ascontiguousarray(process(Preprocessor(LIBERO, SPEC)(cdr)))
    assert hashlib.sha256(found).hexdigest() == tensorflow[0]["cropped"]


def test_compressed_transport(sample):
    buffer = io.BytesIO()
    Image.fromarray(sample).save(buffer, "PNG")
    preprocessor = Preprocessor(CameraConfig(transport="compressed"), SPEC)
    raw = preprocessor(encode_compressed(buffer.getvalue(), 9, "cam", "rgb8; png compressed bgr8"))
    assert np.array_equal(raw.pixels, sample)
    assert raw.stamp == 9


def test_each_camera_has_its_orientation_and_the_processor_that_the_policy_names(sample):
    spec = PolicySpec(
        (ImageFeature("image", ResizeNaive()), ImageFeature("wrist", LiberoResize((64, 48), 0.9))),
    )
    names = {"topics": ("/a", "/b", "/c"), "keys": ("image", "wrist", "unused")}
    camera = CameraConfig(**names, orientation=("none", "rotate_90", "none"))
    preprocessor = Preprocessor(camera, spec)
    cdr = encode_image(sample, 0, "cam")
    front, wrist, unused = (process(preprocessor(cdr, index)) for index in range(3))
    assert np.array_equal(front, ResizeNaive()(sample))
    assert np.array_equal(wrist, LiberoResize((64, 48), 0.9)(np.rot90(sample, -1)))
    assert np.array_equal(unused, sample), "no processor, nothing done"
    # A user may say otherwise for one camera.
    other = CameraConfig(**names, processor=("policy", "openvla", "policy"), crop_area=(0.5, 0.0, 0.0))
    chosen = [Preprocessor(other, spec).raw(sample, index).processor for index in range(3)]
    assert chosen == [ResizeNaive(crop_area=0.5), ResizeNaive((64, 48)), None]
    with pytest.raises(ConfigError, match=r"camera.crop_area: found 0.5 for 'unused', which is not cropped"):
        Preprocessor(CameraConfig(**names, crop_area=(0.5,)), spec)


def test_result_does_not_alias_the_message(sample):
    buffer = bytearray(encode_image(np.zeros((224, 224, 3), np.uint8), 0, "cam"))
    for name in ("openvla", "libero"):
        image = process(Preprocessor(CameraConfig(processor=(name,)), SPEC)(buffer))
        assert not np.shares_memory(image, np.frombuffer(buffer, np.uint8))
        assert image.flags.writeable
        assert image.flags.c_contiguous


def test_loads_neither_torch_nor_ros():
    heavy = "{'torch', 'rclpy', 'mujoco', 'pinocchio', 'cyclonedds', 'transformers', 'rosbags'}"
    code = f"import sys, vla_ros.vision.preprocess; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


EXPECTED = {
    "none": lambda image: image,
    "rotate_90": lambda image: np.rot90(image, -1),  # numpy turns counter-clockwise
    "rotate_180": lambda image: image[::-1, ::-1],
    "rotate_270": lambda image: np.rot90(image),
    "flip_horizontal": lambda image: image[:, ::-1],
    "flip_vertical": lambda image: image[::-1],
}


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_orientations(sample, orientation):
    sample.setflags(write=False)
    assert np.array_equal(TURNS[orientation](sample), EXPECTED[orientation](sample))


def test_turning_a_strided_view(sample):
    padded = np.pad(sample, ((0, 0), (0, 3), (0, 0)))[:, :-3]
    assert np.array_equal(TURNS["rotate_180"](padded), sample[::-1, ::-1])


def test_crop_box_keeps_the_area_and_the_centre():
    low, high = center_crop_box(0.9)
    assert (high - low) ** 2 == pytest.approx(0.9, abs=1e-6)
    assert low + high == pytest.approx(1.0, abs=1e-6)
    assert center_crop_box(1.0) == (0.0, 1.0)


@pytest.mark.parametrize("area", [0.0, -0.1, 1.01, float("nan")])
def test_crop_area_out_of_range(area):
    with pytest.raises(ConfigError, match=r"camera\.crop_area"):
        center_crop_box(area)
