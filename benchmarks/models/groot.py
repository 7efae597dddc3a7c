"""``groot-n1.7``: camera messages to an un-normalised chunk, in the published sizes with random weights."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.models.machine import Stage, floor_ms, memory_gb
from benchmarks.models.report import actions_per_s, footing, heading, rates_row, stage_rows
from benchmarks.models.setup import COMPILED_UNUSED, figures, start
from vla_ros.bench.times import Stopwatch, Times, collect, make_messages, percentiles, row
from vla_ros.engine.flow_engine import Continuation
from vla_ros.engine.ops import Ops
from vla_ros.engine.runner import make_runner
from vla_ros.engine.weights import DecoderWeights
from vla_ros.policies.checkpoint_files import Fields
from vla_ros.policies.groot.architecture import COSMOS_CONFIG, GrootArchitecture, read_architecture, tensor_shapes
from vla_ros.policies.groot.building import build_model
from vla_ros.policies.groot.inference import GrootEngine, LoadedGroot, continue_chunk, make_engine
from vla_ros.policies.groot.loading import EACH, tensor_dtype
from vla_ros.policies.groot.network import GrootModel
from vla_ros.policies.groot.processing import ActionPart, Bounds, GrootResize, Processing
from vla_ros.policies.groot.prompt import PromptEncoder
from vla_ros.policies.tokenizers import Tokenizer
from vla_ros.types import RawImage
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import image_stamp

BATCHES = (2, 4, 8)
NUMBERS = 17
"""Numbers of state and action."""
DEFAULT_FRAME = (480, 640)
RESIZE = GrootResize((256, 256), (256, 256), 256, 230 / 256)
MOST_BASELINE = 50


def published(tiny: bool, horizon: int) -> GrootArchitecture:
    """Return the published sizes, or tiny ones that only show on a CPU that everything works."""
    blocks = {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 48, "output_dim": 1024}
    blocks |= {"norm_type": "ada_norm", "positional_embeddings": None, "interleave_self_attention": True}
    attention: dict[str, Any] = {"num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64}
    config = {
        "diffusion_model_cfg": blocks,
        "vl_self_attention_cfg": attention | {"positional_embeddings": None},
        "action_horizon": horizon,
    }
    found = read_architecture(Fields(config, "published"), Fields(COSMOS_CONFIG, "published"))
    if not tiny:
        return found
    small = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "heads": 4, "kv_heads": 4, "layers": 2}
    vision = replace(found.vision, blocks=replace(found.vision.blocks, **small), out_width=64, deepstack=(0,))
    text = replace(found.text, **small | {"kv_heads": 2}, vocab_size=500)
    assert found.connector is not None
    return replace(
        found, vision=vision, text=text, sections=(4, 2, 2), image_token=400, hidden=32, output=32,
        connector=replace(found.connector, **small), head=replace(found.head, **small),
    )  # fmt: skip


def random_tensors(sizes: GrootArchitecture, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights of one embodiment that keep activations near 1."""
    generator, found = torch.Generator(device).manual_seed(0), {}
    for name, shape in tensor_shapes(sizes).items():
        size = (1, *shape[1:]) if EACH.match(name) else shape
        value = torch.empty(size, device=device, dtype=tensor_dtype(name, dtype))
        inputs = shape[1] if EACH.match(name) else prod(shape[1:])
        value.normal_(0.0, 0.02 if len(shape) == 1 else inputs**-0.5, generator=generator)
        if len(shape) == 1 and name.endswith("weight"):  # of a norm
            value += 1.0
        found[name] = value
    return found


