"""Runs the pi0 and pi0.5 checkpoints of openpi and LeRobot, without remote code.

``architecture`` has the sizes; ``network`` has the parameters, with which :mod:`vla_ros.engine.flow` computes;
``loading`` and ``lerobot`` read a folder; ``processing`` prepares input and output; ``inference`` and ``policy``
combine these parts.
"""

from collections.abc import Mapping
from typing import Any

from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.pi.options import PiOptions


def _claims(config: Mapping[str, Any]) -> int:
    openpi = "action_horizon" in config and "model_type" not in config
    return 2 * (openpi or config.get("type") in ("pi0", "pi05"))


PI = LazyPolicy(PiOptions, "vla_ros.policies.pi.policy:PiPolicy", _claims)
"""The entry point's target."""
