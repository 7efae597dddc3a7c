"""The pipelines of :mod:`vla_ros.vision` in torch, so that a frame is resized where the network runs.

Everything equals the host's to the bit on every device: the bicubic resize is done in Pillow's own integers,
Lanczos-3 and the crop in single float32 operations, one after the other as TensorFlow does them.
The JPEG round trip of ``libero`` stays on the host: what comes here has been through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.errors import ConfigError
from vla_ros.vision.resample import crop_taps, lanczos3_matrix, taps_of

Pipeline = Callable[[Tensor], Tensor]
"""Uint8 [B, H, W, 3] to uint8 [B, height, width, 3], both RGB."""

_PRECISION_BITS = 22  # of Pillow's fixed-point weights
_CUBIC = -0.5  # Pillow's parameter a of the cubic
_AT_ONCE = 2**22  # products that are held at a time: 16 MiB stay in the cache of a large GPU


def is_exact(pipeline: str) -> bool:
    """True where :func:`make_pipeline` does all that the host's pipeline of that name does, with its bits."""
    return pipeline == "openvla"


@dataclass(frozen=True)
class Taps:
    """A resize along one axis: each of M samples is a sum over K samples of the source.

    Attributes:
        at: Int64 [K * M], position in the source of tap k of sample m at k * M + m.
        weights: Int32 [K, M, 1], multiples of 2^-22; zero where a sample has fewer taps.
    """

    at: Tensor
    weights: Tensor

    @classmethod
    def bicubic(cls, source: int, target: int, device: torch.device) -> Taps:
        """Pillow's bicubic resize with antialias."""
        positions, weights = bicubic_taps(source, target)
        return cls(
            torch.from_numpy(positions).reshape(-1).to(device), torch.from_numpy(weights)[:, :, None].to(device)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """Uint8 [A, N, C] to uint8 [A, M, C], rounded as Pillow rounds."""
        count, samples, _ = self.weights.shape
        rows = max(1, _AT_ONCE // (count * samples * images.shape[2]))
        parts = [self._sums(images[start : start + rows]) for start in range(0, images.shape[0], rows)]
        sums = parts[0] if len(parts) == 1 else torch.cat(parts)
        return sums.add_(1 << (_PRECISION_BITS - 1)).bitwise_right_shift_(_PRECISION_BITS).clamp_(0, 255).byte()

    def _sums(self, images: Tensor) -> Tensor:
        count, samples, _ = self.weights.shape
        taken = images.index_select(1, self.at).view(-1, count, samples, images.shape[2])  # [A, K, M, C]
        return (taken * self.weights).sum(1, dtype=torch.int32)  # below 2^31: weights sum to 1, a few are negative


def bicubic_taps(source: int, target: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Where Pillow's bicubic resize with antialias looks along one axis, and its weights, rounded as it does.

    Returns:
        Int64 [K, target] positions and int32 [K, target] weights in units of 2^-22.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    centers = (np.arange(target) + 0.5) * scale
    first = np.maximum(0, (centers - support + 0.5).astype(np.int64))
    last = np.minimum(source, (centers + support + 0.5).astype(np.int64))
    positions = first + np.arange(int((last - first).max()))[:, None]  # [K, target]
    weights = _cubic(np.abs((positions - centers + 0.5) * (1.0 / stretch)))
    weights[positions >= last] = 0.0
    weights /= weights.sum(axis=0)  # tap after tap, in its order
    fixed = np.trunc(weights * (1 << _PRECISION_BITS) + np.copysign(0.5, weights)).astype(np.int32)
    return np.minimum(positions, source - 1), fixed


def make_turn(name: str) -> Pipeline:
    """The turn that ``camera.orientation`` names, for [B, H, W, 3].

    Raises:
        ConfigError: No such orientation.
    """
    turns: dict[str, Pipeline] = {
        "none": lambda images: images,
        "rotate_90": lambda images: images.rot90(-1, (1, 2)),
        "rotate_180": lambda images: images.flip(1, 2),
        "rotate_270": lambda images: images.rot90(1, (1, 2)),
        "flip_horizontal": lambda images: images.flip(2),
        "flip_vertical": lambda images: images.flip(1),
    }
    if name not in turns:
        raise ConfigError(f"camera.orientation: found {name!r}, expected one of {', '.join(turns)}")
    return turns[name]


def make_pipeline(
    name: str,
    source: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
    crop_area: float = 1.0,
    orientation: str = "none",
) -> Pipeline:
    """What :func:`vla_ros.vision.pipelines.make_pipeline` makes, for pictures of one size on ``device``.

    Args:
        name: ``openvla``, or ``libero`` (without its JPEG round trip).
        source: (height, width) of the camera's pictures, before the turn.
        size: (height, width) of the result.
        device: Where the pictures are.
        crop_area: Share of the area that the centre crop keeps.
        orientation: ``camera.orientation``.

    Raises:
        ConfigError: No such pipeline or orientation, or an area out of range.
    """
    turn = make_turn(orientation)
    upright = source[::-1] if orientation in ("rotate_90", "rotate_270") else source
    steps: list[Pipeline] = []
    if name == "openvla" and crop_area == 1.0:
        # Columns first, then rows, each rounded: Pillow's order at the time of training.
        if upright[1] != size[1]:
            steps.append(_bicubic_columns(Taps.bicubic(upright[1], size[1], device)))
        if upright[0] != size[0]:
            steps.append(_bicubic_rows(Taps.bicubic(upright[0], size[0], device)))
    elif name in ("openvla", "libero"):
        current = upright
        if name == "libero" and upright != size:
            steps.append(_lanczos3(upright, size, device))
            current = size
        if crop_area != 1.0:
            steps.append(_crop(current, size, crop_area, device))
    else:
        raise ConfigError(f"camera.pipeline: found {name!r}, expected one of openvla, libero")

    def pipeline(images: Tensor) -> Tensor:
        images = turn(images)
        for step in steps:
            images = step(images)
        return images.contiguous()

    return pipeline


def _crop(source: tuple[int, int], size: tuple[int, int], area: float, device: torch.device) -> Pipeline:
    """``vision.pipelines.crop_center``: the same operations one by one, so that nothing rounds otherwise."""
    rows, columns = (crop_taps(source[axis], size[axis], area) for axis in (0, 1))
    above, below = _to(rows.below, device), _to(rows.above, device)
    left, right = _to(columns.below, device), _to(columns.above, device)
    across, down = _to(columns.share, device)[:, None], _to(rows.share, device)[:, None, None]

    def between(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        return one + (other - one) * share

    def along_columns(images: Tensor) -> Tensor:
        one, other = (images.index_select(2, at).float() * (1 / 255) for at in (left, right))
        return between(one, other, across)

    def crop(images: Tensor) -> Tensor:
        top, bottom = (along_columns(images.index_select(1, at)) for at in (above, below))
        return (between(top, bottom, down).clamp_(0, 1) * 255.5).byte()

    return crop


def _lanczos3(source: tuple[int, int], size: tuple[int, int], device: torch.device) -> Pipeline:
    """``vision.resample.Lanczos3``: tap after tap, rows first."""
    rows, columns = (taps_of(lanczos3_matrix(source[axis], size[axis])) for axis in (0, 1))
    down = [(_to(at, device), _to(weights, device)[:, None, None]) for at, weights in _by_tap(rows)]
    across = [(_to(at, device), _to(weights, device)[:, None]) for at, weights in _by_tap(columns)]

    def resize(images: Tensor) -> Tensor:
        for axis, taps in ((1, down), (2, across)):
            terms = (images.index_select(axis, at).float() * weights for at, weights in taps)
            images = sum(terms, start=images.new_zeros((), dtype=torch.float32))
        return images.round().clamp_(0, 255).byte()

    return resize


def _by_tap(taps: tuple[NDArray[np.intp], NDArray[np.float32]]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Position and weight [target] of each tap."""
    positions, weights = taps
    return ((positions[:, tap].copy(), weights[:, tap].copy()) for tap in range(positions.shape[1]))


def _bicubic_columns(taps: Taps) -> Pipeline:
    return lambda images: taps(images.flatten(0, 1)).view(*images.shape[:2], -1, images.shape[3])


def _bicubic_rows(taps: Taps) -> Pipeline:
    return lambda images: taps(images.flatten(2)).view(images.shape[0], -1, *images.shape[2:])


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    a, d = _CUBIC, distance
    near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1
    far = (((d - 5) * d + 8) * d - 4) * a
    return np.where(d < 1.0, near, np.where(d < 2.0, far, 0.0))


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
