"""A written data set, compared with LeRobot 0.6.1's of the same frames (``data/lerobot_statistics.json``)."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vla_ros.types import FloatArray, UInt8Array

pytest.importorskip("av")
pq = pytest.importorskip("pyarrow.parquet")

import av  # noqa: E402

from vla_ros_lab.export.dataset import DatasetWriter, ExportError, Schema  # noqa: E402

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "lerobot_statistics.json").read_text())["features"]
FRONT = "observation.images.front"
SCHEMA = Schema(
    10,
    "arm",
    {"observation.state": ("a.pos", "b.pos", "grip"), "action": ("a", "b")},
    {FRONT: (64, 96)},
)
LENGTHS = (30, 31, 32)


def images(episode: int, length: int) -> Iterator[UInt8Array]:
    for index in range(length):
        image = np.full((64, 96, 3), index * 5 % 255, np.uint8)
        image[:, :, 0] = episode * 50
        image[10:20, index : index + 10] = 200
        yield image


def vectors() -> list[dict[str, FloatArray]]:
    """The numbers of the recorded data set: normal, seed 0, state and action in turn."""
    random = np.random.default_rng(0)
    episodes = []
    for length in LENGTHS:
        rows = [(random.normal(size=3), random.normal(size=2)) for _ in range(length)]
        state, action = (np.array(column).astype(np.float32).astype(float) for column in zip(*rows, strict=True))
        episodes.append({"observation.state": state, "action": action})
    return episodes


def add(writer: DatasetWriter, episode: int) -> None:
    frames = {FRONT: images(episode, LENGTHS[episode])}
    writer.add(f"{episode:06d}", f"do {episode % 2}", vectors()[episode], frames)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "set"
    writer = DatasetWriter(folder, SCHEMA)
    for episode in range(3):
        add(writer, episode)
    assert writer.finish() == 3
    return folder


def test_statistics_equal_lerobots(written: Path) -> None:
    found = json.loads((written / "meta/stats.json").read_text())
    for key, golden in GOLDEN.items():
        for name, expected in golden.items():
            assert np.allclose(found[key][name], expected, rtol=0, atol=1e-6), (key, name)
    assert set(found) == {*GOLDEN, FRONT}


def test_statistics_of_images_equal_those_of_all_pixels(written: Path) -> None:
    found = json.loads((written / "meta/stats.json").read_text())[FRONT]
    whole = np.concatenate([np.stack(list(images(episode, n))) for episode, n in enumerate(LENGTHS)]) / 255
    assert np.allclose(np.ravel(found["mean"]), whole.mean((0, 1, 2)), atol=1e-12)
    assert np.allclose(np.ravel(found["std"]), whole.std((0, 1, 2)), atol=1e-12)
    assert np.shape(found["q50"]) == (3, 1, 1)
    assert found["count"] == [93]


def test_numbers_are_stored_to_the_bit(written: Path) -> None:
    table = pq.read_table(written / "data/chunk-000/file-000.parquet")
    for key in ("observation.state", "action"):
        expected = np.concatenate([one[key] for one in vectors()]).astype(np.float32)
        assert np.array_equal(np.array(table[key].to_pylist(), np.float32), expected)
    assert table["index"].to_pylist() == list(range(93))
    assert table["episode_index"].to_pylist() == [0] * 30 + [1] * 31 + [2] * 32
    assert table["task_index"].to_pylist() == [0] * 30 + [1] * 31 + [0] * 32


def test_every_image_is_at_its_timestamp(written: Path) -> None:
    rows = pq.read_table(written / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    with av.open(str(written / f"videos/{FRONT}/chunk-000/file-000.mp4")) as container:
        decoded = {frame.time: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}
    assert len(decoded) == 93
    for row in rows:
        begin = row[f"videos/{FRONT}/from_timestamp"]
        for index, image in enumerate(images(row["episode_index"], row["length"])):
            found = decoded[min(decoded, key=lambda time: abs(time - begin - index / 10))]
            assert np.abs(found.astype(int) - image).mean() < 4


def test_an_interrupted_export_is_resumed(tmp_path: Path, written: Path) -> None:
    folder = tmp_path / "set"
    add(DatasetWriter(folder, SCHEMA), 0)
    again = DatasetWriter(folder, SCHEMA)
    assert again.has("000000")
    assert not again.has("000001")
    assert not folder.exists()
    for episode in (1, 2):
        add(again, episode)
    again.finish()
    assert (folder / "meta/stats.json").read_text() == (written / "meta/stats.json").read_text()
    assert not folder.with_name("set.partial").exists()


def test_an_incomplete_episode_is_refused(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "set", SCHEMA)
    with pytest.raises(ExportError, match="29 images of"):
        writer.add("000000", "do", vectors()[0], {FRONT: images(0, 29)})
    with pytest.raises(ExportError, match="an image of 96x32, expected 96x64"):
        writer.add("000000", "do", vectors()[0], {FRONT: (image[:32] for image in images(0, 30))})
    assert not writer.has("000000")
    with pytest.raises(ExportError, match="no episode"):
        writer.finish()


def test_a_data_set_is_not_overwritten(tmp_path: Path, written: Path) -> None:
    with pytest.raises(ExportError, match="exists"):
        DatasetWriter(written, SCHEMA)
    DatasetWriter(tmp_path / "set", Schema(5, "arm", SCHEMA.vectors, SCHEMA.videos))  # nothing was exported yet
    add(DatasetWriter(tmp_path / "set", SCHEMA), 0)
    with pytest.raises(ExportError, match="other options"):
        DatasetWriter(tmp_path / "set", Schema(20, "arm", SCHEMA.vectors, SCHEMA.videos))
