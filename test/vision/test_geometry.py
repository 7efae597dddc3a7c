"""Orientation against numpy's definition, and the crop box."""

from __future__ import annotations

import numpy as np
import pytest

from vla_ros.config.sections import ORIENTATIONS
from vla_ros.errors import ConfigError
from vla_ros.vision.preprocess import TURNS
from vla_ros.vision.resample import center_crop_box

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
