"""Geometric tokens: where the surface in each image patch is, added to the patch's token behind the projector.

A position is the median of the patch's points in the robot's base frame. The last layer starts at zero, so that a
checkpoint to which the tokens are added is unchanged until it is trained.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.types import Float32Array
from vla_ros.vision.processors import centred_corner, fitted_size
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.engine.shapes import GeometryShape

GEOMETRY = "geometry"
"""Key in ``config.json``, and what the names of the tensors begin with."""

Points = Sequence[tuple[str, str]]
"""Pairs of the key of an image and the key of its points, as in ``PolicySpec.points``."""


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


def patch_positions(points: Float32Array, image_size: int, patch_size: int) -> Float32Array:
    """Return the median of the known points of each patch, float32 [patches, 3]; NaN where none is known.

    ``points`` are [H, W, 3] with NaN where unknown, aligned to a camera's image. They are fitted to the network's
    square image as the image is, with the nearest point of each pixel.
    """
    fitted = _fitted(points, image_size)
    side = image_size // patch_size
    used = fitted[: side * patch_size, : side * patch_size]
    patches = used.reshape(side, patch_size, side, patch_size, 3).transpose(0, 2, 4, 1, 3)
    ordered = np.sort(patches.reshape(side * side, 3, -1), axis=-1)  # NaN last
    count = np.isfinite(ordered).sum(axis=-1, keepdims=True)
    low, high = (
        np.take_along_axis(ordered, np.maximum(at, 0), axis=-1)[..., 0] for at in ((count - 1) // 2, count // 2)
    )
    median: Float32Array = np.float32(0.5) * (low + high)
    return median


def _fitted(points: Float32Array, size: int) -> Float32Array:
    if points.shape[:2] == (size, size):
        return points
    height, width = small = fitted_size(points.shape[:2], (size, size))
    rows, columns = (
        ((np.arange(target) + 0.5) * source / target).astype(np.intp)
        for source, target in zip(points.shape[:2], small, strict=True)
    )
    top, left = centred_corner(small, (size, size))
    result = np.full((size, size, 3), np.nan, np.float32)
    result[top : top + height, left : left + width] = points[rows][:, columns]
    return result


def camera_positions(
    given: Mapping[str, Float32Array], points: Points, images: Sequence[str], image_size: int, patches: int
) -> Float32Array:
    """Return the positions of all patches of ``images``, float32 [images, patches, 3].

    An image without points has NaN. Raises ConfigError if points of the policy's spec are missing in ``given``.
    """
    keys, found = dict(points), []
    for image in images:
        if image not in keys:
            found.append(np.full((patches, 3), np.nan, np.float32))
            continue
        one = given.get(keys[image])
        if one is None or one.ndim != 3 or one.shape[2] != 3:
            raise ConfigError(
                f"points '{keys[image]}' of '{image}': found {None if one is None else list(one.shape)}, expected "
                "float32 [H, W, 3] in metres; bind them with camera.topics and camera.keys"
            )
        found.append(patch_positions(one, image_size, image_size // math.isqrt(patches)))
    return np.stack(found)


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


def add_zero_tokens(width: int, shape: GeometryShape, seed: int = 0) -> dict[str, Tensor]:
    """Return new tensors that change nothing yet, by their names in a checkpoint, for tokens of ``width``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = GeometryTokens(shape, width)
    nn.init.zeros_(module.fc2.weight)
    nn.init.zeros_(module.fc2.bias)
    return {f"{GEOMETRY}.{name}": one.detach() for name, one in module.named_parameters()}
