"""Checkpoints of LeRobot (ACT, diffusion, SmolVLA, pi0.5, GR00T and more), loaded and run by LeRobot itself."""

from __future__ import annotations

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.lerobot.options import LeRobotOptions

LEROBOT = LazyPolicy(LeRobotOptions, "vla_ros.policies.lerobot.policy:LeRobotPolicy")
"""What the entry point names."""
