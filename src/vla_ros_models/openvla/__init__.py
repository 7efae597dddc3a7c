"""Runs OpenVLA's published checkpoints on current libraries, without remote code.

Importing this package does not import torch.
"""

from dataclasses import fields, replace
from pathlib import Path

from vla_ros.config import Config
from vla_ros.config.checkpoints import base_folder
from vla_ros.policies.base import LazyPolicy, Policy
from vla_ros_models.openvla.options import CheckpointOptions, OpenVLAOptions


class _OpenVLA(LazyPolicy):
    """Creates OpenVLA's policy, or OpenVLA-OFT's if the checkpoint has an action head."""

    def __call__(self, config: Config) -> Policy:
        options = config.policy
        if isinstance(options, OpenVLAOptions) and _is_oft(options):
            from vla_ros_models.oft import OFT, OFTOptions

            common = {one.name: getattr(config.policy, one.name) for one in fields(CheckpointOptions)}
            return OFT(replace(config, policy=OFTOptions(**common)))
        return super().__call__(config)

    def refine(self, folder: Path) -> str:
        """Return the policy that runs a checkpoint of OpenVLA: ``oft`` if it has an action head."""
        return "oft" if has_action_head(folder) else "openvla"


def _is_oft(options: OpenVLAOptions) -> bool:
    folder = Path(options.checkpoint).expanduser()
    base = base_folder(folder, options.base)
    return has_action_head(folder) or (base is not None and has_action_head(base))


def has_action_head(folder: Path) -> bool:
    """Return True for an OpenVLA-OFT checkpoint, which ``config.json`` does not show."""
    if list(folder.glob("action_head--*.pt")):
        return True
    from vla_ros_models.checkpoint_files import stored_names

    return any(name.startswith("action_head.") for name in stored_names(folder))


OPENVLA = _OpenVLA(
    OpenVLAOptions,
    "vla_ros_models.openvla.policy:OpenVLAPolicy",
    lambda config: 2 * (config.get("model_type") == "openvla"),
)
"""The entry point's target."""
