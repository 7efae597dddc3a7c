"""Demonstrations of LIBERO as a data set: what training reads of it is what was recorded."""

from pathlib import Path

import numpy as np
import pytest

from tools.libero.dataset import make_dataset
from tools.libero.scene import SIZE
from vla_ros.config import load
from vla_ros.errors import ConfigError
from vla_ros.policies.base import create
from vla_ros_lab.training.reading import open_samples

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "libero"
ON_THE_BOX = "pick up the black bowl on the cookie box and place it on the plate"
BESIDE_IT = "pick up the black bowl next to the cookie box and place it on the plate"


def write_demonstrations(folder: Path, frames: tuple[int, ...] = (3, 4, 2)) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    folder.mkdir()
    arrays = {
        "images": random.integers(0, 256, (9, 2, SIZE, SIZE, 3), np.uint8),
        "states": random.normal(size=(9, 8)).astype(np.float32),
        "actions": random.uniform(-1, 1, (9, 7)).astype(np.float32),
        "lengths": np.array([3, 4, 2], np.int32),
        "frames": np.array(frames, np.int32),
        "instructions": np.array([ON_THE_BOX, BESIDE_IT, ON_THE_BOX]),
        "successes": np.array([True, False, True]),
    }
    np.savez(folder / "000_0000.npz", **arrays)  # type: ignore[arg-type]
    return arrays


def test_what_training_reads_is_what_was_recorded(tmp_path: Path) -> None:
    recorded = write_demonstrations(tmp_path / "demos")
    assert make_dataset([tmp_path / "demos"], tmp_path / "set", 10) == (2, 5)
    config = load([], ["policy.name:=pi", f"policy.checkpoint:={CHECKPOINT}", "preset:=libero"])
    samples = open_samples([tmp_path / "set"], create(config).describe(), config)
    assert [len(one) for one in samples.episodes] == [3, 2]
    for index, row in enumerate([0, 1, 2, 7, 8]):
        sample = samples[index]
        for camera, key in enumerate(("image", "wrist_image")):
            np.testing.assert_array_equal(sample.observation.images[key], recorded["images"][row, camera])
        np.testing.assert_array_equal(sample.observation.state["state"], recorded["states"][row].astype(float))
        np.testing.assert_array_equal(sample.actions[0], recorded["actions"][row].astype(float))
        assert sample.observation.instruction == ON_THE_BOX


def test_episodes_of_an_instruction_are_limited(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "demos")
    assert make_dataset([tmp_path / "demos"], tmp_path / "set", 1) == (1, 3)
    with pytest.raises(ConfigError, match="exists"):
        make_dataset([tmp_path / "demos"], tmp_path / "set", 1)


def test_demonstrations_with_gaps_between_frames_are_refused(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "demos", (3, 3, 2))
    with pytest.raises(ConfigError, match="--every 1"):
        make_dataset([tmp_path / "demos"], tmp_path / "set", 1)
