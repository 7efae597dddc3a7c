"""The real node with a policy that does what the instruction says: well, badly, late or not at all.

Run by the tests as a process of its own; takes the arguments of ``vla-ros run``.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vla_ros.cli.main import main as command
from vla_ros.config import load
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.execution.source import PolicySource
from vla_ros.graph.dds.participant import Participant
from vla_ros.node import run
from vla_ros.policies import Policy, Session, no_progress
from vla_ros.policies.base import Progress
from vla_ros.types import ActionChunk, Observation
from vla_ros.vision.processors import ResizeNaive


class ScriptedPolicy(Policy):
    """Moves 5 mm along x for each frame, unless the instruction names a fault."""

    spec = PolicySpec((ImageFeature("image", ResizeNaive()),))

    def load(self, progress: Progress = no_progress) -> None:
        progress(1.0, "scripted")
        time.sleep(float(os.environ.get("SCRIPTED_LOAD_S", "0")))

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        action = np.array([[0.005, 0, 0, 0, 0, 0, 1.0]])
        words = observation.instruction.split()
        if "close" in words:
            action[0, -1] = 0.0
        if "raise" in words:
            raise RuntimeError("the model broke")
        if "exit" in words:
            sys.exit("the policy wants to end the process")
        if "nan" in words:
            action[0, 2] = np.nan
        if "short" in words:
            action = action[:, :5]
        if "slow" in words:
            time.sleep(0.4)
        info = {"outside_bins": 2, "margins": (0.5,)} if "clipped" in words else {}
        return ActionChunk(action, observation.stamp, stages_ms={"infer": 0.0}, info=info)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.param)
    ros_args = ["--ros-args", *arguments.ros_args]
    return run.serve(config, ros_args, stats=arguments.stats, source=PolicySource(ScriptedPolicy()))


SPIN_FAILS = "VLA_ROS_TEST_SPIN_FAILS"
"""Environment variable with a file: once it exists, the thread that spins fails outside of any callback."""


def spin_fails(words: Sequence[str]) -> int:
    wait = Participant.wait

    def fail(participant: Participant, seconds: float) -> None:
        if Path(os.environ[SPIN_FAILS]).exists():
            raise RuntimeError("the wait set is gone")
        wait(participant, seconds)

    Participant.wait = fail  # type: ignore[method-assign]
    return main(words)


def vla_ros_run(words: Sequence[str]) -> int:
    """Do what ``vla-ros run`` does."""
    return command(["run", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
