"""A few real demonstrations and a network small enough to train in a test."""

import contextlib
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 (loaded after Mesa's renderer, which brings another LLVM, it crashes the process)

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from tools.train import data
from tools.train.recipe import DataRecipe, FitRecipe, NetworkRecipe

DATA = DataRecipe(episodes=3, shard_episodes=2, max_steps=7, tasks=("pick", "push_left"))
SMALL = NetworkRecipe(
    vision_width=32, vision_blocks=1, vision_heads=2, llm_width=48, llm_layers=2, llm_heads=3, llm_hidden=64
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recipe() -> DataRecipe:
    return DATA


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demonstrations")
    data.generate(folder, DATA, processes=1)
    return folder


@pytest.fixture(scope="session")
def small() -> NetworkRecipe:
    return SMALL


@pytest.fixture(scope="session")
def fit() -> FitRecipe:
    return FitRecipe(steps=4, batch=2, warmup=2, learning_rate=3e-3, accumulate=2)
