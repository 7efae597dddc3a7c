"""Runs the real node with a policy that always exceeds the limits, and fails on command.

Takes the arguments of ``vla-ros run`` and runs the same code with another policy. The instruction selects what it
does: ``wave`` moves in steps that are often far beyond every limit; ``late 0.5`` takes half a second for each
inference; ``raise``, ``nan``, ``infinite``, ``shape`` and ``empty`` fail in the way that their name says.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from vla_ros.config import Config, load
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.node import run
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, FloatArray, Observation
from vla_ros.vision.processors import ResizeNaive

_WILD = 0.15  # share of steps that no arm should make


class WildPolicy(Policy):
    """A deterministic policy whose action depends on the frame's stamp only.

    Args:
        config: Provides the image keys.
        horizon: Steps per chunk.
        seconds: Duration of each inference.
    """

    def __init__(self, config: Config, horizon: int = 1, seconds: float = 0.0) -> None:
        self._seconds = seconds
        images = tuple(ImageFeature(key, ResizeNaive((64, 64))) for key in config.camera.keys)
        self.spec = PolicySpec(images, horizon=horizon)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        """Does what the instruction says."""
        word, _, amount = observation.instruction.partition(" ")
        if word == "raise":
            raise RuntimeError("the model broke, as it was told to")
        time.sleep(float(amount or 0.5) if word == "late" else self._seconds)
        actions = np.stack([self._action(observation.stamp, step) for step in range(self.spec.horizon)])
        if word == "nan":
            actions[-1, 3] = np.nan
        elif word == "infinite":
            actions[0, 0] = -np.inf
        elif word == "shape":
            actions = actions[:, :5]
        elif word == "empty":
            actions = actions[:0]
        return ActionChunk(actions, observation.stamp)

    def _action(self, stamp: int, step: int) -> FloatArray:
        # The direction is kept for a second, so that the arm comes to the borders of its workspace.
        drift = np.random.default_rng(stamp // 1_000_000_000).normal(size=6) * (0.01, 0.01, 0.01, 0.05, 0.05, 0.05)
        rng = np.random.default_rng([stamp % 2**63, step])
        action = np.append(drift + rng.normal(size=6) * 0.003, rng.random())
        if rng.random() < _WILD:
            action[:6] *= 10.0 ** rng.uniform(0, 6)
        return np.asarray(action, dtype=np.float64)


def main() -> int:
    """Runs the node until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    run.add_arguments(parser)
    parser.add_argument("--horizon", type=int, default=1, help="steps per chunk")
    parser.add_argument("--think", type=float, default=0.0, help="seconds per answer")
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.param)
    policy = WildPolicy(config, arguments.horizon, arguments.think)
    ros_args = ["--ros-args", *arguments.ros_args] if arguments.ros_args else []
    return run.serve(config, ros_args, stats=arguments.stats, policy=policy)


if __name__ == "__main__":
    sys.exit(main())
