"""``groot-n1.7``: camera messages to an un-normalised chunk, in the published sizes with random weights."""

import argparse
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.models import flow
from benchmarks.models.machine import Stage, cross_stage, decoder_stage
from benchmarks.models.setup import start
from vla_ros.types import RawImage
from vla_ros.vision.decode import decode_image
from vla_ros_lab.bench.times import percentiles
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.runner import make_runner
from vla_ros_models.groot.architecture import COSMOS_CONFIG, GrootArchitecture, read_architecture
from vla_ros_models.groot.building import build_model, tensor_shapes
from vla_ros_models.groot.inference import GrootEngine, GrootRequest, LoadedGroot, continue_chunk, make_engine
from vla_ros_models.groot.loading import EACH, tensor_dtype
from vla_ros_models.groot.network import GrootModel
from vla_ros_models.groot.processing import ActionPart, Bounds, GrootResize, Processing
from vla_ros_models.groot.prompt import PromptEncoder
from vla_ros_models.tokenizers import Tokenizer

render = flow.render
NUMBERS = 17
"""Numbers of state and action."""
RESIZE = GrootResize((256, 256), (256, 256), 256, 230 / 256)


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


def stages(model: GrootModel, images: int, tokens: int) -> list[Stage]:
    """Return the stages of one chunk, for the lower bound; keys of crossing blocks are computed once."""
    patches = images * RESIZE.size[0] * RESIZE.size[1] // model.sizes.vision.patch_size**2
    connector = [decoder_stage(model.connector, tokens)] if model.connector is not None else []
    once = [decoder_stage(model.vision, patches), decoder_stage(model.text, tokens), *connector]
    return [*once, cross_stage(model.head, tokens), *[decoder_stage(model.head, model.horizon + 1)] * model.steps]


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine, alone, with RTC and in batches, and the same passes in eager torch."""
    setup = start(arguments, images=2, horizon=40, flow_steps=4)
    sizes = published(not setup.cuda, arguments.horizon)
    tensors = random_tensors(sizes, setup.device, setup.dtype)
    model = build_model(sizes, tensors, arguments.flow_steps, setup.quantization)
    tensors.clear()
    engine = make_engine(model, RESIZE.size)
    robot = make_loaded(engine, arguments.images, arguments.prompt_tokens)
    patch, unit = sizes.vision.patch_size, sizes.vision.unit
    grid, units = ((RESIZE.size[0] // side, RESIZE.size[1] // side) for side in (patch, unit))
    length = len(robot.prompt.encode("", [units] * arguments.images).tokens)
    state = np.zeros(NUMBERS)
    previous = np.random.default_rng(1).normal(size=(sizes.horizon // 2, NUMBERS))

    def request(images: list[RawImage], seed: int, follow: Any) -> GrootRequest:
        return robot.request(dict(zip(robot.processing.images, images, strict=True)), state, "", seed, follow)

    subject = flow.Subject(
        engine,
        RESIZE,
        request,
        lambda actions: robot.processing.robot_actions(actions, state),
        lambda: engine.warm_up([length], (grid,) * arguments.images),
        continue_chunk(previous, 4, sizes),
        stages(model, arguments.images, length),
        lambda measurement, steps: _eager(measurement, robot, steps),
        "torch without graphs",
        {"sequence": length, "kernels": type(engine._ops).__name__},
    )
    return flow.measure(arguments, setup, subject)


def _eager(measurement: flow.Measurement, robot: LoadedGroot, steps: int) -> dict[str, Any]:
    """Time the same passes in torch, launch by launch, and compare the chunks."""
    engine, model = measurement.subject.engine, measurement.subject.engine.model
    plain = GrootEngine(model, RESIZE.size, Ops(), make_runner(model.device, graphs=False))
    eager = replace(measurement, subject=replace(measurement.subject, engine=plain))
    total = percentiles(eager.run(steps, 3)["total"]) or {}
    frames = [RESIZE(decode_image(message).image) for message in measurement.messages(0)]
    noise = np.random.default_rng(2).normal(size=(model.horizon, model.action_dim))
    request = robot.request(dict(zip(robot.processing.images, frames, strict=True)), np.zeros(NUMBERS), "", noise)
    ours, theirs = (np.asarray(getattr(each.answer([request])[0], "actions", np.nan)) for each in (engine, plain))
    plain.close()
    return {"baseline_ms": total["p50"], "baseline_difference": float(np.abs(ours - theirs).mean())}
