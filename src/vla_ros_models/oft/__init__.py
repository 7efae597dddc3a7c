"""OpenVLA-OFT: OpenVLA's network, returning a whole chunk from one bidirectional pass.

``loading`` reads the published files, ``network`` extends OpenVLA's network, ``inference`` runs the network, and
``policy`` implements :class:`~vla_ros.policies.base.Policy`. Importing this package does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vla_ros.config.options import option
from vla_ros.errors import ConfigError
from vla_ros.policies.base import LazyPolicy
from vla_ros_models.openvla.options import CheckpointOptions
from vla_ros_models.openvla.processing import QUANTILES

BOUNDS = {"q99": QUANTILES, "min_max": ("min", "max")}


@dataclass(frozen=True)
class Variant:
    """Constants that the published code derives from a robot's name."""

    chunk: int  # K, actions per chunk
    action: int  # D, numbers per action; 0 for any
    normalization: str = "q99"  # as ``policy.normalization``
    camera_side: int = 0  # as ``policy.camera_side``; 0 for none

    @property
    def bounds(self) -> tuple[str, str]:
        """Names of the statistics that bound the normalised range."""
        return BOUNDS[self.normalization]


PRESETS = {"libero": Variant(8, 7), "aloha": Variant(25, 14, "min_max", 256), "bridge": Variant(5, 7)}


def choose_variant(options: "OFTOptions", preset: str) -> Variant:
    """Return the preset's variant with ``options``; raises ConfigError if they contradict it or lack a chunk."""
    variant = PRESETS.get(preset, Variant(options.chunk, 0))
    if not variant.chunk:
        raise ConfigError(
            "policy.chunk: no file of the checkpoint states the number of actions per chunk; set preset (libero: "
            "8, aloha: 25, bridge: 5), or policy.name:=oft and policy.chunk"
        )
    if options.chunk not in (0, variant.chunk):
        raise ConfigError(
            f"policy.chunk: found {options.chunk}, but preset {preset} means {variant.chunk}; set only one of them"
        )
    if options.normalization != "auto":
        variant = replace(variant, normalization=options.normalization)
    return variant if options.camera_side < 0 else replace(variant, camera_side=options.camera_side)


@dataclass(frozen=True)
class OFTOptions(CheckpointOptions):
    """Settings that no file of a checkpoint states."""

    chunk: int = option(
        0,
        "Actions per chunk, which no file of a checkpoint states; 0: from the preset (libero 8, aloha"
        " 25, bridge 5)",
        unit="actions",
        low=0,
        high=200,
    )
    normalization: str = option(
        "auto",
        "Bounds by which actions and state are normalised: q99 (1st and 99th percentile; LIBERO, Bridge) or "
        "min_max (ALOHA); auto: from the preset",
        choices=("auto", "q99", "min_max"),
    )
    images: int = option(
        0, "Number of images that the checkpoint was trained with; 0: one per camera", low=0, high=3
    )
    crop_area: float = option(
        0.9, "Share of the area that the centre crop keeps; 1 for training without augmentation", low=0.1, high=1.0
    )
    camera_side: int = option(
        -1,
        "Side length of the first resize of every image (ALOHA: 256); 0: none, -1: from the preset",
        unit="px",
        low=-1,
        high=4096,
    )
    denoising_steps: int = option(50, "Denoising steps of a diffusion head", low=1, high=50)
    seed: int = option(-1, "Seed of a diffusion head's noise in every session; -1: random", low=0, unset=-1)


def _claims(config: Mapping[str, Any]) -> int:
    return int(config.get("model_type") == "openvla")  # OpenVLA's own; only other files tell which of both it is


OFT = LazyPolicy(OFTOptions, "vla_ros_models.oft.policy:OFTPolicy", _claims)
"""The entry point's target."""
