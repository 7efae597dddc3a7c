"""Checkpoints of LeRobot (ACT, diffusion, SmolVLA, pi0.5, GR00T and more), loaded and run by LeRobot itself."""

from __future__ import annotations

from vla_ros.config import Config
from vla_ros.policies.base import LazyPolicy, Policy, options_of
from vla_ros.policies.lerobot.options import LeRobotOptions

LEROBOT = LazyPolicy(LeRobotOptions, "vla_ros.policies.lerobot:make", lambda config: "input_features" in config)
"""The entry point's target."""


def make(config: Config) -> Policy:
    """Create the policy: in this process, or with ``policy.python`` in a child process.

    A child process needs only the remote client in this environment, so LeRobot is not imported.
    """
    if options_of(config, LeRobotOptions).python:
        from vla_ros.policies.lerobot.child import LeRobotChild

        return LeRobotChild(config)
    from vla_ros.policies.lerobot.policy import LeRobotPolicy

    return LeRobotPolicy(config)
