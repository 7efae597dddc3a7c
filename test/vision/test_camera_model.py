"""Cameras against image_geometry, depth_image_proc and OpenCV; see ``data/depth``."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from vla_ros.errors import ConfigError
from vla_ros.vision.camera_model import CameraModel, read_camera_info
from vla_ros.vision.depth import decode_depth
from vla_ros.vision.messages import encode_image

FOLDER = Path(__file__).parents[1] / "data" / "depth"
GOLDEN = np.load(FOLDER / "golden.npz")
CAMERAS = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["cameras"]


def info(facts: dict[str, Any], **changed: Any) -> SimpleNamespace:
    """A ``sensor_msgs/CameraInfo``."""
    facts = {**facts, **changed}
    x, y, width, height = facts["roi"]
    return SimpleNamespace(
        header=SimpleNamespace(frame_id="optical"),
        distortion_model=facts["model"],
        binning_x=facts["binning"][0],
        binning_y=facts["binning"][1],
        roi=SimpleNamespace(x_offset=x, y_offset=y, width=width, height=height),
        **{key: facts[key] for key in ("d", "k", "p", "r", "width", "height")},
    )


def pinhole(name: str, size: tuple[int, int]) -> CameraModel:
    fx, fy, cx, cy = GOLDEN[name]
    return CameraModel("optical", size, np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]]), np.zeros(4))


def depth_image(encoding: str, key: str) -> np.ndarray:
    values = np.ascontiguousarray(GOLDEN[f"{key}_{encoding}"])[..., None]
    return decode_depth(encode_image(values.view(np.uint8), 0, "optical", encoding)).depth


@pytest.mark.parametrize("facts", CAMERAS, ids=lambda facts: f"{facts['model']}-{facts['roi']}-{facts['binning']}")
def test_pixels_are_seen_where_image_geometry_and_opencv_see_them(facts: dict[str, Any]) -> None:
    pixels = np.array(facts["pixels"], int)
    for rectified, key, matrix in ((True, "image_geometry", "P"), (False, "opencv", "K")):
        camera = read_camera_info(info(facts), rectified=rectified)
        assert (list(camera.size), camera.frame_id) == (facts["size"], "optical")
        np.testing.assert_allclose(camera.matrix, np.array(facts[matrix])[:, :3], rtol=1e-12)
        rays = camera.rays[pixels[:, 1], pixels[:, 0]]
        np.testing.assert_allclose(rays[:, :2], facts[key], atol=1e-8)
        np.testing.assert_array_equal(rays[:, 2], 1)
        np.testing.assert_allclose(camera.pixels(rays * 1.7), pixels, atol=1e-6)


@pytest.mark.parametrize("encoding", ["16UC1", "32FC1"])
def test_points_are_those_of_depth_image_proc(encoding: str) -> None:
    depth, expected = depth_image(encoding, "depth"), GOLDEN[f"points_{encoding}"]
    expected = np.where(np.abs(expected[..., 2:] - 65.535) < 1e-5, np.nan, expected)  # unknown here, on purpose
    found = pinhole("depth_camera", depth.shape).points(depth, np.eye(4))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-7 if encoding == "32FC1" else 3e-7)  # float32


@pytest.mark.parametrize("encoding", ["16UC1", "32FC1"])
def test_a_depth_image_is_registered_as_depth_image_proc_does(encoding: str) -> None:
    depth, expected = depth_image(encoding, "depth"), depth_image(encoding, "registered")
    cameras = pinhole("depth_camera", depth.shape), pinhole("colour_camera", expected.shape)
    found = cameras[0].register(depth, cameras[1], GOLDEN["depth_to_colour"])
    # It cuts the numbers of pixels towards 0, which brings what is left of and above its image into it.
    found, expected = found[1:, 1:], expected[1:, 1:].copy()
    expected[expected > 60] = np.nan  # of 65535 mm, which are unknown here, on purpose
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    # It rounds what it returns to its encoding, and the nearest of two surfaces may be so by less than that.
    np.testing.assert_allclose(found, expected, atol=5.1e-4 if encoding == "16UC1" else 1e-6)


def test_what_is_far_beside_a_distorted_image_is_not_folded_into_it() -> None:
    """The polynomial of this camera leads a ray at 60 degrees back to the image's middle."""
    camera = read_camera_info(info({**CAMERAS[0], "d": [-0.3, 0, 0, 0, 0]}))
    wide = CameraModel("wide", (1, 3), np.array([[0.55, 0, 1], [0, 0.55, 0], [0, 0, 1]]), np.zeros(4))
    beside = np.array([[1.82, 0.0, 1.0]])
    assert 0 < camera.pixels(beside)[0, 0] < 640
    seen = camera.register(np.ones(camera.size, np.float32), wide, np.eye(4))
    assert np.isfinite(seen[0, 1])
    seen = wide.register(np.ones((1, 3), np.float32), camera, np.eye(4))
    assert np.isfinite(seen).sum() == 1


def test_points_follow_the_pose_of_the_camera() -> None:
    depth, transform = depth_image("32FC1", "depth"), GOLDEN["depth_to_colour"]
    camera = pinhole("depth_camera", depth.shape)
    own = camera.points(depth, np.eye(4)).reshape(-1, 3).astype(float)
    moved = camera.points(depth, transform).reshape(-1, 3)
    np.testing.assert_allclose(moved, own @ transform[:3, :3].T + transform[:3, 3], atol=2e-6)


def test_what_the_distortion_does_not_describe_is_unknown() -> None:
    """With this polynomial, no ray leads to the corners of the image."""
    facts = {**CAMERAS[0], "d": [-0.6, 0.0, 0.0, 0.0, 0.0], "k": [300, 0, 320, 0, 300, 240, 0, 0, 1]}
    rays = read_camera_info(info(facts)).rays
    unknown = np.isnan(rays[..., 0])
    assert [bool(unknown[at]) for at in ((0, 0), (-1, -1), (240, 320))] == [True, True, False]
    known = rays[~unknown]
    seen = cv2.projectPoints(known[:, None], np.zeros(3), np.zeros(3), np.reshape(facts["k"], (3, 3)) * 1.0,
                             np.array(facts["d"]))[0].reshape(-1, 2)  # fmt: skip
    np.testing.assert_allclose(seen, np.argwhere(~unknown)[:, ::-1], atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"k": [0.0] * 9}, "the camera is not calibrated"),
        ({"k": [float("nan")] * 9}, "the camera is not calibrated"),
        ({"model": "fov"}, r"found distortion 'fov', \[-0\.28"),
        ({"d": [0.1] * 6}, "found distortion 'plumb_bob'"),
        ({"d": [float("nan")] * 5}, "found distortion 'plumb_bob'"),
        ({"width": 2**31, "height": 2**31}, "expected that of an image"),
        ({"height": 0}, "found size 640 x 0"),
        ({"roi": (0, 0, 2**31, 2**31)}, "expected that of an image"),
        ({"k": [500, 3, 320, 0, 500, 240, 0, 0, 1]}, "skewed"),
    ],
)
def test_a_camera_that_is_not_understood_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_camera_info(info(CAMERAS[0], **changed))


def test_the_second_camera_of_a_stereo_pair_is_refused() -> None:
    second = info(CAMERAS[0], p=[519.0, 0, 321.1, -40.0, 0, 522.4, 240.8, 0, 0, 0, 1, 0])
    with pytest.raises(ConfigError, match="second of a stereo pair"):
        read_camera_info(second, rectified=True)
