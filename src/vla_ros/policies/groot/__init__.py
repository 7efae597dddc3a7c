"""Runs GR00T N1.7 checkpoints in NVIDIA's and in LeRobot's layout, without remote code.

``architecture`` has the sizes; ``network`` has the passes; ``building`` makes its weights; ``loading`` and
``embodiment`` read a folder; ``processing`` and ``prompt`` prepare input and output; ``inference`` and ``policy``
combine these parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_ros.config.options import option
from vla_ros.policies.base import LazyPolicy
from vla_ros.policies.options import SamplingOptions


@dataclass(frozen=True)
class GrootOptions(SamplingOptions):
    """Options of GR00T N1.7 (``policy.name: groot``)."""

    embodiment: str = option(
        "",
        "NVIDIA's layout: embodiment tag of the robot, a key of processor_config.json; empty: the only one, or "
        "libero_sim. LeRobot's layout states its own",
    )
    action_transform: str = option(
        "auto",
        "How the gripper is converted: libero maps 0..1 to LIBERO's sign; auto: as the checkpoint states, "
        "else libero for the embodiment libero_sim",
        choices=("auto", "none", "libero"),
    )
    base_model: str = option(
        "",
        "LeRobot's layout: folder in NVIDIA's layout with the sizes of the model (config.json); empty: "
        "base_model_path of the checkpoint",
    )
    backbone: str = option(
        "", "Folder with Cosmos-Reason2-2B's configuration, tokenizer and chat template; empty: the checkpoint's"
    )
    quantization: str = option("none", "Format of the language model's weights", choices=("none", "fp8"))
    rtc_horizon: int = option(
        0, "Number of actions of the previous chunk that the new one continues; 0: all that are left", low=0
    )


def _claims(config: Mapping[str, Any]) -> int:
    return 2 * (config.get("type") == "groot" or config.get("model_type") == "Gr00tN1d7")


GROOT = LazyPolicy(GrootOptions, "vla_ros.policies.groot.policy:GrootPolicy", _claims)
"""The entry point's target."""
