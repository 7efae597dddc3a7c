"""``vla-ros bench --model pi0|pi05``: camera messages to an un-normalised chunk, with random weights."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from vla_ros.bench import plain_pi
from vla_ros.bench.baselines import NO_GRAPHS
from vla_ros.bench.inputs import make_messages
from vla_ros.bench.machine import Machine, measure_machine, memory_gb
from vla_ros.bench.report import IN_AND_OUT
from vla_ros.bench.times import Times, between, collect, median_of, percentiles, stage_medians
from vla_ros.engine.flow_engine import Continuation, FlowEngine, FlowRequest
from vla_ros.policies.openvla.choices import choose_device
from vla_ros.policies.pi.architecture import GEMMA_2B, GEMMA_300M, PUBLISHED, SO400M, PiArchitecture
from vla_ros.policies.pi.inference import make_engine
from vla_ros.policies.pi.loading import build_empty, parameter_dtype
from vla_ros.policies.pi.network import PiNetwork
from vla_ros.policies.pi.normalization import make_normalization
from vla_ros.policies.pi.processing import Processing
from vla_ros.policies.pi.prompt import PromptForm
from vla_ros.types import RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import image_stamp
from vla_ros.vision.processors import ResizeWithPad

MODELS = tuple(PUBLISHED)
BATCHES = (2, 4, 8)
ACTION_SIZE = 8
DEFAULT_FRAME = (480, 640)
TINY: dict[str, Any] = {
    "vision": replace(SO400M, width=64, blocks=2, used_blocks=2, heads=4, mlp_width=128),
    "prefix": replace(GEMMA_2B, width=128, depth=2, mlp_width=256, head_dim=32),
    "expert": replace(GEMMA_300M, width=64, depth=2, mlp_width=128, head_dim=32),
    "vocabulary": 1000,
}
"""Sizes on a CPU, where the published ones take minutes: it only shows that everything works."""
MOST_BASELINE = 50


def random_network(
    architecture: PiArchitecture, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PiNetwork:
    """Random weights that keep activations near 1."""
    network = build_empty(architecture)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(network.named_parameters()):
        value = torch.empty(parameter.shape, device=device, dtype=parameter_dtype(name, dtype))
        scale = 0.02 if value.ndim < 2 else prod(value.shape[1:]) ** -0.5
        value.normal_(0.0, scale, generator=generator)
        if name.startswith("vision") and "norm" in name and name.endswith("weight"):
            value += 1.0
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    return network


def make_processing(architecture: PiArchitecture, images: int) -> Processing:
    """A robot with quantile statistics."""
    statistics = {"q01": [-1.0] * ACTION_SIZE, "q99": [1.0] * ACTION_SIZE}
    normalization = make_normalization("quantile", statistics, "bench")
    keys = tuple(f"image_{number}" for number in range(images))
    form = PromptForm(length=200)
    return Processing(keys, (), True, form, ACTION_SIZE, ACTION_SIZE, normalization, normalization)


@dataclass(frozen=True)
class Measurement:
    """Camera messages to a chunk, as the node does it.

    Attributes:
        engine: What executes it.
        processing: What ends it.
        message: Index to ``sensor_msgs/Image``.
        cameras: Messages of one observation.
        tokens: Int64 [L], the prompt.
        size: Of the network's images.
    """

    engine: FlowEngine
    processing: Processing
    message: Callable[[int], bytes]
    cameras: int
    tokens: Any
    size: tuple[int, int]

    def request(self, index: int, messages: Sequence[bytes], continuation: Continuation | None) -> FlowRequest:
        """The engine's request for one observation."""
        frames = []
        for message in messages:
            image_stamp(message)
            frames.append(RawImage(decode_image(message).image, processor=ResizeWithPad(self.size)))
        return FlowRequest(frames, self.tokens, np.zeros(self.engine.model.action_dim), index, continuation)

    def messages(self, index: int) -> list[bytes]:
        """The camera messages of one observation."""
        return [self.message(index * self.cameras + camera) for camera in range(self.cameras)]

    def step(self, index: int, batch: int, continuation: Continuation | None) -> dict[str, float]:
        """One observation of each robot to its chunk; milliseconds by stage with ``total``."""
        robots = [self.messages(index * batch + robot) for robot in range(batch)]
        began = time.perf_counter()
        requests = [self.request(index, messages, continuation) for messages in robots]
        received = time.perf_counter()
        answers = self.engine.answer(requests)
        answered = time.perf_counter()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            self.processing.robot_actions(answer.actions, np.zeros(ACTION_SIZE))
        ended = time.perf_counter()
        stages = getattr(answers[0], "stages_ms", {})
        stages = {"receive": 1e3 * (received - began), **stages, "post": 1e3 * (ended - answered)}
        return {"total": 1e3 * (ended - began), **stages}

    def run(self, steps: int, warmup: int, batch: int = 1, continuation: Continuation | None = None) -> Times:
        """Time ``steps`` observations after ``warmup`` unmeasured ones."""
        taken = [self.step(index, batch, continuation) for index in range(warmup + steps)]
        return collect(taken[warmup:])


