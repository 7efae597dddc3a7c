"""A tiny random checkpoint, its reference model, and engines over the same weights."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros_models.checkpoint_files import from_files, read_manifest
from vla_ros_models.engine.drafts import DraftState
from vla_ros_models.engine.token_engine import EngineOptions, EngineRequest, TokenEngine
from vla_ros_models.engine.weights import fuse
from vla_ros_models.openvla.architecture import read_architecture
from vla_ros_models.openvla.loading import build_empty
from vla_ros_models.weights import fill


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@dataclass
class Tiny:
    """The reference model, engines over its weights, and their inputs."""

    model: torch.nn.Module
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    @property
    def architecture(self):
        return self.model.architecture

    def see(self, images):
        return self.model.embed_image(self.model.normalize(images))

    def engine(self, kind="none", ops=None, runner=None, **options):
        weights = fuse(self.model.language_model, kind)
        return TokenEngine(
            self.see,
            weights,
            self.architecture.patches,
            EngineOptions(answer=7, image_size=(28, 28), **options),
            ops,
            runner,
        )

    @staticmethod
    def ask(engine, images, prompts, drafts=None):
        """Return the engine's answers; each draft stands for the session's previous tokens."""
        drafts = [
            DraftState() if draft is None else DraftState(tuple(draft)) for draft in drafts or [None] * len(prompts)
        ]
        return engine.answer([EngineRequest(*one) for one in zip(images, prompts, drafts, strict=True)])

    def images(self, batch=1):
        return self.rng.integers(0, 256, (batch, 28, 28, 3), dtype=np.uint8)

    def prompt(self, length):
        """BOS, random words, the closing token."""
        words = self.rng.integers(3, 400, length - 2)
        return np.array([1, *words, self.architecture.empty_token], dtype=np.int64)

    @torch.inference_mode()
    def reference(self, images, prompt):
        """Tokens [7] and margins [7] of the reference path for one image."""
        patches = self.see(torch.from_numpy(images))
        logits, prefix = self.model.prefill(patches, torch.from_numpy(prompt)[None])
        answer = self.model.greedy(logits, prefix, 7)
        return answer.tokens[0].numpy(), answer.margins[0].numpy()


def write(folder, seed=0):
    """Write a checkpoint with images of 28 pixels: 4 patches, so that the decoder does nearly all the work."""
    base = tiny_architecture(vocabulary=768, empty_token=500)
    write_tiny(folder, seed, replace(base, towers=tuple(replace(tower, image_size=28) for tower in base.towers)))
    return folder


def load(folder, seed=0):
    model = build_empty(read_architecture(write(folder, seed)))
    fill(model, from_files(read_manifest(folder)), torch.device("cpu"), torch.float32)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return Tiny(load(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def own_tiny(tmp_path):
    """One that the test may damage."""
    return Tiny(load(tmp_path / "tiny", seed=3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoint"))
