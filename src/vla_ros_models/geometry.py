"""Geometric tokens: where the surface in each image patch is, added to the patch's token behind the projector.

A position is the median of the patch's points in the robot's base frame. The last layer starts at zero, so that a
checkpoint to which the tokens are added is unchanged until it is trained.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.checkpoint_files import Fields, StoredTensor
from vla_ros_models.engine.shapes import GeometryShape

GEOMETRY = "geometry"
"""Key in ``config.json``, and what the names of the tensors begin with."""

MOST_IMAGES = 3
"""Images that an OpenVLA-OFT takes at most (``policy.images``); they have numbers, from 0, and no names."""

_PROJECTOR = re.compile(r".*multi_modal_projector\.linear\.bias|projector\.fc[23]\.bias")


def read_geometry(config: Fields) -> tuple[GeometryShape | None, dict[str, str]]:
    """Read the entry of ``config.json``; return the sizes, and each image's name with the key of its points.

    Returns None and {} without the entry.
    """
    if not config.get(GEOMETRY):
        return None, {}
    found, usual = config.object(GEOMETRY), GeometryShape()
    pairs = found.get("points")
    if not isinstance(pairs, dict) or not pairs or not all(isinstance(one, str) for one in pairs.values()):
        raise CheckpointError(
            f"{found.where}: points: found {pairs!r}, expected the name of an image with the key of its points, "
            'such as {"observation.images.image": "points"}'
        )
    sizes = GeometryShape(
        found.whole("bands", usual.bands),
        found.number("longest", usual.longest),
        found.whole("hidden", usual.hidden),
    )
    found.finish()
    return sizes, pairs


def require_images(pairs: Collection[str], images: Collection[str], source: object) -> None:
    """Raise CheckpointError, which begins with ``source``, for points of others than the policy's ``images``."""
    if unknown := set(pairs) - set(images):
        raise CheckpointError(
            f"{source}: {GEOMETRY}: found points of {min(unknown)}, expected images of the policy: "
            f"{', '.join(images)}"
        )


class GeometryTokens(nn.Module):
    """Turns positions into what is added to the patches' tokens."""

    def __init__(self, shape: GeometryShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc1 = nn.Linear(3 + 6 * shape.bands, shape.hidden)
        self.fc2 = nn.Linear(shape.hidden, width)
        self.unknown = nn.Parameter(torch.zeros(width))

    def forward(self, positions: Tensor) -> Tensor:
        """Return tokens [..., width] for positions [..., 3] in metres, NaN where unknown; all float32."""
        with torch.autocast(positions.device.type, enabled=False):  # bfloat16 has steps of millimetres
            known = positions.isfinite().all(-1, keepdim=True)
            at = torch.where(known, positions, 0.0)
            octaves = torch.arange(self.shape.bands, device=at.device)
            angles = (at[..., None] * (2 * math.pi / self.shape.longest * torch.exp2(octaves))).flatten(-2)
            features = torch.cat([at, angles.sin(), angles.cos()], dim=-1)
            tokens = self.fc2(functional.gelu(self.fc1(features)))
            return torch.where(known, tokens, self.unknown)

    def added(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Return the patches' tokens [..., width] with those of their positions [..., 3] added."""
        tokens: Tensor = self(positions)
        return patches + tokens.to(patches.dtype)


def new_tokens(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], points: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors, by their names in the checkpoint, of tokens that change nothing until they are trained.

    ``config`` is ``config.json``, ``points`` the key of the points for each image that has some. Raises ConfigError
    if the checkpoint is neither LeRobot's pi0 or pi0.5 nor OpenVLA-OFT, has tokens, or lacks an image.
    """
    images = [name for name, one in (config.get("input_features") or {}).items() if one.get("type") == "VISUAL"]
    if is_oft := config.get("model_type") == "openvla":  # no file says how many images an OpenVLA-OFT takes
        images = [str(number) for number in range(MOST_IMAGES)]
    if not is_oft and (config.get("type") not in ("pi0", "pi05") or not images):
        found = config.get("type") or config.get("model_type")
        raise ConfigError(f"--points: found {found!r}, expected OpenVLA-OFT, or LeRobot's layout of pi0 or pi05")
    if config.get(GEOMETRY):
        raise ConfigError("--points: the checkpoint has geometric tokens already")
    if unknown := set(points) - set(images):
        raise ConfigError(f"--points: found {min(unknown)}, expected an image of the policy: {', '.join(images)}")
    projector = max(name for name in stored if _PROJECTOR.fullmatch(name))  # of OpenVLA's layers the last one
    before = "" if is_oft else projector[: projector.index("paligemma_with_expert")]
    module = GeometryTokens(GeometryShape(), stored[projector].shape[0])
    nn.init.zeros_(module.fc2.weight)
    nn.init.zeros_(module.fc2.bias)
    return {f"{before}{GEOMETRY}.{name}": one.detach() for name, one in module.named_parameters()}
