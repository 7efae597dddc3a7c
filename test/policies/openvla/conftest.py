"""Tiny random checkpoints."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")


from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros.config import Config
from vla_ros.types import Observation
from vla_ros_models.openvla import OpenVLAOptions
from vla_ros_models.openvla.policy import OpenVLAPolicy

DATA = Path(__file__).parents[2] / "data" / "openvla"


@pytest.fixture(scope="session")
def data():
    """Folder with the answers of the published code."""
    return DATA


@pytest.fixture(scope="session")
def small():
    """Sizes with a vocabulary of 768, so that files are small."""
    return tiny_architecture(vocabulary=768, empty_token=500)


@pytest.fixture(scope="session")
def shared_tiny(tmp_path_factory, small):
    """A tiny checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, architecture=small)
    return folder


@pytest.fixture
def tiny(tmp_path, small):
    """A tiny checkpoint of the test's own."""
    folder = tmp_path / "tiny"
    write_tiny(folder, architecture=small)
    return folder


@pytest.fixture
def make_policy():
    """Makes (not loads) a policy for a folder with options."""

    def make(folder, **options):
        options = {"device": "cpu", **options}
        return OpenVLAPolicy(Config(policy=OpenVLAOptions(checkpoint=str(folder), **options)))

    return make


@pytest.fixture
def load_policy(make_policy):
    """Makes and loads a policy for a folder with options."""

    def load(folder, **options):
        policy = make_policy(folder, **options)
        policy.load()
        return policy

    return load


@pytest.fixture
def observe():
    """Makes an observation from an image or a seed."""

    def make(image=0, instruction="pick up the red cube", stamp=7):
        if isinstance(image, int):
            image = np.random.default_rng(image).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        return Observation({"image": image}, instruction, stamp)

    return make
