"""Runs SmolVLA checkpoints of LeRobot, without remote code.

SmolVLA has pi0's design: the network and the layout of its files extend those of :mod:`vla_ros_models.pi`.
``architecture`` has the sizes; ``network`` has the parameters; ``loading`` reads a folder; ``processing`` prepares
input and output; ``policy`` combines these parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_ros.config.options import option
from vla_ros.policies.base import LazyPolicy
from vla_ros_models.flow_options import FlowOptions


@dataclass(frozen=True)
class SmolVlaOptions(FlowOptions):
    """Options of SmolVLA (``policy.name: smolvla``)."""

    vlm: str = option(
        "",
        "Folder with SmolVLM2's config.json, tokenizer.json and tokenizer_config.json; empty: vlm_model_name in "
        "the checkpoint, vlm/, or the checkpoint itself",
    )


def _claims(config: Mapping[str, Any]) -> int:
    return 2 * (config.get("type") == "smolvla")


SMOLVLA = LazyPolicy(SmolVlaOptions, "vla_ros_models.smolvla.policy:SmolVlaPolicy", _claims)
"""The entry point's target."""
