"""Tiny checkpoints, and the cases that lerobot 0.6.1 answered."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from test.policies.golden import GoldenCase, answer, read_cases
from vla_ros_models.smolvla import SmolVlaOptions
from vla_ros_models.smolvla.loading import read_checkpoint
from vla_ros_models.smolvla.policy import load_model

SHIPPED = Path(__file__).parents[2] / "data" / "smolvla"
OTHER = Path(os.environ.get("VLA_ROS_GOLDEN", "/nonexistent")) / "smolvla"
DATA = OTHER if OTHER.is_dir() else SHIPPED
CAMERA = "observation.images."


@dataclass(frozen=True, eq=False)
class Case(GoldenCase):
    """One observation and what LeRobot made of it."""

    folder: str = ""

    @property
    def images(self):
        found = {name: value for name, value in self.values.items() if name.startswith("image_")}
        found.pop("image_mask", None)
        return {CAMERA + name.removeprefix("image_"): value for name, value in found.items()}

    @property
    def tokens(self):
        return self["tokens"][self["token_mask"] != 0]


def load_cases(name):
    return [Case(values, name.removesuffix("_rtc")) for values in read_cases(DATA / f"{name}.npz")]


CASES = {path.stem: load_cases(path.stem) for path in sorted(DATA.glob("*.npz"))}
EACH = [
    pytest.param(case, id=f"{name}-{number}") for name, cases in CASES.items() for number, case in enumerate(cases)
]


def options(folder):
    """Options of a checkpoint; the shipped ones share the base model's folder."""
    return SmolVlaOptions(vlm="" if (folder / "vlm").is_dir() else str(SHIPPED / "vlm"))


def load_folder(folder, *arguments, **named):
    return load_model(read_checkpoint(folder, options(folder)), *arguments, **named)


@pytest.fixture(scope="session")
def loaded():
    """Loads the model of a folder, once."""
    return cache(lambda folder: load_folder(DATA / folder))


def request(model, case):
    return model.request(case.images, case["state"], str(case["prompt"]), case["noise"], case.rtc)


def infer(model, *requests):
    """Normalised chunks [H, D] as LeRobot returns them."""
    return [model.processing.shown_actions(actions) for actions in answer(model, *requests)]


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of the test's own."""
    shutil.copytree(SHIPPED / "default", tmp_path / "default")
    shutil.copytree(SHIPPED / "vlm", tmp_path / "default" / "vlm")
    return tmp_path / "default"
