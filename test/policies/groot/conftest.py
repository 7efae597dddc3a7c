"""Tiny checkpoints in both layouts, and the cases that lerobot 0.6.1 answered."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from vla_ros.errors import VlaRosError
from vla_ros.policies.groot import GrootOptions
from vla_ros.policies.groot.inference import load_model
from vla_ros.policies.groot.loading import read_checkpoint

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
class Case:
    """One observation and what LeRobot made of it."""

    variant: str
    values: dict

    def __getitem__(self, name):
        return self.values[name]

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
    with np.load(DATA / f"{variant}.npz") as file:
        arrays = {key: file[key] for key in file}
    numbers = sorted({key[:2] for key in arrays})
    return [
        Case(variant, {key[3:]: value for key, value in arrays.items() if key[:2] == number}) for number in numbers
    ]


CASES = [
    pytest.param(case, id=f"{name}-{number}") for name in VARIANTS for number, case in enumerate(load_cases(name))
]


@pytest.fixture(scope="session")
def loaded():
    """Loads the model of (folder, options), each once."""
    kept = {}

    def load(folder, **options):
        key = (folder, *sorted(options.items()))
        if key not in kept:
            kept[key] = load_model(read_checkpoint(DATA / folder, GrootOptions(backbone=BACKBONE, **options)))
        return kept[key]

    return load


def infer(model, *requests):
    """Normalised chunks [B, rows, N]."""
    answers = model.engine.answer(requests)
    for answer in answers:
        if isinstance(answer, VlaRosError):
            raise answer
    return [answer.actions[: model.processing.rows] for answer in answers]


def prepared(model, case):
    return {key: model.processing.resize(image) for key, image in case.images.items()}


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of the test's own."""

    def make(name="two"):
        for folder in dict.fromkeys(("two", name)):
            shutil.copytree(DATA / folder, tmp_path / folder)
            shutil.copytree(DATA / "backbone", tmp_path / folder / "backbone")
        return tmp_path / name

    return make
