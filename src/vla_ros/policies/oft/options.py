"""Options of OpenVLA-OFT (``policy.name: oft``)."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.policies.openvla.options import CheckpointOptions


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
    seed: int = option(-1, "Seed of a diffusion head's noise in every session; -1: random", low=-1)
