"""Augmentation of images, each sample by its own draws.

``openpi`` is that of openpi's PyTorch code (preprocessing_pytorch), which draws once for a whole
batch; its JAX code draws for each sample, as here. ``openvla`` is that of OpenVLA and OpenVLA-OFT (dlimp's
augment_image), with a random crop in place of the centre crop at inference, where there is one. ``lerobot`` is
LeRobot's transforms, without sharpness and affine maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vla_ros.contract.spec import ImageFeature
from vla_ros.types import UInt8Array
from vla_ros_models.training import Augment, as_it_is

Image = NDArray[Any]


def _openpi(key: str, image: UInt8Array, random: np.random.Generator) -> Image:
    """Crop and rotate, except on wrists, then change brightness, contrast and saturation."""
    draws = [float(random.random()) for _ in range(6)]
    corner = None if "wrist" in key else (draws[0], draws[1], draws[2])
    return _back(openpi_image(_planes(image), corner, (draws[3], draws[4], draws[5])))


def openpi_image(
    planes: Tensor, geometry: tuple[float, float, float] | None, colour: tuple[float, float, float]
) -> Tensor:
    """Augment [C, H, W] in [0, 1] by draws from [0, 1): the crop's top and left, the angle; then the colours.

    A top or left of 1 or more is a number of pixels.
    """
    if geometry is not None:
        top, left, turn = geometry
        _, height, width = planes.shape
        crop = int(height * 0.95), int(width * 0.95)
        at = [
            int(one if one >= 1 else one * (room + 1))
            for one, room in zip((top, left), (height - crop[0], width - crop[1]), strict=True)
        ]
        cut = planes[None, :, at[0] : at[0] + crop[0], at[1] : at[1] + crop[1]]
        planes = functional.interpolate(cut, size=(height, width), mode="bilinear", align_corners=False)[0]
        planes = _rotated(planes, turn * 10 - 5)
    brightness, contrast, saturation = colour
    planes = planes * (0.7 + brightness * 0.6)
    mean = planes.mean(dim=(0, 1, 2), keepdim=True)
    planes = (planes - mean) * (0.6 + contrast * 0.8) + mean
    grey = planes.mean(dim=0, keepdim=True)
    planes = grey + (planes - grey) * (0.5 + saturation * 1.0)
    return planes.clamp(0, 1)


def _rotated(planes: Tensor, degrees: float) -> Tensor:
    if abs(degrees) <= 0.1:
        return planes
    _, height, width = planes.shape
    angle = torch.tensor(degrees * torch.pi / 180.0)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    across, down = torch.meshgrid(torch.linspace(-1, 1, width), torch.linspace(-1, 1, height), indexing="xy")
    grid = torch.stack([across * cosine - down * sine, across * sine + down * cosine], dim=-1)[None]
    return functional.grid_sample(planes[None], grid, mode="bilinear", padding_mode="zeros", align_corners=False)[0]


def openvla(
    key: str, image: UInt8Array, random: np.random.Generator, areas: Mapping[str, float] = MappingProxyType({})
) -> Image:
    """Change brightness by 0.2, contrast and saturation by a factor of 0.8 to 1.2, and the hue by 0.05.

    ``areas`` has the share of an image that a random crop keeps, which comes first, by the image's key.
    """
    planes = _planes(image)
    if (area := areas.get(key, 1.0)) < 1:
        planes = openvla_crop(planes, area, random.random(), random.random())
    planes = (planes + random.uniform(-0.2, 0.2)).clamp(0, 1)
    mean = planes.mean(dim=(1, 2), keepdim=True)
    planes = ((planes - mean) * random.uniform(0.8, 1.2) + mean).clamp(0, 1)
    planes = _saturated(planes, random.uniform(0.8, 1.2), random.uniform(-0.05, 0.05))
    return _back(planes.clamp(0, 1))


def openvla_crop(planes: Tensor, area: float, top: float, left: float) -> Tensor:
    """Crop [C, H, W] to the share ``area`` and resize it back, as TensorFlow's ``crop_and_resize`` does.

    ``top`` and ``left`` in [0, 1] are where between the first and the last possible place.
    """
    side = math.sqrt(area)
    down, across = (
        2 * (at * (1 - side) + side * torch.linspace(0, 1, size)) - 1
        for at, size in zip((top, left), planes.shape[1:], strict=True)
    )
    grid = torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1)[None]
    return functional.grid_sample(planes[None], grid, padding_mode="border", align_corners=True)[0]


def without_crop(images: Sequence[ImageFeature]) -> tuple[tuple[ImageFeature, ...], Mapping[str, float]]:
    """Return images as before their centre crop, and the share that it keeps of each."""
    areas = {one.key: getattr(one.processor, "crop_area", 1.0) for one in images}
    whole = tuple(
        replace(one, processor=replace(one.processor, crop_area=1.0))  # type: ignore[type-var]
        if areas[one.key] < 1
        else one
        for one in images
    )
    return whole, {key: area for key, area in areas.items() if area < 1}


def _saturated(planes: Tensor, factor: float, hue: float) -> Tensor:
    """Scale the saturation of RGB and turn its hue, in HSV."""
    high, low = planes.max(dim=0).values, planes.min(dim=0).values
    span = high - low
    red, green, blue = planes
    safe = torch.where(span > 0, span, torch.ones_like(span))
    sector = torch.where(
        high == red,
        (green - blue) / safe % 6,
        torch.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    turned = (sector / 6 + hue) % 1.0
    saturation = (torch.where(high > 0, span / high.clamp(min=1e-9), torch.zeros_like(high)) * factor).clamp(0, 1)
    place = [(number + turned * 6) % 6 for number in (5.0, 3.0, 1.0)]
    return torch.stack([high - high * saturation * torch.minimum(at, 4 - at).clamp(0, 1) for at in place])


def _lerobot(key: str, image: UInt8Array, random: np.random.Generator) -> Image:
    """Apply up to three of brightness, contrast, saturation and hue."""
    planes = _planes(image)
    for kind in random.permutation(4)[:3].tolist():
        factor = random.uniform(0.8, 1.2) if kind < 2 else random.uniform(0.5, 1.5)
        if kind == 0:
            planes = planes * factor
        elif kind == 1:
            mean = _grey(planes).mean()
            planes = (planes - mean) * factor + mean
        elif kind == 2:
            planes = _grey(planes) + (planes - _grey(planes)) * factor
        else:
            planes = _saturated(planes, 1.0, random.uniform(-0.05, 0.05))
        planes = planes.clamp(0, 1)
    return _back(planes)


def _grey(planes: Tensor) -> Tensor:
    red, green, blue = planes
    grey: Tensor = (0.2989 * red + 0.587 * green + 0.114 * blue)[None]
    return grey


def _planes(image: Image) -> Tensor:
    """Return [C, H, W] in [0, 1], float32."""
    planes = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    return planes.float() / 255.0 if image.dtype == np.uint8 else planes.float()


def _back(planes: Tensor) -> Image:
    found: Image = planes.permute(1, 2, 0).contiguous().numpy()
    return found


AUGMENTATIONS: Mapping[str, Augment] = {
    "none": as_it_is, "openpi": _openpi, "openvla": openvla, "lerobot": _lerobot
}  # fmt: skip
