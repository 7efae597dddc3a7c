import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_ros.errors import CheckpointError
from vla_ros_models.engine.shapes import IMAGENET_MEAN
from vla_ros_models.openvla.architecture import read_architecture
from vla_ros_models.vision_tower import VisionBackbone

DATA = Path(__file__).parents[2] / "data" / "oft"
VARIANTS = ["libero_discrete", "aloha_film"]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint's two configurations, and a function that changes entries of the second."""
    (tmp_path / "config.json").write_bytes((DATA / "libero_discrete" / "config.json").read_bytes())
    entries = json.loads((DATA / "libero_discrete" / "preprocessor_config.json").read_text())

    def write(**changes):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**entries, **changes}))
        return tmp_path

    write.entries = entries
    return write


@pytest.mark.parametrize("variant", VARIANTS)
def test_pixels_equal_the_published_codes(variant):
    architecture = read_architecture(DATA / variant)
    assert architecture.towers[0].mean == (0.484375, 0.455078125, 0.40625) != IMAGENET_MEAN
    expected = json.loads((DATA / variant / "pixels.json").read_text())
    image = torch.tensor(expected["image"], dtype=torch.uint8)[None]
    found = VisionBackbone(architecture.towers).normalize(image)[0].numpy()
    assert np.array_equal(found, np.array(expected["pixel_values"], np.float32))


def test_without_the_file_the_towers_values_apply(folder):
    path = folder()
    (path / "preprocessor_config.json").unlink()
    assert read_architecture(path).towers[0].mean == IMAGENET_MEAN
    assert read_architecture(folder(tvf_normalize_params=None)).towers[0].mean == IMAGENET_MEAN


def test_means_of_the_file_apply_without_tvf_entries(folder):
    means, stds = [[0.1] * 3, [0.2] * 3], [[0.3] * 3, [0.4] * 3]
    towers = read_architecture(folder(tvf_normalize_params=None, means=means, stds=stds)).towers
    assert [(tower.mean[0], tower.std[0]) for tower in towers] == [(0.1, 0.3), (0.2, 0.4)]
    for changes in ({"interpolations": ["nearest"] * 2}, {"input_sizes": [[3, 256, 256]] * 2}):
        with pytest.raises(CheckpointError, match=next(iter(changes))):
            read_architecture(folder(tvf_resize_params=None, **changes))


def resize(**changes):
    usual = {"antialias": True, "interpolation": 3, "max_size": None, "size": [224, 224]}
    return [usual, {**usual, **changes}]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tvf_gamma": 2.2}, r"found tvf_gamma: 2\.2"),
        ({"tvf_crop_params": [{"output_size": [224, 224], "padding": 4}] * 2}, "found padding: 4"),
        ({"tvf_do_letterbox": True}, r"tvf_do_letterbox: found True, expected False"),
        ({"image_resize_strategy": "letterbox"}, "found 'letterbox', expected 'resize-naive'"),
        ({"tvf_resize_params": resize(interpolation=2)}, r"params\[1\]: interpolation: found 2, expected 3"),
        ({"tvf_resize_params": resize(size=224)}, r"params\[1\]: size: found 224, expected \[224, 224\]"),
        ({"tvf_resize_params": resize(antialias=False)}, r"antialias: found False, expected True"),
        ({"tvf_resize_params": resize(max_size=300)}, r"max_size: found 300, expected None"),
        ({"tvf_resize_params": resize()[:1]}, r"tvf_resize_params: found .*, expected a list of 2 objects"),
        ({"tvf_crop_params": [{"output_size": [200, 200]}] * 2}, r"params\[0\]: output_size: found \[200, 200\]"),
        ({"tvf_normalize_params": [{"mean": [0.5] * 3, "std": [0.5, 0, 1]}] * 2}, "and std above 0"),
        ({"tvf_normalize_params": [{"mean": [0.5] * 4, "std": [0.5] * 4}] * 2}, "expected three"),
        ({"tvf_normalize_params": [{}, {}]}, r"tvf_normalize_params\[0\]: no \['mean', 'std'\]"),
    ],
)
def test_unsupported_entries_are_refused(folder, changes, expected):
    with pytest.raises(CheckpointError, match=expected):
        read_architecture(folder(**changes))


def test_entries_that_the_published_code_ignores_are_ignored(folder):
    same = {"means": [[0.1] * 3] * 2, "interpolations": ["nearest"] * 2, "tvf_letterbox_fill": [124, 116, 104]}
    assert read_architecture(folder(**same)) == read_architecture(folder())
