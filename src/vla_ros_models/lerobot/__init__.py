"""Runs LeRobot's checkpoints (ACT, SmolVLA, GR00T and more) with LeRobot's own code."""

from vla_ros.config import Config
from vla_ros.policies.base import LazyPolicy, Policy, options_of
from vla_ros_models.lerobot.options import LeRobotOptions

LEROBOT = LazyPolicy(LeRobotOptions, "vla_ros_models.lerobot:make", lambda config: "input_features" in config)
"""Target of the entry point ``lerobot``."""


def make(config: Config) -> Policy:
    """Create the policy, or with ``policy.python`` the client of a child process, which needs no LeRobot here."""
    if options_of(config, LeRobotOptions).python:
        from vla_ros_models.lerobot.child import LeRobotChild

        return LeRobotChild(config)
    from vla_ros_models.lerobot.policy import LeRobotPolicy

    return LeRobotPolicy(config)
