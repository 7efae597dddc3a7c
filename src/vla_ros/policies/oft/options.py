"""Options of OpenVLA-OFT: ``policy.*`` where ``policy.name`` is ``oft``."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.policies.openvla.options import CheckpointOptions


@dataclass(frozen=True)
class OFTOptions(CheckpointOptions):
    """The checkpoint, and settings that its files do not state."""

    chunk: int = option(
        0,
        "Actions per chunk, which no file of a checkpoint says; 0 follows preset (libero 8, aloha 25, bridge 5)",
        unit="actions",
        low=0,
        high=200,
    )
    normalization: str = option(
        "auto",
        "Bounds by which actions and state are normalised: q99 (1st and 99th percentile; LIBERO, Bridge) or "
        "min_max (ALOHA); auto follows preset",
        choices=("auto", "q99", "min_max"),
    )
    images: int = option(0, "Images that the checkpoint was trained on; 0: one of each camera", low=0, high=3)
    crop_area: float = option(
        0.9, "Share of the area that the centre crop keeps; 1 for training without augmentation", low=0.1, high=1.0
    )
    camera_side: int = option(
        -1,
        "Side to which images are resized before all else (ALOHA: 256); 0 for none, -1 follows preset",
        unit="px",
        low=-1,
        high=4096,
    )
    denoising_steps: int = option(50, "Denoising steps of a diffusion head", low=1, high=50)
    seed: int = option(-1, "Seed of a diffusion head's noise in every session; -1 draws one", low=-1)