def make_loaded(engine: GrootEngine, images: int, words: int) -> LoadedGroot:
    """Return a robot with bounds of 1, and a prompt of ``words`` random tokens beside those of images."""
    sizes = engine.model.sizes
    bounds = Bounds(np.full(NUMBERS, -1, np.float32), np.full(NUMBERS, 1, np.float32))
    keys = tuple(f"image_{number}" for number in range(images))
    processing = Processing(
        keys, RESIZE, (("state", NUMBERS),), bounds, True, (ActionPart("action", bounds),), NUMBERS, NUMBERS,
        sizes.horizon,
    )  # fmt: skip
    drawn = np.random.default_rng(0).integers(3, sizes.image_token, words).tolist()
    tokens = [*drawn[:3], *[sizes.image_token, drawn[0]] * images, *drawn[3 + images :]]
    template = SimpleNamespace(render=lambda **_: "")
    prompt = PromptEncoder(Tokenizer(lambda _: tokens, 0, {}), template, {}, sizes.image_token, formal=True)
    return LoadedGroot(sizes, engine, processing, prompt)


@dataclass(frozen=True)
class Measurement:
    """Runs camera messages to a chunk, as the node does."""

    loaded: LoadedGroot
    message: Callable[[int], bytes]  # index to ``sensor_msgs/Image``

    def step(self, index: int, batch: int, follow: Continuation | None = None) -> dict[str, float]:
        """Compute a chunk for one observation of each robot; return milliseconds by stage with ``total``."""
        loaded, keys, state = self.loaded, self.loaded.processing.images, np.zeros(NUMBERS)
        robots = [
            [self.message((index * batch + robot) * len(keys) + camera) for camera in range(len(keys))]
            for robot in range(batch)
        ]
        watch = Stopwatch()
        requests = []
        for messages in robots:
            frames = {}
            for key, message in zip(keys, messages, strict=True):
                image_stamp(message)
                frames[key] = RawImage(decode_image(message).image, processor=RESIZE)
            requests.append(loaded.request(frames, state, "", index, follow))
        watch.lap("receive")
        answers = loaded.engine.answer(requests)
        watch.lap("infer", getattr(answers[0], "stages_ms", {}))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            loaded.processing.robot_actions(answer.actions, state)
        watch.lap("post")
        return watch.milliseconds

    def run(self, steps: int, warmup: int, batch: int = 1, follow: Continuation | None = None) -> Times:
        """Time ``steps`` observations after ``warmup`` unmeasured ones."""
        return collect([self.step(index, batch, follow) for index in range(warmup + steps)][warmup:])


