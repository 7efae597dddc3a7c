"""``smolvla``: camera messages to an un-normalised chunk, in the published sizes with random weights."""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.models import pi
from benchmarks.models.pi import ACTION_SIZE, Subject, fill_random, make_processing, stages_of
from benchmarks.models.plain_smolvla import PlainSmolVla
from benchmarks.models.setup import Setup, start
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.pi.processing import PromptForm
from vla_ros_models.smolvla.architecture import SMOLVLM2_CONFIG, SmolVlaArchitecture, read_architecture
from vla_ros_models.smolvla.network import build_empty
from vla_ros_models.smolvla.policy import make_engine
from vla_ros_models.smolvla.processing import SmolVlaProcessing

PROMPT = 48
render = pi.render


def published(tiny: bool = False, horizon: int = 50) -> SmolVlaArchitecture:
    """Return the published sizes, or tiny ones that only show on a CPU that everything works."""
    found = read_architecture(Fields({"chunk_size": horizon}, "published"), Fields(SMOLVLM2_CONFIG, "published"))
    if not tiny:
        return found
    small: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96}
    vision = replace(found.vision, width=32, blocks=2, used_blocks=2, heads=2, mlp_width=64, image_size=128)
    prefix, expert = replace(found.prefix, hidden_size=64, **small), replace(found.expert, hidden_size=48, **small)
    return replace(
        found,
        vision=vision,
        prefix=prefix,
        expert=expert,
        vocabulary=1000,
        stored_image=128,
        reads=(0, 1),
        crossing=(1,),
    )


def subject(arguments: argparse.Namespace, setup: Setup) -> Subject:
    """Return the model with random weights."""
    sizes = published(not setup.cuda, arguments.horizon)
    network = fill_random(build_empty(sizes), setup.device, setup.dtype)
    engine = make_engine(network, arguments.flow_steps, PROMPT + 1)
    known = make_processing(arguments.images)
    processing = SmolVlaProcessing(
        known.images, known.images, False, PromptForm(PROMPT), ACTION_SIZE, ACTION_SIZE, known.state, known.actions
    )
    words = np.random.default_rng(0).integers(3, sizes.vocabulary, arguments.prompt_tokens)
    patches = arguments.images * sizes.vision.patches
    tokens = arguments.images * sizes.image_tokens
    rows = patches, tokens, tokens + len(words) + 1, sizes.horizon
    stages = stages_of(network, engine.model, rows)
    return Subject(
        engine, processing, np.append(words, 0), stages,
        lambda wrap: PlainSmolVla(network, arguments.flow_steps, wrap), PROMPT, drop_last=True,
    )  # fmt: skip


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and plain PyTorch over the same weights."""
    setup = start(arguments, images=2, horizon=50, flow_steps=10)
    return pi.measure(arguments, setup, subject(arguments, setup))
