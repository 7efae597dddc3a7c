"""``pi0`` and ``pi05``: camera messages to an un-normalised chunk, with random weights."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.models import plain_pi
from benchmarks.models.machine import Stage, floor_ms, memory_gb
from benchmarks.models.report import actions_per_s, footing, heading, rates_row, stage_rows
from benchmarks.models.setup import COMPILED_UNUSED, Setup, compiled_baseline, figures, start
from vla_ros.bench.times import Stopwatch, Times, collect, make_messages, percentiles, row
from vla_ros.engine.flow_engine import Continuation, FlowEngine, FlowRequest
from vla_ros.policies.normalization import make_normalization
from vla_ros.policies.pi.architecture import (
    GEMMA_2B,
    GEMMA_300M,
    PROMPT_TOKENS,
    PUBLISHED,
    SO400M,
    PiArchitecture,
)
from vla_ros.policies.pi.inference import make_engine
from vla_ros.policies.pi.loading import parameter_dtype
from vla_ros.policies.pi.network import LlamaNorm, PiNetwork, build_empty
from vla_ros.policies.pi.processing import Processing, PromptForm
from vla_ros.types import ImageProcessor, RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import image_stamp

MODELS = tuple(PUBLISHED)
BATCHES = (2, 4, 8)
ACTION_SIZE = 8
DEFAULT_FRAME = (480, 640)
TINY: dict[str, Any] = {
    "vision": replace(SO400M, width=64, blocks=2, used_blocks=2, heads=4, mlp_width=128),
    "prefix": replace(GEMMA_2B, hidden_size=128, layers=2, intermediate_size=256, head_dim=32),
    "expert": replace(GEMMA_300M, hidden_size=64, layers=2, intermediate_size=128, head_dim=32),
    "vocabulary": 1000,
}
"""Sizes for a CPU, where the published model takes minutes; they only show that everything works."""
MOST_BASELINE = 50
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


@dataclass(frozen=True)
class Measurement:
    """Runs camera messages to a chunk, as the node does."""

    engine: FlowEngine  # what executes it
    processing: Processing  # what ends it
    message: Callable[[int], bytes]  # index to ``sensor_msgs/Image``
    cameras: int  # messages of one observation
    tokens: Any  # int64 [L], the prompt
    processor: ImageProcessor  # of the camera images

    def request(self, index: int, messages: Sequence[bytes], continuation: Continuation | None) -> FlowRequest:
        frames = []
        for message in messages:
            image_stamp(message)
            frames.append(RawImage(decode_image(message).image, processor=self.processor))
        return FlowRequest(frames, self.tokens, np.zeros(self.engine.model.state_dim), index, continuation)

    def messages(self, index: int) -> list[bytes]:
        return [self.message(index * self.cameras + camera) for camera in range(self.cameras)]

    def step(self, index: int, batch: int, continuation: Continuation | None) -> dict[str, float]:
        """Compute a chunk for one observation of each robot; return milliseconds by stage with ``total``."""
        robots = [self.messages(index * batch + robot) for robot in range(batch)]
        watch = Stopwatch()
        requests = [self.request(index, messages, continuation) for messages in robots]
        watch.lap("receive")
        answers = self.engine.answer(requests)
        watch.lap("infer", getattr(answers[0], "stages_ms", {}))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            self.processing.robot_actions(answer.actions, np.zeros(ACTION_SIZE))
        watch.lap("post")
        return watch.milliseconds

    def run(self, steps: int, warmup: int, batch: int = 1, continuation: Continuation | None = None) -> Times:
        """Time ``steps`` observations after ``warmup`` unmeasured ones."""
        taken = [self.step(index, batch, continuation) for index in range(warmup + steps)]
        return collect(taken[warmup:])


def stages_of(network: Any, rows: tuple[int, int, int, int], steps: int) -> list[Stage]:
    """Return the stages of one chunk, for the lower bound.

    ``rows`` are those of the vision tower, of the projector, of the prefix and of a flow step. Keys and values of
    crossing layers are computed once, for as many rows as the prefix has.
    """
    item = network.projector.weight.element_size()

    def stage(rows: int, *modules: torch.nn.Module, crossing: bool = False) -> Stage:
        named = [each for module in modules for each in module.named_parameters()]
        count = sum(
            value.numel()
            for name, value in named
            if value.ndim > 1 and "dense" not in name and crossing == name.endswith((".k.weight", ".v.weight"))
        )
        return count, count * item, rows

    seen, projected, prefix, flow = rows
    once = [stage(seen, network.vision), stage(projected, network.projector), stage(prefix, network.prefix)]
    return [*once, stage(prefix, network.expert, crossing=True), *[stage(flow, network.expert)] * steps]


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
    stages = stages_of(network, (patches, patches, patches + len(words), rows), arguments.flow_steps)
    found = Subject(
        engine, processing, words, stages, lambda wrap: plain_pi.PlainPi(network, arguments.flow_steps, wrap),
        PROMPT_TOKENS[architecture.model],
    )  # fmt: skip
    return measure(arguments, setup, found)


def measure(arguments: argparse.Namespace, setup: Setup, subject: Subject) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and plain PyTorch."""
    loaded, engine, words = time.perf_counter(), subject.engine, subject.tokens
    steps, warmup, model = setup.steps, setup.warmup, engine.model
    height, width = arguments.frame or DEFAULT_FRAME
    processor = subject.processing.processor(engine._size)
    measurement = Measurement(
        engine, subject.processing, make_messages(height, width), arguments.images, words, processor
    )
    engine.warm_up([len(words)], arguments.images)
    measurement.run(1, 0)
    first = time.perf_counter()
    engine.wait()
    times = measurement.run(steps, warmup)
    previous = np.random.default_rng(1).normal(size=(model.horizon, model.action_dim))
    guided = Continuation(previous, np.linspace(1, 0, model.horizon))
    rtc = measurement.run(steps, warmup, continuation=guided)
    rates: dict[str, dict[str, float]] = {}
    for batch in BATCHES if setup.cuda else ():
        measurement.run(1, 2, batch)
        engine.wait()
        rates[str(batch)] = percentiles(measurement.run(max(1, steps // 4), warmup, batch)["total"]) or {}
    memory = memory_gb(setup.device)

    compared = setup.baseline_steps(arguments, MOST_BASELINE)
    base = _baselines(measurement, subject, compared, not arguments.no_compiled)
    details: dict[str, Any] = {
        "model": arguments.model,
        "sizes": "published" if setup.cuda else "tiny",
        "images": arguments.images,
        "prompt_tokens": len(words),
        "horizon": model.horizon,
        "flow_steps": arguments.flow_steps,
        "frame": [width, height],
        "rtc_ms": percentiles(rtc["total"]),
        "batch_ms": rates,
        "floor_ms": floor_ms(setup.machine, subject.stages),
        "memory_gb": memory,
        **base,
    }
    engine.close()
    result = figures(setup, times, loaded, first, details)
    return result | {"actions_per_s": actions_per_s(result["total_ms"], rates, model.horizon)}


def _baselines(measurement: Measurement, subject: Subject, steps: int, compile: bool) -> dict[str, Any]:
    """Time plain PyTorch over the same weights and resized images, and compare the chunks."""
    found = {"baseline_ms": None, "baseline_steps": steps, "baseline_difference": None, **COMPILED_UNUSED}
    if not steps:
        return found
    model, draw = subject.engine.model, np.random.default_rng(2)
    inputs = plain_pi.Inputs(subject.prompt, subject.drop_last)

    def request(index: int) -> FlowRequest:
        frames = [decode_image(message).image for message in measurement.messages(index)]
        images = subject.processing.prepared_images(
            dict(zip(subject.processing.images, frames, strict=True)), subject.engine._size[0]
        )
        noise = draw.normal(size=(model.horizon, model.action_dim)).astype(np.float32)
        return FlowRequest(images, measurement.tokens, np.zeros(model.state_dim), noise)

    def timed(answer: plain_pi.Answer) -> tuple[float, float]:
        times, differences = [], []
        for index in range(min(3, steps) + steps):
            asked = request(index)
            began = time.perf_counter()
            chunk = answer(asked)
            times.append(1e3 * (time.perf_counter() - began))
            ours = measurement.engine.answer([asked])[0]
            differences.append(float(np.abs(chunk - getattr(ours, "actions", np.nan)).mean()))
        return float(np.median(times[-steps:])), max(differences)

    def run_compiled() -> dict[str, Any]:
        median, difference = timed(plain_pi.compiled(subject.plain, inputs, request(0), model.device))
        return {"compiled_ms": median, "compiled_difference": difference}

    found["baseline_ms"], found["baseline_difference"] = timed(plain_pi.eager(subject.plain, inputs, model.device))
    return found | compiled_baseline(model.device, compile, run_compiled)


def render(result: dict[str, Any]) -> str:
    width, height = result["frame"]
    rows = [
        ("with RTC p50", result["rtc_ms"]["p50"]),
        *((f"{batch} robots p50", each["p50"]) for batch, each in result["batch_ms"].items()),
        ("lower bound", result["floor_ms"]), ("eager PyTorch", result["baseline_ms"]),
        ("compiled PyTorch", result["compiled_ms"]),
    ]  # fmt: skip
    words = [f"{result['images']} images of {width}x{height}", f"{result['prompt_tokens']} prompt tokens"]
    words += [f"horizon {result['horizon']}", f"{result['flow_steps']} flow steps"]
    lines = [
        heading(result, *words),
        "stage (p50, ms)",
        *stage_rows(result),
        *(row(name, value) for name, value in rows),
        rates_row(result["actions_per_s"]),
        footing(result),
    ]
    if result["compiled_left_out"] and result["compiled_left_out"] != "not asked for":
        lines.append(f"compiled PyTorch: {result['compiled_left_out']}")
    return "\n".join(lines)
