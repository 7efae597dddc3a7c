"""Time a policy on this machine, from random camera images to its chunk, stage by stage.

vla-ros bench --checkpoint DIR -p policy.unnorm_key:=bridge_orig
vla-ros bench --policy NAME --config robot.yaml

In a clone of the repository, python -m benchmarks.models NAME times random weights beside plain PyTorch.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config, load
from vla_ros.config.show import add_config_arguments, number
from vla_ros.contract.features import complete_spec
from vla_ros.errors import ConfigError
from vla_ros.files import STANDARD_OUTPUT, check_output, save_text
from vla_ros.policies.base import checkpoint_options, create
from vla_ros.types import Observation, RawImage, UInt8Array
from vla_ros.vision.preprocess import LazyImages, Preprocessor, process
from vla_ros_lab.bench.times import Stopwatch, collect, make_messages, percentiles, row, stage_medians

WARM_UP = 2
"""Unmeasured steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--policy", metavar="NAME", help="policy by its entry-point name (policy.name)")
    parser.add_argument("--checkpoint", metavar="DIR", help="checkpoint of the policy (policy.checkpoint)")
    add_measurement_arguments(parser, steps=20)


def add_measurement_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the arguments that all measurements share; ``steps`` is the default number of measured steps."""
    parser.add_argument("--steps", type=number(int, 0 if not steps else 1), default=steps, help="measured steps")
    text = "rest between steps; without it a GPU may reach its power limit, which slows it down"
    parser.add_argument("--rest-ms", type=number(float, 0), default=0.0, metavar="MS", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures; - prints them, and no table")


def run(arguments: argparse.Namespace) -> int:
    check_output("--json", arguments.json)
    Stopwatch.rest = 1e-3 * arguments.rest_ms
    options = checkpoint_options(arguments.policy, arguments.checkpoint, arguments.config)
    result = measure(load(arguments.config, [*options, *arguments.param]), arguments.steps)
    show(result, render_figures(result), arguments.json)
    return 0


def show(result: dict[str, Any], table: str, file: Path | None) -> None:
    """Print the table, or the figures if ``file`` is ``-``; write the figures to any other file."""
    rounded = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 5))
    text = json.dumps(rounded, indent=2)
    if file is not None:
        save_text(file, text + "\n")
    if file != STANDARD_OUTPUT:
        print(table)


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Load the policy and time inferences of one session.

    Images are random, of each camera's ``camera.width`` and ``height``; state vectors are zero.
    """
    policy = create(config)
    loading = Stopwatch()
    policy.load()
    loading.lap("load")
    spec, session = complete_spec(policy.spec, config), policy.start_session()
    cameras = {one.key: (index, one) for index, one in enumerate(config.camera.each)}
    used = {image.key: cameras[image.source] for image in spec.images if image.source in cameras}
    missing = [image.key for image in spec.images if image.required and image.key not in used]
    robot = config.robot
    counts = len(robot.joint_names), len(robot.gripper_joint_names)
    sizes = {one.key: one.size or sum(part.size(*counts) for part in one.components) for one in spec.state}
    if missing or not all(sizes.values()):
        needs = f"needs the images {list(spec.image_keys)} and state of sizes {sizes}"
        found = f"found camera.keys {list(cameras)} and robot.joint_names {list(robot.joint_names)}"
        raise ConfigError(f"policy.name: '{config.policy.name}' {needs}; {found}")
    preprocess = Preprocessor(config.camera, spec)
    messages = {key: (at, make_messages(one.height, one.width, seed=at)) for key, (at, one) in used.items()}
    lengths = {image.key: len(image.delta_timestamps) for image in spec.images}
    lengths |= {vector.key: len(vector.delta_timestamps) for vector in spec.state}
    state = {key: np.zeros((lengths[key], size) if lengths[key] > 1 else size) for key, size in sizes.items()}
    steps_ms = []
    for step in range(steps + WARM_UP):
        received = {key: (index, message(step)) for key, (index, message) in messages.items()}
        watch = Stopwatch()
        raw = {key: preprocess(cdr, index) for key, (index, cdr) in received.items()}
        images = LazyImages({key: partial(_at_times, image, lengths[key]) for key, image in raw.items()})
        single = {key: image for key, image in raw.items() if lengths[key] == 1}
        instruction = config.policy.instruction or "pick up the red cube"
        chunk = policy.infer(session, Observation(images, instruction, step, state, single))
        watch.lap("infer", {"preprocess": images.spent_ms, **chunk.stages_ms})
        steps_ms.append(watch.milliseconds)
    session.close()
    policy.close()
    times = collect(steps_ms[WARM_UP:])
    what = {"policy": config.policy.name, "steps": steps, "load_s": 1e-3 * loading.milliseconds["load"]}
    measured = {"total_ms": percentiles(times["total"]), "stages_ms": stage_medians(times)}
    return {**what, **measured, "chunk": list(chunk.actions.shape)}


def _at_times(image: RawImage, times: int) -> UInt8Array:
    """Return the image, or [T, H, W, 3]; only the newest is processed, since the node keeps the others."""
    now = process(image)
    return now if times == 1 else np.stack([now] * times)


def render_figures(result: dict[str, Any]) -> str:
    """Return the table that ``vla-ros bench --policy`` prints."""
    horizon, dimension = result["chunk"]
    lines = [f"policy '{result['policy']}': {result['steps']} steps, {horizon} action(s) of {dimension} numbers"]
    lines += [row(name, value) for name, value in result["stages_ms"].items()]
    lines += [row(f"total {name}", value) for name, value in result["total_ms"].items()]
    return "\n".join([*lines, f"milliseconds; load {result['load_s']:.1f} s"])
