"""Runs LeRobot's checkpoints (ACT, SmolVLA, GR00T and more) with LeRobot's own code."""

from vla_ros.config import Config
from vla_ros.policies.base import LazyPolicy, Policy, options_of
from vla_ros.policies.lerobot.options import LeRobotOptions

LEROBOT = LazyPolicy(LeRobotOptions, "vla_ros.policies.lerobot:make", lambda config: "input_features" in config)
"""Target of the entry point ``lerobot``."""


def make(config: Config) -> Policy:
    """Create the policy, in this process or, with ``policy.python``, in a child process.

    With a child process, this environment needs only the remote client, and LeRobot is not imported.
    """
    if options_of(config, LeRobotOptions).python:
        from vla_ros.policies.lerobot.child import LeRobotChild

        return LeRobotChild(config)
    from vla_ros.policies.lerobot.policy import LeRobotPolicy

    return LeRobotPolicy(config)