def stages(model: GrootModel, images: int, tokens: int) -> list[Stage]:
    """Return the stages of one chunk, for the lower bound; keys of crossing blocks are computed once."""

    def stage(weights: DecoderWeights, rows: int) -> Stage:
        matrices = [matrix for layer in weights.layers for matrix in layer.matrices]
        return sum(one.outputs * one.inputs for one in matrices), sum(one.nbytes for one in matrices), rows

    crosses = [matrix for layer in model.head.layers for matrix in layer.cross or ()]
    once = (sum(one.outputs * one.inputs for one in crosses), sum(one.nbytes for one in crosses), tokens)
    patches = images * RESIZE.size[0] * RESIZE.size[1] // model.sizes.vision.patch_size**2
    connector = [stage(model.connector, tokens)] if model.connector is not None else []
    flow = stage(model.head, model.horizon + 1)
    return [stage(model.vision, patches), stage(model.text, tokens), *connector, once, *[flow] * model.steps]


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and the same passes in eager torch."""
    setup = start(arguments, images=2, horizon=40, flow_steps=4)
    steps, warmup = setup.steps, setup.warmup
    height, width = arguments.frame or DEFAULT_FRAME
    sizes = published(not setup.cuda, arguments.horizon)
    tensors = random_tensors(sizes, setup.device, setup.dtype)
    model = build_model(sizes, tensors, arguments.flow_steps, setup.quantization)
    tensors.clear()
    engine = make_engine(model, RESIZE.size)
    loaded = time.perf_counter()
    robot = make_loaded(engine, arguments.images, arguments.prompt_tokens)
    measurement = Measurement(robot, make_messages(height, width))
    patch, unit = sizes.vision.patch_size, sizes.vision.unit
    grid, units = ((RESIZE.size[0] // side, RESIZE.size[1] // side) for side in (patch, unit))
    length = len(robot.prompt.encode("", [units] * arguments.images).tokens)
    engine.warm_up([length], (grid,) * arguments.images)
    measurement.run(1, 0)
    first = time.perf_counter()
    engine.wait()
    times = measurement.run(steps, warmup)
    previous = np.random.default_rng(1).normal(size=(sizes.horizon // 2, NUMBERS))
    rtc = measurement.run(steps, warmup, follow=continue_chunk(previous, 4, sizes))
    rates: dict[str, dict[str, float]] = {}
    for batch in BATCHES if setup.cuda else ():
        measurement.run(1, 2, batch)
        engine.wait()
        rates[str(batch)] = percentiles(measurement.run(max(1, steps // 4), warmup, batch)["total"]) or {}
    memory, compared = memory_gb(setup.device), setup.baseline_steps(arguments, MOST_BASELINE)
    details: dict[str, Any] = {
        "model": arguments.model,
        "sizes": "published" if setup.cuda else "tiny",
        "kernels": type(engine._ops).__name__,
        "images": arguments.images,
        "prompt_tokens": arguments.prompt_tokens,
        "sequence": length,
        "horizon": sizes.horizon,
        "flow_steps": arguments.flow_steps,
        "frame": [width, height],
        "rtc_ms": percentiles(rtc["total"]),
        "batch_ms": rates,
        "floor_ms": floor_ms(setup.machine, stages(model, arguments.images, length)),
        "memory_gb": memory,
        **_eager(measurement, model, compared),
    }
    engine.close()
    result = figures(setup, times, loaded, first, details)
    return result | {"actions_per_s": actions_per_s(result["total_ms"], rates, sizes.horizon)}


def _eager(measurement: Measurement, model: GrootModel, steps: int) -> dict[str, Any]:
    """Time the same passes in torch, launch by launch, and compare the chunks."""
    found = {"baseline_ms": None, "baseline_steps": steps, "baseline_difference": None, **COMPILED_UNUSED}
    if not steps:
        return found
    plain = GrootEngine(model, RESIZE.size, Ops(), make_runner(model.device, graphs=False))
    eager = Measurement(replace(measurement.loaded, engine=plain), measurement.message)
    total = percentiles(eager.run(steps, 3)["total"]) or {}
    frames = {
        key: RESIZE(decode_image(measurement.message(index)).image)
        for index, key in enumerate(measurement.loaded.processing.images)
    }
    noise = np.random.default_rng(2).normal(size=(model.horizon, model.action_dim))
    request = measurement.loaded.request(frames, np.zeros(NUMBERS), "", noise)
    ours, theirs = (
        np.asarray(getattr(engine.answer([request])[0], "actions", np.nan))
        for engine in (measurement.loaded.engine, plain)
    )
    plain.close()
    return found | {"baseline_ms": total["p50"], "baseline_difference": float(np.abs(ours - theirs).mean())}


def render(result: dict[str, Any]) -> str:
    width, height = result["frame"]
    rows = [
        ("with RTC p50", result["rtc_ms"]["p50"]),
        *((f"{batch} robots p50", each["p50"]) for batch, each in result["batch_ms"].items()),
        ("lower bound", result["floor_ms"]), ("torch without graphs", result["baseline_ms"]),
    ]  # fmt: skip
    words = [f"{result['images']} images of {width}x{height}", f"{result['sequence']} tokens"]
    words += [f"horizon {result['horizon']}", f"{result['flow_steps']} flow steps", result["kernels"]]
    lines = [heading(result, *words), "stage (p50, ms)", *stage_rows(result)]
    return "\n".join(
        [*lines, *(row(name, value) for name, value in rows), rates_row(result["actions_per_s"]), footing(result)]
    )
