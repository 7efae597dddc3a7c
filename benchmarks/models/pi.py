"""``pi0`` and ``pi05``: camera messages to an un-normalised chunk, with random weights."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.models import flow, plain_pi
from benchmarks.models.machine import Stage, cross_stage, decoder_stage, module_stage
from benchmarks.models.setup import Setup, compiled_baseline, start
from vla_ros.vision.decode import decode_image
from vla_ros_models.engine.flow import FlowModel
from vla_ros_models.engine.flow_engine import Continuation, FlowEngine, FlowRequest
from vla_ros_models.normalization import make_normalization
from vla_ros_models.pi.architecture import (
    GEMMA_2B,
    GEMMA_300M,
    PROMPT_TOKENS,
    PUBLISHED,
    SO400M,
    PiArchitecture,
)
from vla_ros_models.pi.inference import make_engine
from vla_ros_models.pi.loading import parameter_dtype
from vla_ros_models.pi.network import LlamaNorm, PiNetwork, build_empty
from vla_ros_models.pi.processing import Processing, PromptForm

MODELS = tuple(PUBLISHED)
render = flow.render
ACTION_SIZE = 8
TINY: dict[str, Any] = {
    "vision": replace(SO400M, width=64, blocks=2, used_blocks=2, heads=4, mlp_width=128),
    "prefix": replace(GEMMA_2B, hidden_size=128, layers=2, intermediate_size=256, head_dim=32),
    "expert": replace(GEMMA_300M, hidden_size=64, layers=2, intermediate_size=128, head_dim=32),
    "vocabulary": 1000,
}
"""Sizes for a CPU, where the published model takes minutes; they only show that everything works."""
N = TypeVar("N", bound=torch.nn.Module)


def random_network(
    architecture: PiArchitecture, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PiNetwork:
    """Build the network with random weights that keep activations near 1."""
    return fill_random(build_empty(architecture), device, dtype, seed)


def fill_random(network: N, device: torch.device, dtype: torch.dtype, seed: int = 0) -> N:
    """Fill a network on ``meta`` with random weights that keep activations near 1."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(network.named_parameters()):
        value = torch.empty(parameter.shape, device=device, dtype=parameter_dtype(name, dtype))
        scale = 0.02 if value.ndim < 2 else prod(value.shape[1:]) ** -0.5
        value.normal_(0.0, scale, generator=generator)
        adds_one = isinstance(network.get_submodule(name.rpartition(".")[0]), (torch.nn.LayerNorm, LlamaNorm))
        if adds_one and name.endswith("weight"):
            value += 1.0
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    return network


def make_processing(images: int) -> Processing:
    """Return the processing of a robot with quantile statistics."""
    statistics = {"q01": [-1.0] * ACTION_SIZE, "q99": [1.0] * ACTION_SIZE}
    normalization = make_normalization("quantile", statistics, "bench")
    keys = tuple(f"image_{number}" for number in range(images))
    form = PromptForm(length=200)
    return Processing(keys, (), True, form, ACTION_SIZE, ACTION_SIZE, normalization, normalization)


def stages_of(network: Any, model: FlowModel, rows: tuple[int, int, int, int]) -> list[Stage]:
    """Return the stages of one chunk, for the lower bound.

    ``rows`` are those of the vision tower, of the projector, of the prefix and of a flow step. Keys and values of
    crossing layers are computed once, for as many rows as the prefix has.
    """
    seen, projected, prefix, flow = rows
    once = [module_stage(network.vision, seen), module_stage(network.projector, projected)]
    once += [decoder_stage(model.prefix, prefix), cross_stage(model.expert, prefix)]
    return [*once, *[decoder_stage(model.expert, flow)] * len(model.times)]


