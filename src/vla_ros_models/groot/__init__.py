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


_OLDER = {"gr00t_n1": "N1", "gr00t_n1_5": "N1.5", "gr00t_n1d5": "N1.5", "gr00tn1d6": "N1.6", "gr00t_n1_6": "N1.6"}
"""Older models by ``model_type`` or a name in ``architectures``, in lower case."""

_N1_5 = ("n1.5", "n1_5", "n1d5", "n15", "1.5")
"""LeRobot's names of N1.5 in ``model_version``."""


SAYS_VERSION = ("model_type", "architectures", "model_version", "base_model_path", "tokenizer_assets_repo")
"""Keys of ``config.json`` by which :func:`older_model` tells the version."""


def older_model(config: Mapping[str, Any]) -> str:
    """Return the version of an older GR00T that ``config.json`` describes, such as N1.5; "" for others.

    LeRobot tells them alike (0.6.1, ``groot/configuration_groot.py``).
    """
    names = [config.get("model_type"), *(config.get("architectures") or [])]
    if found := next((_OLDER[str(name).lower()] for name in names if str(name).lower() in _OLDER), ""):
        return found
    backbone, base = config.get("backbone_cfg"), str(config.get("base_model_path")).lower()
    legacy = config.get("type") == "groot" and (
        config.get("tokenizer_assets_repo") is not None
        or str(config.get("model_version")).lower() in _N1_5
        or "gr00t-n1.5" in base
        or "gr00t_n1.5" in base
    )
    return "N1.5" if legacy or (isinstance(backbone, dict) and "eagle_path" in backbone) else ""


def _claims(config: Mapping[str, Any]) -> int:
    """Claim older models, too: this policy says what runs them."""
    known = config.get("type") == "groot" or config.get("model_type") == "Gr00tN1d7"
    return 2 * bool(known or older_model(config))


GROOT = LazyPolicy(GrootOptions, "vla_ros_models.groot.policy:GrootPolicy", _claims)
"""The entry point's target."""
