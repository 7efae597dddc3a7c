"""Converts images, states and actions as in training. All functions are pure.

Images are resized twice around a centre crop, then to multiples of the tower's token size. Each state and action is
the concatenation of named parts, normalised to [-1, 1] by bounds of the embodiment's data.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vla_ros.errors import ConfigError, ImageError
from vla_ros.types import FixedPointResize, ImageProcessor, Padding, Resampling, UInt8Array
from vla_ros.vision.processors import centred_corner, require_image
from vla_ros.vision.resample import pillow_taps
from vla_ros_models.normalization import Array, Learned, LearnedStatistics, zero_padded

Float32 = NDArray[np.float32]
_Size = tuple[int, int]


@dataclass(frozen=True)
class GrootResize(ImageProcessor):
    """Resizes an image as GR00T's and Qwen's processors do; ``size`` is that of the result (of a square image)."""

    size: _Size  # (height, width)
    target: _Size | None  # after the second resize; None keeps the camera's size
    edge: int = 0  # of the first resize
    crop: float | None = None  # share of each side that the centre crop keeps
    letterbox: bool = False  # pads to a square first
    area: bool = False  # OpenCV's area filter, which keeps the aspect ratio, instead of torch's bicubic filter
    unit: int = 32  # the sides of the result are multiples of this
    limits: _Size = (65536, 16777216)  # pixels of the result

    def __call__(self, image: UInt8Array) -> UInt8Array:
        return self.to_units(self.prepare(image))

    def prepare(self, image: UInt8Array) -> UInt8Array:
        """Pad, resize, crop and resize uint8 [H, W, 3]."""
        require_image(image)
        if self.target is None:
            return image
        if self.letterbox and image.shape[0] != image.shape[1]:
            side = max(image.shape[:2])
            square = np.zeros((side, side, 3), np.uint8)
            top, left = centred_corner(_size(image), (side, side))
            square[top : top + image.shape[0], left : left + image.shape[1]] = image
            image = square
        image = self._resize(image, (self.edge, self.edge))
        top, left, height, width = self._crop_box(_size(image))
        return self._resize(image[top : top + height, left : left + width], self.target)

    def to_units(self, image: UInt8Array) -> UInt8Array:
        """Resize to multiples of :attr:`unit`, as Qwen's processor does."""
        return resize_fixed_point(image, fit_units(_size(image), self.unit, self.limits))

    def resampling(self, source: _Size) -> Resampling | None:
        """Return torch's steps, in integers; None for OpenCV's filter and for images that keep their size."""
        if self.area or self.target is None:
            return None
        steps: list[FixedPointResize | Padding] = []
        if self.letterbox and source[0] != source[1]:
            side = (max(source), max(source))
            steps, source = [Padding(side, centred_corner(source, side))], side
        first = (self.edge, self.edge)
        top, left, *cropped = self._crop_box(first)
        steps += bicubic_steps(source, first)
        steps += bicubic_steps((cropped[0], cropped[1]), self.target, (top, left), first)
        return (*steps, *bicubic_steps(self.target, fit_units(self.target, self.unit, self.limits)))

    def _resize(self, image: UInt8Array, size: _Size) -> UInt8Array:
        if not self.area:
            return resize_fixed_point(image, size)
        short = min(image.shape[:2])
        if short == self.edge:
            return image
        scale = self.edge / float(short)
        height, width = (max(1, round(side * scale)) for side in image.shape[:2])
        return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)

    def _crop_box(self, size: _Size) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the crop."""
        height, width = size
        if self.crop is not None and 0.0 < self.crop < 1.0:
            sides = (side * self.crop for side in size)
            height, width = (max(1, int(side) if self.area else round(side)) for side in sides)
        return (size[0] - height) // 2, (size[1] - width) // 2, height, width


def _size(image: UInt8Array) -> _Size:
    return image.shape[0], image.shape[1]


def resize_fixed_point(image: UInt8Array, size: _Size) -> UInt8Array:
    """Resize with torch's antialiased bicubic filter for uint8, in fixed point."""
    if _size(image) == size:
        return image
    writable = np.require(image, requirements=["C", "W"])  # torch warns about read-only memory
    planes = torch.from_numpy(writable).permute(2, 0, 1)[None]
    resized = functional.interpolate(planes, size=size, mode="bicubic", align_corners=False, antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


@lru_cache(maxsize=32)
def bicubic_steps(
    source: _Size, target: _Size, corner: _Size = (0, 0), whole: _Size | None = None
) -> tuple[FixedPointResize, ...]:
    """Return the steps of :func:`resize_fixed_point`, columns first.

    The source may be a part of an image ``whole``, with its first row and column in ``corner``.
    """
    steps = []
    for axis in (1, 0):
        if source[axis] != target[axis]:
            positions, weights = pillow_taps(source[axis], target[axis], "bicubic", short=True)
        elif whole is None or whole[axis] == source[axis]:
            continue
        else:
            positions = np.arange(target[axis])[None]
            weights = np.full_like(positions, 1 << 22, np.int32)
        steps.append(FixedPointResize(axis, positions + corner[axis], weights))
    return tuple(steps)


def fit_units(size: _Size, unit: int, limits: _Size) -> _Size:
    """Round (height, width) to multiples of ``unit`` with a number of pixels in ``limits``.

    Raises ImageError if one side is more than 200 times the other.
    """
    height, width = size
    if max(size) > 200 * min(size):
        raise ImageError(f"found an image of {width} x {height} pixels, expected sides of a ratio up to 200")
    rounded = round(height / unit) * unit, round(width / unit) * unit
    pixels = rounded[0] * rounded[1]
    if pixels > limits[1]:
        scale = math.sqrt(height * width / limits[1])
        return (
            max(unit, math.floor(height / scale / unit) * unit),
            max(unit, math.floor(width / scale / unit) * unit),
        )
    if pixels < limits[0]:
        scale = math.sqrt(limits[0] / (height * width))
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return rounded


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of the data that become -1 and 1, float32 [N], or [T, N] for each action of a chunk."""

    low: Float32
    high: Float32
    names: tuple[str, str] = ("min", "max")  # of the statistics

    @property
    def size(self) -> int:
        return int(self.low.shape[-1])

    def normalize(self, values: Array, clip: bool) -> Float32:
        """Map [..., N] to [-1, 1], and numbers whose bounds are equal to 0."""
        low, span, divisor = self._rows(values)
        found = np.float32(2) * (np.asarray(values, np.float32) - low) / divisor - np.float32(1)
        if self._spans[2]:
            found = np.where(span == 0, np.float32(0), found)
        return found.clip(-1, 1) if clip else found

    def unnormalize(self, values: Array, clip: bool) -> Float32:
        low, span, _ = self._rows(values)
        inside = values.clip(-1, 1) if clip else values
        return (np.asarray(inside, np.float32) + np.float32(1)) * np.float32(0.5) * span + low

    @cached_property
    def _spans(self) -> tuple[Float32, Float32, bool]:
        """The spans, the divisors, and whether a span is 0."""
        span = self.high - self.low
        return span, np.where(span == 0, 1, span), bool((span == 0).any())

    def _rows(self, values: Array) -> Iterator[Float32]:
        return (part[: len(values)] if part.ndim == 2 else part for part in (self.low, *self._spans[:2]))


@dataclass(frozen=True, eq=False)
class ActionPart:
    """A named part of an action."""

    name: str
    bounds: Bounds
    # ``absolute``; ``added`` to a part of the state; ``composed`` with it: a pose as a position and two rows of a
    # rotation matrix.
    kind: str = "absolute"
    state: tuple[int, int] = (0, 0)  # where that part of the state begins and ends


@dataclass(frozen=True, eq=False)
class Processing:
    """Prepares inputs and actions of one embodiment."""

    images: tuple[str, ...]  # keys in the model's order
    resize: GrootResize
    state: tuple[tuple[str, int], ...]  # names and sizes of the state's parts
    state_bounds: Bounds | None  # None if the state is not normalised
    clip_state: bool  # whether a normalised state is clipped to [-1, 1]
    parts: tuple[ActionPart, ...]  # the action
    action_size: int  # numbers of an action that the robot takes, at most those of all parts
    model_size: int  # numbers of the model's action that count
    rows: int  # actions of a chunk that the checkpoint was trained on
    clip_action: bool = True  # whether normalised actions are clipped before they are un-normalised
    gripper: int | None = None  # column that is converted from 0..1 to LIBERO's sign
    stored_state: tuple[tuple[str, int], ...] = ()  # the state's parts in the statistics, if they are others

    @property
    def state_size(self) -> int:
        return sum(size for _, size in self.state)

    @property
    def relative(self) -> bool:
        """True if a part of the action is relative to the state."""
        return any(part.kind != "absolute" for part in self.parts)

    def normalized_state(self, state: Array, size: int) -> Float32:
        """Normalise the robot's state [state_size] and pad it to float32 [size]."""
        values = np.asarray(state, np.float32)
        if self.state_bounds is not None:
            values = self.state_bounds.normalize(values, self.clip_state)
        return zero_padded(values, size)

    def shown_actions(self, normalized: Array) -> Array:
        """Return the rows and columns that count, [rows, model_size], of the model's actions [H, A]."""
        return normalized[: self.rows, : self.model_size]

    def robot_actions(self, normalized: Array, state: Array) -> Array:
        """Convert the model's actions [H, A] to the robot's units, [rows, action_size]."""
        normalized, found, start = normalized[: self.rows], list[Array](), 0
        state = np.asarray(state, np.float32)
        for part in self.parts:
            values: Array = part.bounds.unnormalize(
                normalized[:, start : start + part.bounds.size], self.clip_action
            )
            start += part.bounds.size
            if part.kind == "added":
                values = values + state[slice(*part.state)]
            elif part.kind == "composed":
                values = compose(state[slice(*part.state)], values)
            found.append(values)
        actions: Array = np.concatenate(found, axis=1)[:, : self.action_size]
        if self.gripper is not None:
            actions[:, self.gripper] = -np.sign(2.0 * actions[:, self.gripper] - 1.0)
        return actions

    def converted_actions(self, actions: Array, state: Array) -> Float32:
        """Convert the robot's actions [T, action_size] to the numbers that are normalised."""
        values: Array = np.array(actions, np.float32)
        state = np.asarray(state, np.float32)
        start, found = 0, list[Array]()
        if self.gripper is not None:
            values[:, self.gripper] = (1.0 - values[:, self.gripper]) / 2.0
        for part in self.parts:
            columns = values[:, start : start + part.bounds.size]
            if part.kind != "absolute":
                base = state[slice(*part.state)]
                columns = columns - base if part.kind == "added" else decompose(base, columns)
            found.append(columns)
            start += part.bounds.size
        return np.concatenate(found, axis=1)

    def learned(self, layout: str) -> LearnedStatistics:
        """Return the statistics of the state and the actions; those of each step if a part has them."""
        parts = tuple((part.name, part.bounds.size, part.kind != "absolute") for part in self.parts)
        states = tuple((name, size, False) for name, size in self.stored_state or self.state)
        state = None if self.state_bounds is None else _learned([self.state_bounds])
        action = _learned([part.bounds for part in self.parts])
        return LearnedStatistics(layout, state, action, self.converted_actions, parts=(states, parts))

    def model_actions(self, actions: Array) -> Array:
        """Normalise the robot's absolute actions [T, action_size], as for :meth:`robot_actions`."""
        values: Array = np.array(actions, np.float32)
        start, found = 0, []
        if self.gripper is not None:
            values[:, self.gripper] = (1.0 - values[:, self.gripper]) / 2.0
        for part in self.parts:
            columns = values[:, start : start + part.bounds.size]
            short = part.bounds.size - columns.shape[1]
            if short:
                raise ConfigError(f"RTC: the robot's actions lack {short} numbers of {part.name}")
            found.append(part.bounds.normalize(columns, clip=True))
            start += part.bounds.size
        return np.concatenate(found, axis=1)


def _learned(bounds: Sequence[Bounds]) -> Learned:
    """Return the bounds of parts that follow each other, those of each step if a part has them."""
    steps = max((len(one.low) for one in bounds if one.low.ndim == 2), default=0)

    def joined(ends: Sequence[Float32]) -> Float32:
        rows = [np.broadcast_to(end, (steps, end.shape[-1])) if steps else end for end in ends]
        return np.concatenate(rows, axis=-1)

    low, high = joined([one.low for one in bounds]), joined([one.high for one in bounds])
    names = tuple(one.names for one in bounds for _ in range(one.size))
    return Learned(names, low, high, np.ones(len(names), np.bool_))


def compose(reference: Array, relative: Array) -> Float32:
    """Compose a pose [9] with relative ones [T, 9]; each is a position and two rows of a rotation matrix."""
    base, turn = _rotations(reference[None, 3:])[0], _rotations(relative[:, 3:])
    place = reference[:3].astype(np.float64) + relative[:, :3].astype(np.float64) @ base.T
    rows = (base @ turn)[:, :2].reshape(-1, 6)
    return np.concatenate([place, rows], axis=1).astype(np.float32)


def decompose(reference: Array, poses: Array) -> Float32:
    """Return poses [T, 9] relative to one [9]: what :func:`compose` composes."""
    base, turned = _rotations(reference[None, 3:])[0], _rotations(poses[:, 3:])
    place = (poses[:, :3].astype(np.float64) - reference[:3].astype(np.float64)) @ base
    return np.concatenate([place, (base.T @ turned)[:, :2].reshape(-1, 6)], axis=1).astype(np.float32)


def _rotations(rows: Array) -> NDArray[np.float64]:
    """Return the rotation matrices [N, 3, 3] of their first two rows [N, 6], which need not be orthonormal."""
    first, second = np.asarray(rows, np.float64).reshape(-1, 2, 3).transpose(1, 0, 2)
    first = first / np.linalg.norm(first, axis=1, keepdims=True)
    second = second - (first * second).sum(axis=1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], axis=1)
