"""From message to the policy's picture: the stages in their order, per camera, and without heavy imports."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vla_ros.config.tree import CameraConfig
from vla_ros.errors import ConfigError, ImageError
from vla_ros.vision.decode import encode_compressed, encode_image
from vla_ros.vision.pipelines import make_pipeline
from vla_ros.vision.preprocess import Preprocessor


def test_raw_message(picture):
    prepared = Preprocessor(CameraConfig(), (224, 224))(encode_image(picture, 77, "cam"), 0)
    assert np.array_equal(prepared.image, make_pipeline("openvla")(picture))
    assert prepared.stamp == 77
    assert prepared.original_size == (48, 64)
    assert prepared.frame is not None
    assert prepared.frame.frame_id == "cam"


def test_libero_order_is_turn_then_jpeg(picture):
    camera = CameraConfig(orientation=("rotate_180",), pipeline="libero", crop_area=0.9)
    prepared = Preprocessor(camera)(encode_image(picture, 0, "cam"))
    assert np.array_equal(prepared.image, make_pipeline("libero", crop_area=0.9)(picture[::-1, ::-1]))


def test_libero_camera_matches_tensorflow(golden_picture, tensorflow):
    camera = CameraConfig(orientation=("rotate_180",), pipeline="libero", crop_area=0.9)
    cdr = encode_image(np.ascontiguousarray(golden_picture("vision/libero_0_image")[..., ::-1]), 0, "cam", "bgr8")
    found = np.ascontiguousarray(Preprocessor(camera)(cdr).image)
    assert hashlib.sha256(found).hexdigest() == tensorflow[0]["cropped"]


def test_compressed_transport(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    preprocessor = Preprocessor(CameraConfig(transport="compressed"))
    prepared = preprocessor(encode_compressed(buffer.getvalue(), 9, "cam", "rgb8; png compressed bgr8"))
    assert np.array_equal(prepared.image, preprocessor.prepare(picture))
    assert prepared.stamp == 9


def test_each_camera_has_its_orientation(picture):
    camera = CameraConfig(
        topics=("/a", "/b"), keys=("image", "wrist"), orientation=("none", "rotate_90"), pipeline="openvla"
    )
    preprocessor = Preprocessor(camera)
    cdr = encode_image(picture, 0, "cam")
    assert np.array_equal(preprocessor(cdr, 0).image, preprocessor.prepare(picture, 0))
    turned = preprocessor(cdr, 1)
    assert turned.original_size == (48, 64)
    assert np.array_equal(turned.image, make_pipeline("openvla")(np.rot90(picture, -1)))


def test_one_orientation_serves_all_cameras(picture):
    preprocessor = Preprocessor(CameraConfig(topics=("/a", "/b"), orientation=("flip_vertical",)))
    assert np.array_equal(preprocessor.prepare(picture, 0), preprocessor.prepare(picture, 1))


def test_number_of_orientations_must_fit():
    with pytest.raises(ConfigError, match="found 2 entries for 3 camera topics"):
        Preprocessor(CameraConfig(topics=("/a", "/b", "/c"), orientation=("none", "none")))


@pytest.mark.parametrize(
    ("change", "text"),
    [({"orientation": ("upside",)}, "upside"), ({"transport": "theora"}, "theora"), ({"pipeline": "x"}, "'x'")],
)
def test_unknown_names_are_refused_before_the_first_frame(change, text):
    with pytest.raises(ConfigError, match=text):
        Preprocessor(CameraConfig(**change))


def test_bad_frames_raise_and_the_next_one_works(picture):
    preprocessor = Preprocessor(CameraConfig())
    good = encode_image(picture, 5, "cam")
    for bad in (b"", good[:50], good[:-1], encode_image(picture, 5, "cam", "16UC1")):
        with pytest.raises(ImageError):
            preprocessor(bad)
    assert preprocessor(good).stamp == 5


def test_result_does_not_alias_the_message(picture):
    buffer = bytearray(encode_image(np.zeros((224, 224, 3), np.uint8), 0, "cam"))
    for name in ("openvla", "libero"):
        prepared = Preprocessor(CameraConfig(pipeline=name))(buffer)
        assert not np.shares_memory(prepared.image, np.frombuffer(buffer, np.uint8))
        assert prepared.image.flags.writeable
        assert prepared.image.flags.c_contiguous


def test_loads_neither_torch_nor_ros():
    heavy = "{'torch', 'rclpy', 'mujoco', 'pinocchio', 'cyclonedds', 'transformers', 'rosbags'}"
    code = f"import sys, vla_ros.vision.preprocess; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
