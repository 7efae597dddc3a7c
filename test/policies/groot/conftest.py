"""Tiny checkpoints in both layouts, and the cases that lerobot 0.6.1 answered."""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from test.policies.golden import GoldenCase, answer, read_cases
from vla_ros.types import RawImage
from vla_ros_models.groot import GrootOptions
from vla_ros_models.groot.inference import continue_chunk, load_model
from vla_ros_models.groot.loading import read_checkpoint

DATA = Path(__file__).parents[2] / "data" / "groot"
BACKBONE = str(DATA / "backbone")

VARIANTS = {
    "two_libero": ("two", {}),
    "two_oxe": ("two", {"embodiment": "oxe_droid_relative_eef_relative_joint"}),
    "plain": ("plain", {}),
    "joints": ("joints", {}),
    "lerobot_relative": ("lerobot_relative", {}),
    "lerobot_absolute": ("lerobot_absolute", {}),
    "two_libero_rtc": ("two", {}),
}
"""Name of the cases to folder and options."""


@dataclass(frozen=True, eq=False)
class Case(GoldenCase):
    """One observation and what LeRobot made of it."""

    variant: str = ""

    @property
    def options(self):
        transform = str(self["action_decode_transform"])
        chosen = transform if transform == "libero" else "none"
        return {**VARIANTS[self.variant][1], "action_transform": chosen}

    @property
    def images(self):
        found = {name: value for name, value in self.values.items() if name.startswith("image_")}
        return {name.removeprefix("image_"): value for name, value in found.items()}

    def noise(self, horizon):
        generator = torch.Generator().manual_seed(int(self["noise_seed"]))
        return torch.randn(1, horizon, 132, generator=generator)[0].numpy()

    @property
    def valid(self):
        return self["token_mask"] == 1


def load_cases(variant):
    return [Case(values, variant) for values in read_cases(DATA / f"{variant}.npz")]


CASES = [
    pytest.param(case, id=f"{name}-{number}") for name in VARIANTS for number, case in enumerate(load_cases(name))
]


@pytest.fixture(scope="session")
def loaded():
    """Loads the model of (folder, options), each once."""

    @cache
    def load(folder, **options):
        return load_model(read_checkpoint(DATA / folder, GrootOptions(backbone=BACKBONE, **options)))

    return load


def infer(model, *requests):
    """Normalised chunks [B, rows, N]."""
    return [actions[: model.processing.rows] for actions in answer(model, *requests)]


def request(model, case, raw=False, noise=None):
    """The case's request; ``raw`` lets the device process the images."""
    resize, sizes, follow = model.processing.resize, model.architecture, None
    images = {
        key: RawImage(image, processor=resize) if raw else resize(image) for key, image in case.images.items()
    }
    if "previous" in case.values:
        follow = continue_chunk(case["previous"], int(case["inference_delay"]), sizes)
    noise = case.noise(sizes.horizon) if noise is None else noise
    return model.request(images, case["state"], str(case["prompt"]), noise, follow)


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of the test's own."""

    def make(name="two"):
        for folder in dict.fromkeys(("two", name)):
            shutil.copytree(DATA / folder, tmp_path / folder)
            shutil.copytree(DATA / "backbone", tmp_path / folder / "backbone")
        return tmp_path / name

    return make
