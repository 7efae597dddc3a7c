"""Tiny checkpoints in both layouts, and the cases that the published code answered."""

import io
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from PIL import Image
from safetensors.torch import load_file, save_file

from test.policies.golden import GoldenCase, answer, read_cases
from vla_ros_models.pi.architecture import EMBEDDINGS
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.inference import load_model, load_network
from vla_ros_models.pi.processing import find_robot

DATA = Path(__file__).parents[2] / "data" / "pi"
MODELS = ("pi0", "pi05")


@dataclass(frozen=True, eq=False)
class Case(GoldenCase):
    """One observation and what the published code made of it."""

    def text(self, name):
        return str(self.values[name])

    @property
    def images(self):
        """Key to uint8 [H, W, 3]; LeRobot's with its prefix."""
        found = {}
        for name, value in self.values.items():
            if name.startswith("image") and value.dtype == np.uint8:
                key = name.removeprefix("image_") if "_" in name else f"observation.images.{name}"
                found[key] = np.asarray(Image.open(io.BytesIO(value.tobytes())))
        return found

    @property
    def tokens(self):
        return self.values["tokens"][self.values["token_mask"]]


def load_cases(name):
    return [Case(values) for values in read_cases(DATA / f"{name}.npz")]


CASES = {name: load_cases(name) for kind in MODELS for name in (kind, f"{kind}_lerobot")}


def write_layout(folder, kind, layout):
    """A checkpoint in one of the layouts; LeRobot's weights are openpi's under its names, in float32."""
    shutil.copytree(DATA / kind / layout, folder)
    shutil.copy(DATA / "architecture.json", folder)
    if layout == "openpi":
        shutil.copy(DATA / "tokenizer.model", folder)
        return folder
    (folder / "tokenizer").mkdir()
    shutil.copy(DATA / "tokenizer.json", folder / "tokenizer")
    weights = load_file(DATA / kind / "openpi" / "model.safetensors")
    weights[EMBEDDINGS[0]] = weights[EMBEDDINGS[1]].clone()
    save_file({f"model.{key}": value.float() for key, value in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """(model, layout) to a checkpoint that no test changes."""
    base = tmp_path_factory.mktemp("pi")
    return {
        (kind, layout): write_layout(base / f"{kind}_{layout}", kind, layout)
        for kind in MODELS
        for layout in ("openpi", "lerobot")
    }


@pytest.fixture(scope="session")
def loaded(folders):
    """Loads (model, layout, robot, data type), each once."""

    @cache
    def load(kind, layout, robot="libero", dtype="float32"):
        chosen = find_robot(robot) if layout == "openpi" else None
        return load_model(read_checkpoint(folders[kind, layout], chosen), dtype=dtype)

    return load


@pytest.fixture(scope="session")
def networks(folders):
    """Loads the parameters of (model, layout, data type), each once."""

    @cache
    def load(kind, layout, dtype="float32"):
        robot = find_robot("libero") if layout == "openpi" else None
        return load_network(read_checkpoint(folders[kind, layout], robot), dtype=dtype)

    return load


class Chunk(NamedTuple):
    """A model's answer."""

    normalized: np.ndarray
    actions: np.ndarray
    tokens: np.ndarray
    state: np.ndarray


def infer(model, images, state, instruction, noise, rtc=None):
    """One chunk, without a policy."""
    request = model.request(images, state, instruction, noise, rtc)
    [chunk] = answer(model, request)
    actions = model.processing.robot_actions(chunk, state)
    return Chunk(chunk, actions, request.tokens, request.make_state()[: model.processing.state_size])


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of the test's own."""

    def make(kind="pi05", layout="openpi"):
        return write_layout(tmp_path / f"{kind}_{layout}", kind, layout)

    return make
