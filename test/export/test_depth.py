"""Depth images in an exported data set; LeRobot itself reads them where it is installed (``.ci/lerobot``)."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("av")
pytest.importorskip("pyarrow")

import av

from vla_ros_lab.export.dataset import DatasetWriter, ExportError, Schema
from vla_ros_lab.export.statistics import ImageStatistics
from vla_ros_lab.report.video import encode_depth

KEY = "observation.images.depth"
SCHEMA = Schema(10, "arm", {"observation.state": ("a",), "action": ("a",)}, {KEY: (48, 64)}, depths=(KEY,))
STEP = math.log(13.5 / 3.51) / 4095  # LeRobot's codes are linear in log(depth + 3.5 m), from 0.01 to 10 m


def depth(length: int) -> Iterator[NDArray[np.uint16]]:
    """From 0.4 m on, farther in each image, with a hole, and a corner that is out of range."""
    for index in range(length):
        image = (400 + 10 * index + np.arange(48 * 64).reshape(48, 64) // 2).astype(np.uint16)
        image[:8, :8], image[-1, -1] = 0, 12_000
        yield image


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "set"
    writer = DatasetWriter(folder, SCHEMA)
    for length in (5, 7):
        numbers = np.arange(length, dtype=float)[:, None]
        writer.add(f"{length:06d}", "see", {"observation.state": numbers, "action": numbers}, {KEY: depth(length)})
    assert writer.finish() == 2
    return folder


def read(code: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Millimetres of codes, as LeRobot defines them."""
    return 1000 * (np.exp(code * STEP + math.log(3.51)) - 3.5)


def test_codes_are_lossless_and_as_fine_as_those_of_lerobot(written: Path) -> None:
    whole = [image for length in (5, 7) for image in depth(length)]
    [path] = written.glob("videos/*/*/*.mp4")
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "hevc"
        found = [frame.to_ndarray(format="gray12le") for frame in container.decode(video=0)]
    for image, codes in zip(whole, found, strict=True):
        np.testing.assert_array_equal(codes, encode_depth(image))
        known = (image > 10) & (image < 10_000)
        error = np.abs(read(codes) - image)[known]
        assert (error <= 0.51 * STEP * (image[known] + 3500.0)).all()
        assert (codes[image == 0] == 0).all()
        assert codes[-1, -1] == 4095


def test_the_feature_says_what_lerobot_needs_to_read_it(written: Path) -> None:
    feature = json.loads((written / "meta" / "info.json").read_text())["features"][KEY]
    assert feature["shape"] == [48, 64, 1]
    about = {"depth_min": 0.01, "depth_max": 10.0, "shift": 3.5, "use_log": True, "codec": "hevc", "channels": 1}
    assert {f"video.{name}": value for name, value in about.items()}.items() <= feature["info"].items()
    assert (feature["info"]["is_depth_map"], feature["info"]["depth_unit"]) == (True, "mm")
    whole = np.stack([image for length in (5, 7) for image in depth(length)]).astype(float)
    stats = json.loads((written / "meta" / "stats.json").read_text())[KEY]
    assert np.shape(stats["mean"]) == (1, 1, 1)
    assert np.ravel(stats["mean"])[0] == pytest.approx(whole.mean())
    assert np.ravel(stats["std"])[0] == pytest.approx(whole.std())
    assert (np.ravel(stats["min"])[0], np.ravel(stats["max"])[0]) == (0, 12_000)


def test_another_size_is_refused(tmp_path: Path) -> None:
    numbers = np.zeros((1, 1))
    with pytest.raises(ExportError, match="found an image of 32x24, expected 64x48"):
        DatasetWriter(tmp_path / "set", SCHEMA).add(
            "a", "see", {"observation.state": numbers, "action": numbers}, {KEY: [np.ones((24, 32), np.uint16)]}
        )


def test_lerobot_reads_the_depth_back(written: Path) -> None:
    """In its own metres and with its own statistics."""
    pytest.importorskip("lerobot.datasets.depth_utils", reason="needs LeRobot 0.6.1")
    from lerobot.datasets.compute_stats import get_feature_stats
    from lerobot.datasets.depth_utils import quantize_depth
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    every = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    np.testing.assert_array_equal(encode_depth(every), quantize_depth(every, video_backend=None))
    whole = [image for length in (5, 7) for image in depth(length)]
    data = LeRobotDataset("a/set", root=written, depth_output_unit="m")
    assert data.meta.depth_keys == [KEY]
    for image, item in zip(whole, data, strict=True):
        found = item[KEY].numpy()
        assert found.shape == (1, 48, 64)
        inside = np.clip(image, 10, 10_000) / 1000
        assert (np.abs(found[0] - inside) <= 0.51 * STEP * (inside + 3.5)).all()
    counted = ImageStatistics(depth=True)
    for image in depth(5):
        counted.add(image)
    theirs = get_feature_stats(np.stack(list(depth(5)))[:, None].astype(float), axis=(0, 2, 3), keepdims=True)
    for name, value in counted.result().items():
        np.testing.assert_allclose(np.ravel(value), np.ravel(theirs[name]), rtol=1e-4, err_msg=name)