def floor_ms(machine: Machine, network: PiNetwork, images: int, tokens: int, steps: int) -> float:
    """A lower bound in milliseconds: the larger of arithmetic and bytes, stage by stage."""
    sizes = network.architecture
    item = network.projector.weight.element_size()
    patches = images * sizes.vision.patches

    def stage(parameters: int, rows: int) -> float:
        return max(2 * parameters * rows / machine.flops_per_s, parameters * item / machine.bytes_per_s)

    def matrices(module: torch.nn.Module) -> int:
        named = module.named_parameters()
        return sum(value.numel() for name, value in named if value.ndim > 1 and "dense" not in name)

    vision = stage(matrices(network.vision) + matrices(network.projector), patches)
    suffix = sizes.horizon + int(sizes.has_state_token)
    flow = stage(matrices(network.expert), suffix)
    return 1e3 * (vision + stage(matrices(network.prefix), patches + tokens) + steps * flow)


def bench(arguments: argparse.Namespace, frame: tuple[int, int] | None) -> dict[str, Any]:
    """Run the measurement described by ``arguments``; ``frame`` is (height, width) of the cameras' images.

    Raises:
        ConfigError: An option does not fit this machine.
    """
    device = choose_device(arguments.device)
    cuda = device.type == "cuda"
    name = arguments.dtype if arguments.dtype != "auto" else ("bfloat16" if cuda else "float32")
    dtype, steps, warmup = getattr(torch, name), arguments.steps or (200 if cuda else 1), 20 if cuda else 0
    height, width = frame or DEFAULT_FRAME
    architecture = replace(PUBLISHED[arguments.model], horizon=arguments.horizon, **({} if cuda else TINY))
    size = (architecture.vision.image_size,) * 2

    machine = measure_machine(device, dtype)
    began = time.perf_counter()
    network = random_network(architecture, device, dtype)
    processing = make_processing(architecture, arguments.images)
    engine = make_engine(network, processing, arguments.flow_steps, quantization=arguments.quantization)
    loaded = time.perf_counter()
    words = np.random.default_rng(0).integers(3, architecture.vocabulary, arguments.prompt_tokens)
    messages = make_messages(height, width)
    measurement = Measurement(engine, processing, messages, arguments.images, words, size)
    engine.warm_up([len(words)], arguments.images)
    measurement.run(1, 0)
    first = time.perf_counter()
    engine.wait()
    times = measurement.run(steps, warmup)
    total = percentiles(times["total"]) or {}
    previous = np.random.default_rng(1).normal(size=(architecture.horizon, architecture.action_dim))
    guided = Continuation(previous, np.linspace(1, 0, architecture.horizon))
    rtc = measurement.run(steps, warmup, continuation=guided)
    rates: dict[str, dict[str, float]] = {}
    for batch in BATCHES if cuda else ():
        measurement.run(1, 2, batch)
        engine.wait()
        rates[str(batch)] = percentiles(measurement.run(max(1, steps // 4), warmup, batch)["total"]) or {}
    memory = memory_gb(device)

    compared = (
        0 if arguments.no_baseline else min(arguments.baseline_steps or (MOST_BASELINE if cuda else 1), steps)
    )
    base = _baselines(measurement, network, arguments.flow_steps, compared, not arguments.no_compiled)
    floor = floor_ms(machine, network, arguments.images, len(words), arguments.flow_steps)
    result: dict[str, Any] = {
        "model": arguments.model,
        "random_weights": True,
        "sizes": "published" if cuda else "tiny",
        "machine": machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "dtype": name,
        "quantization": arguments.quantization,
        "graphs": "CUDA graphs" if cuda else "no graphs (CPU)",
        "images": arguments.images,
        "prompt_tokens": len(words),
        "horizon": architecture.horizon,
        "flow_steps": arguments.flow_steps,
        "frame": [width, height],
        "total_ms": total,
        "stages_ms": stage_medians(times),
        "in_and_out_ms": median_of(times, *IN_AND_OUT),
        "between_ms": between(times),
        "rtc_ms": percentiles(rtc["total"]),
        "batch_ms": rates,
        "actions_per_s": {
            batch: 1e3 * int(batch) * architecture.horizon / each["p50"]
            for batch, each in {"1": total, **rates}.items()
        },
        **base,
        "speedup": None if base["baseline_ms"] is None else base["baseline_ms"] / total["p50"],
        "compiled_speedup": None if base["compiled_ms"] is None else base["compiled_ms"] / total["p50"],
        "floor_ms": floor,
        "share_of_floor": floor / total["p50"],
        "bandwidth_gb_per_s": machine.bytes_per_s / 1e9,
        "tflops": machine.flops_per_s / 1e12,
        "steps": steps,
        "memory_gb": memory,
        "load_s": loaded - began,
        "first_action_s": first - began,
    }
    engine.close()
    return result


def _baselines(
    measurement: Measurement, network: PiNetwork, flow_steps: int, steps: int, compile: bool
) -> dict[str, Any]:
    """Time plain PyTorch over the same weights and images, which come resized, and compare the chunks."""
    found: dict[str, Any] = {
        "baseline_ms": None, "baseline_steps": steps, "baseline_difference": None, "compiled_ms": None,
        "compiled_left_out": "not asked for",
    }  # fmt: skip
    if not steps:
        return found
    horizon, numbers = network.architecture.horizon, network.architecture.action_dim
    draw = np.random.default_rng(2)

    def request(index: int) -> FlowRequest:
        frames = [decode_image(message).image for message in measurement.messages(index)]
        images = [ResizeWithPad(measurement.size)(frame) for frame in frames]
        noise = draw.normal(size=(horizon, numbers)).astype(np.float32)
        return FlowRequest(images, measurement.tokens, np.zeros(numbers), noise)

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

    found["baseline_ms"], found["baseline_difference"] = timed(plain_pi.eager(network, flow_steps))
    if compile and network.device.type != "cuda":
        found["compiled_left_out"] = NO_GRAPHS
    elif compile:
        try:
            answer = plain_pi.compiled(network, flow_steps, request(0))
            found["compiled_ms"], found["compiled_difference"] = timed(answer)
            found["compiled_left_out"] = None
        except Exception as error:  # torch has a type for each; the engine's figures remain valid
            found["compiled_left_out"] = f"torch.compile failed: {type(error).__name__}: {str(error).strip()[:300]}"
    return found


def render(result: dict[str, Any]) -> str:
    """The table that ``vla-ros bench`` prints."""
    width, height = result["frame"]
    rows = [
        *result["stages_ms"].items(), ("between stages", result["between_ms"]),
        ("total p50", result["total_ms"]["p50"]),
        ("total p99", result["total_ms"]["p99"]), ("with RTC p50", result["rtc_ms"]["p50"]),
        *((f"{batch} robots p50", each["p50"]) for batch, each in result["batch_ms"].items()),
        ("lower bound", result["floor_ms"]), ("eager PyTorch", result["baseline_ms"]),
        ("compiled PyTorch", result["compiled_ms"]),
    ]  # fmt: skip
    lines = [
        f"{result['model']} on {result['machine']}, {result['dtype']}, quantisation {result['quantization']}, "
        f"{result['images']} images of {width}x{height}, {result['prompt_tokens']} prompt tokens, "
        f"horizon {result['horizon']}, {result['flow_steps']} flow steps, {result['steps']} steps, "
        f"{result['graphs']}",
        "stage (p50, ms)",
        *(f"{name:<18}{'-' if value is None else format(value, '.3f'):>10}" for name, value in rows),
        "actions per second: " + ", ".join(f"{each}: {rate:.0f}" for each, rate in result["actions_per_s"].items()),
        f"measured: copy {result['bandwidth_gb_per_s']:.0f} GB/s, product {result['tflops']:.2f} TFLOP/s; "
        f"memory {result['memory_gb']:.2f} GB; load {result['load_s']:.1f} s",
    ]
    if result["compiled_left_out"] and result["compiled_left_out"] != "not asked for":
        lines.append(f"compiled PyTorch: {result['compiled_left_out']}")
    return "\n".join(lines)