@dataclass(frozen=True)
class Subject:
    """A model with random weights, and what its measurement needs."""

    engine: FlowEngine
    processing: Processing
    tokens: NDArray[np.int64]  # the prompt
    stages: list[Stage]
    plain: Callable[[plain_pi.Wrap], plain_pi.Plain]  # plain PyTorch over the same weights
    prompt: int  # tokens to which plain PyTorch pads the prompt
    drop_last: bool = False  # True if the last token is a placeholder that plain PyTorch has not


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and plain PyTorch over the same weights."""
    setup = start(arguments, images=3, horizon=50, flow_steps=10)
    architecture = replace(PUBLISHED[arguments.model], horizon=arguments.horizon, **({} if setup.cuda else TINY))
    network = random_network(architecture, setup.device, setup.dtype)
    processing = make_processing(arguments.images)
    engine = make_engine(network, processing, arguments.flow_steps, quantization=setup.quantization)
    words = np.random.default_rng(0).integers(3, architecture.vocabulary, arguments.prompt_tokens)
    patches, rows = arguments.images * architecture.vision.patches, architecture.horizon
    rows += int(architecture.has_state_token)
    stages = stages_of(network, engine.model, (patches, patches, patches + len(words), rows))
    found = Subject(
        engine, processing, words, stages, lambda wrap: plain_pi.PlainPi(network, arguments.flow_steps, wrap),
        PROMPT_TOKENS[architecture.model],
    )  # fmt: skip
    return measure(arguments, setup, found)


def measure(arguments: argparse.Namespace, setup: Setup, found: Subject) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and plain PyTorch."""
    model, engine, words = found.engine.model, found.engine, found.tokens
    previous = np.random.default_rng(1).normal(size=(model.horizon, model.action_dim))
    state = np.zeros(model.state_dim)
    subject = flow.Subject(
        engine,
        found.processing.processor(engine._size),
        lambda images, seed, continuation: FlowRequest(images, words, lambda: state, seed, continuation),
        lambda actions: found.processing.robot_actions(actions, np.zeros(ACTION_SIZE)),
        lambda: engine.warm_up([len(words)], arguments.images),
        Continuation(previous, np.linspace(1, 0, model.horizon)),
        found.stages,
        lambda measurement, steps: _baselines(measurement, found, steps, not arguments.no_compiled),
        "eager PyTorch",
        {"prompt_tokens": len(words), "kernels": type(engine._ops).__name__},
    )
    return flow.measure(arguments, setup, subject)


def _baselines(measurement: flow.Measurement, subject: Subject, steps: int, compile: bool) -> dict[str, Any]:
    """Time plain PyTorch over the same weights and resized images, and compare the chunks."""
    model, draw = subject.engine.model, np.random.default_rng(2)
    inputs = plain_pi.Inputs(subject.prompt, subject.drop_last)

    def request(index: int) -> FlowRequest:
        frames = [decode_image(message).image for message in measurement.messages(index)]
        images = subject.processing.prepared_images(
            dict(zip(subject.processing.images, frames, strict=True)), subject.engine._size[0]
        )
        noise = draw.normal(size=(model.horizon, model.action_dim)).astype(np.float32)
        return FlowRequest(images, subject.tokens, lambda: np.zeros(model.state_dim), noise)

    def timed(answer: plain_pi.Answer) -> tuple[float, float]:
        times, differences = [], []
        for index in range(min(3, steps) + steps):
            asked = request(index)
            began = time.perf_counter()
            chunk = answer(asked)
            times.append(1e3 * (time.perf_counter() - began))
            ours = subject.engine.answer([asked])[0]
            differences.append(float(np.abs(chunk - getattr(ours, "actions", np.nan)).mean()))
        return float(np.median(times[-steps:])), max(differences)

    def run_compiled() -> dict[str, Any]:
        median, difference = timed(plain_pi.compiled(subject.plain, inputs, request(0), model.device))
        return {"compiled_ms": median, "compiled_difference": difference}

    median, difference = timed(plain_pi.eager(subject.plain, inputs, model.device))
    found: dict[str, Any] = {"baseline_ms": median, "baseline_difference": difference}
    return found | compiled_baseline(model.device, compile, run_compiled)
