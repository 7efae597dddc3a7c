"""Times any policy from camera messages to its chunk, through the node's own functions."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np

from vla_ros.bench.inputs import make_messages
from vla_ros.bench.report import row
from vla_ros.bench.times import Stopwatch, collect, percentiles, stage_medians
from vla_ros.config import load
from vla_ros.contract.features import complete
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Progress, create, no_progress
from vla_ros.types import Observation, RawImage, UInt8Array
from vla_ros.vision.lazy_images import LazyImages
from vla_ros.vision.preprocess import Preprocessor, process

WARM_UP = 2
"""Unmeasured steps."""


def bench(arguments: argparse.Namespace, progress: Progress = no_progress) -> dict[str, Any]:
    """Load the policy that ``--policy`` names, and time inferences of one session.

    Images are random, of each camera's ``camera.width`` and ``height``; state vectors are zero.
    """
    config = load(arguments.config, [f"policy.name:={arguments.policy}", *arguments.param])
    steps = arguments.steps or 20
    policy = create(config)
    began = time.perf_counter()
    policy.load(progress)
    loaded = time.perf_counter() - began
    spec, session = complete(policy.spec, config), policy.start_session()
    cameras = {one.key: (index, one) for index, one in enumerate(config.camera.each)}
    used = {image.key: cameras[image.source] for image in spec.images if image.source in cameras}
    missing = [image.key for image in spec.images if image.required and image.key not in used]
    robot = config.robot
    counts = len(robot.joint_names), len(robot.gripper_joint_names)
    sizes = {one.key: one.size or sum(part.size(*counts) for part in one.parts) for one in spec.state}
    if missing or not all(sizes.values()):
        raise ConfigError(
            f"policy.name: '{config.policy.name}' needs the images {list(spec.image_keys)} and state of "
            f"sizes {sizes}; "
            f"found camera.keys {list(cameras)} and robot.joint_names {list(robot.joint_names)}"
        )
    preprocess = Preprocessor(config.camera, spec)
    messages = {
        key: (index, make_messages(camera.height, camera.width, seed=index))
        for key, (index, camera) in used.items()
    }
    moments = {image.key: len(image.moments) for image in spec.images}
    moments |= {vector.key: len(vector.moments) for vector in spec.state}
    state = {key: np.zeros((moments[key], size) if moments[key] > 1 else size) for key, size in sizes.items()}
    steps_ms = []
    for step in range(steps + WARM_UP):
        received = {key: (index, message(step)) for key, (index, message) in messages.items()}
        watch = Stopwatch()
        raw = {key: preprocess(cdr, index) for key, (index, cdr) in received.items()}
        images = LazyImages({key: partial(_at_moments, image, moments[key]) for key, image in raw.items()})
        single = {key: image for key, image in raw.items() if moments[key] == 1}
        instruction = config.policy.instruction or "pick up the red cube"
        chunk = policy.infer(session, Observation(images, instruction, step, state, single))
        watch.lap("infer", {"preprocess": images.spent_ms, **chunk.stages_ms})
        steps_ms.append(watch.milliseconds)
    session.close()
    policy.close()
    times = collect(steps_ms[WARM_UP:])
    return {
        "policy": config.policy.name,
        "steps": steps,
        "load_s": loaded,
        "total_ms": percentiles(times["total"]),
        "stages_ms": stage_medians(times),
        "chunk": list(chunk.actions.shape),
    }


def _at_moments(image: RawImage, moments: int) -> UInt8Array:
    """Return the image, or [T, H, W, 3]; only the newest is processed, since the node keeps the others."""
    now = process(image)
    return now if moments == 1 else np.stack([now] * moments)


def render(result: dict[str, Any]) -> str:
    """Return the table that ``vla-ros bench --policy`` prints."""
    horizon, dimension = result["chunk"]
    lines = [f"policy '{result['policy']}': {result['steps']} steps, {horizon} action(s) of {dimension} numbers"]
    lines += [row(name, value) for name, value in result["stages_ms"].items()]
    lines += [row(f"total {name}", value) for name, value in result["total_ms"].items()]
    return "\n".join([*lines, f"milliseconds; load {result['load_s']:.1f} s"])
