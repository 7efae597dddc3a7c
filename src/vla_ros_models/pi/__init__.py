"""Runs the pi0 and pi0.5 checkpoints of openpi and LeRobot, without remote code.

``architecture`` has the sizes; ``network`` has the parameters, with which :mod:`vla_ros_models.engine.flow`
computes; ``checkpoint`` reads a folder and ``loading`` its weights; ``processing`` prepares input and output;
``inference`` and ``policy`` combine these parts. Network and layout serve SmolVLA, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_ros.config.options import option
from vla_ros.policies.base import LazyPolicy
from vla_ros_models.flow_options import FlowOptions


@dataclass(frozen=True)
class PiOptions(FlowOptions):
    """Options that only pi0 and pi0.5 have."""

    robot: str = option(
        "",
        "openpi's layout: the robot that the checkpoint was trained for, which no file states: libero, droid, "
        "droid_joint_position, aloha or aloha_sim; empty takes the preset's name",
    )
    asset: str = option("", "openpi's layout: folder below assets/ with the statistics; empty: the robot's own")
    tokenizer: str = option(
        "", "PaliGemma's tokenizer.json or SentencePiece model, or its folder; empty: the one in the checkpoint"
    )
    prompt_state: str = option(
        "auto",
        "pi0.5: whether the state is in the prompt; padded is for checkpoints trained with LeRobot before 0.5",
        choices=("auto", "none", "as_is", "padded"),
    )
    resize: str = option(
        "auto",
        "How images are resized: like openpi (antialias), like LeRobot (linear), or by the "
        "checkpoint's layout (auto)",
        choices=("auto", "antialias", "linear"),
    )
    quantization: str = option("none", "Format of prefix weights; fp8 needs bfloat16", choices=("none", "fp8"))


def _claims(config: Mapping[str, Any]) -> int:
    openpi = "action_horizon" in config and "model_type" not in config
    return 2 * (openpi or str(config.get("type")) in ("pi0", "pi05"))


PI = LazyPolicy(PiOptions, "vla_ros_models.pi.policy:PiPolicy", _claims)
"""The entry point's target."""
