"""Runs OpenVLA's published checkpoints on current libraries, without remote code.

Importing this package does not import torch.
"""

from dataclasses import fields, replace
from pathlib import Path

from vla_ros.config import Config
from vla_ros.policies.base import LazyPolicy, Policy
from vla_ros.policies.openvla.options import CheckpointOptions, OpenVLAOptions


class _OpenVLA(LazyPolicy):
    """Creates OpenVLA's policy, or OpenVLA-OFT's if the checkpoint has an action head."""

    def __call__(self, config: Config) -> Policy:
        options = config.policy
        if isinstance(options, OpenVLAOptions) and has_action_head(Path(options.checkpoint).expanduser()):
            from vla_ros.policies.oft import OFT, OFTOptions

            common = {one.name: getattr(config.policy, one.name) for one in fields(CheckpointOptions)}
            return OFT(replace(config, policy=OFTOptions(**common)))
        return super().__call__(config)


def has_action_head(folder: Path) -> bool:
    """Return True for an OpenVLA-OFT checkpoint, which ``config.json`` does not show."""
    index = folder / "model.safetensors.index.json"
    return bool(list(folder.glob("action_head--*.pt"))) or (
        index.is_file() and '"action_head.' in index.read_text(encoding="utf-8", errors="replace")
    )


OPENVLA = _OpenVLA(
    OpenVLAOptions,
    "vla_ros.policies.openvla.policy:OpenVLAPolicy",
    lambda config: 2 * (config.get("model_type") == "openvla"),
)
"""The entry point's target."""
