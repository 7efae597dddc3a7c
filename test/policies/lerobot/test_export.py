"""Exported bags, read by LeRobot and used for training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs an environment with LeRobot")
pytest.importorskip("av")
pytest.importorskip("rosbags")

import torch
from lerobot.datasets.compute_stats import aggregate_stats, get_feature_stats
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros_lab.export.episodes import ExportOptions, Resampler
from vla_ros_lab.replay.bag import Bag

BAG = Path(__file__).parents[2] / "data" / "bags" / "demo_jpeg"
DEMO = Path(__file__).parents[3] / "config" / "demo.yaml"
IMAGE = "observation.images.image"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "set"
    arguments = ["export", str(BAG), "--config", str(DEMO), "--clock", "frames", "--fps", "10"]
    assert main([*arguments, "--output", str(folder)]) == 0
    return folder


def dataset(folder: Path) -> Any:
    return LeRobotDataset("me/set", root=folder, video_backend="pyav")


def test_every_frame_equals_the_bags(exported: Path) -> None:
    found, index = dataset(exported), 0
    options = ExportOptions(clock="frames", fps=10)
    with Bag(BAG) as bag:
        resampler = Resampler(bag, load([DEMO]), options)
        for episode in resampler.episodes(10):
            images = resampler.recorded.cameras[0].read(episode.frames[0], tuple(found[0][IMAGE].shape[1:]))
            for state, action, image in zip(episode.state, episode.action, images, strict=True):
                row = found[index]
                assert np.array_equal(row["observation.state"].numpy(), state.astype(np.float32))
                assert np.array_equal(row["action"].numpy(), action.astype(np.float32))
                assert row["task"] == episode.task
                error = (row[IMAGE] - torch.from_numpy(image.copy()).movedim(-1, 0) / 255).square().mean()
                assert -10 * np.log10(float(error)) > 30  # dB
                index += 1
    assert index == len(found) == found.meta.total_frames
    assert found.meta.total_episodes == 2


def test_statistics_equal_lerobots(exported: Path) -> None:
    columns = dataset(exported).hf_dataset.with_format("numpy")
    whose = np.array(columns["episode_index"])
    each = []
    for episode in range(2):
        rows = {
            key: np.stack(list(columns[key]))[whose == episode].astype(np.float32)
            for key in ("observation.state", "action")
        }
        each.append({key: get_feature_stats(value, axis=0, keepdims=False) for key, value in rows.items()})
    ours = json.loads((exported / "meta/stats.json").read_text())
    for key, statistics in aggregate_stats(each).items():
        for name, expected in statistics.items():
            found = np.array(ours[key][name])
            values = [episode[key][name] for episode in each]
            bound = np.min(values, axis=0) if name <= "q50" else np.max(values, axis=0)
            if name[0] == "q" and np.array_equal(expected, bound):  # LeRobot's main branch only bounds quantiles
                assert np.all((np.min(values, axis=0) - 1e-6 < found) & (found < np.max(values, axis=0) + 1e-6))
            else:
                assert np.abs(found - expected).max() < 1e-6, (key, name)


def test_lerobot_trains_on_an_export(exported: Path, tmp_path: Path) -> None:
    options = {
        "dataset.repo_id": "me/set",
        "dataset.root": exported,
        "dataset.video_backend": "pyav",
        "policy.type": "act",
        "policy.device": "cpu",
        "policy.push_to_hub": "false",
        "policy.pretrained_backbone_weights": "null",
        "policy.dim_model": 32,
        "policy.n_heads": 2,
        "policy.chunk_size": 4,
        "policy.n_action_steps": 4,
        "batch_size": 2,
        "num_workers": 0,
        "steps": 2,
        "wandb.enable": "false",
        "output_dir": tmp_path / "run",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_train", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    from vla_ros_models.lerobot.checkpoint import read_spec

    spec = read_spec(tmp_path / "run/checkpoints/last/pretrained_model")
    assert ([image.key for image in spec.images], spec.dimension, spec.horizon) == (["image"], 8, 4)
