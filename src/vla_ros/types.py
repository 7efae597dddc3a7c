"""What crosses a boundary between rooms: observations in, action chunks out.

Plain frozen dataclasses over numpy arrays; nothing here imports torch, ROS or a DDS library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class ControlMode(str, Enum):
    """What the numbers of one action mean (the gripper entry apart).

    ``END_EFFECTOR_DELTA``: metres and radians by which the end effector moves, ``[dx, dy, dz, droll, dpitch,
    dyaw, gripper]`` (OpenVLA, Bridge and LIBERO checkpoints). ``JOINT_POSITION``: absolute joint positions in
    radians or metres (ALOHA). ``JOINT_DELTA``: joint position changes in radians or metres.
    """

    END_EFFECTOR_DELTA = "end_effector_delta"
    JOINT_POSITION = "joint_position"
    JOINT_DELTA = "joint_delta"


@dataclass(frozen=True)
class JointState:
    """Measured joint positions of the robot, as ``sensor_msgs/JointState`` carries them.

    Attributes:
        names: Joint names, N of them.
        positions: Float64 [N], radians (revolute) or metres (prismatic).
        stamp: Nanoseconds of the ROS clock at the measurement.
    """

    names: tuple[str, ...]
    positions: FloatArray
    stamp: int

    def select(self, names: tuple[str, ...]) -> FloatArray:
        """Positions of ``names`` in that order, float64 [len(names)].

        Raises:
            KeyError: A name is not among the measured joints; the message lists those that are.
        """
        index = {name: position for position, name in enumerate(self.names)}
        missing = [name for name in names if name not in index]
        if missing:
            raise KeyError(f"joint state lacks {missing}; it has {list(self.names)}")
        return self.positions[[index[name] for name in names]]


@dataclass(frozen=True, eq=False)
class CropTaps:
    """Along one axis of a crop: each sample lies between two of the source.

    Attributes:
        below: Intp [target], position of the one.
        above: Intp [target], of the other.
        share: Float32 [target], how much of the other.
    """

    below: NDArray[np.intp]
    above: NDArray[np.intp]
    share: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FixedPointResize:
    """Pillow's resize along one axis: each of M samples is a sum over K samples of the source, in integers.

    Attributes:
        axis: 0 for rows, 1 for columns.
        positions: Int64 [K, M], where tap k of sample m lies in the source.
        weights: Int32 [K, M], multiples of 2^-22; zero where a sample has fewer taps.
    """

    axis: int
    positions: NDArray[np.int64]
    weights: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BilinearCrop:
    """``tf.image.crop_and_resize`` along both axes, columns first, in single float32 operations on [0, 1]."""

    rows: CropTaps
    columns: CropTaps


Resampling = tuple[FixedPointResize | BilinearCrop, ...]
"""Steps one after the other, each rounded to uint8 as its host version rounds."""


class ImageProcessor(ABC):
    """Brings an image to what a checkpoint saw in training.

    Implementations are frozen dataclasses: two that are equal do the same.

    Attributes:
        size: (height, width) of the result in pixels.
    """

    size: tuple[int, int]

    @abstractmethod
    def __call__(self, image: UInt8Array) -> UInt8Array:
        """Uint8 [H, W, 3] RGB, upright, to uint8 [*size, 3] RGB.

        Raises:
            ImageError: ``image`` is not uint8 [H, W, 3] with pixels.
        """

    def resampling(self, source: tuple[int, int]) -> Resampling | None:
        """The same as resampling steps that any device does to the bit; None where the host alone can do it.

        Args:
            source: (height, width) of the upright image.
        """
        return None


@dataclass(frozen=True, eq=False)
class RawImage:
    """A decoded camera image, and what turns it into the one that the checkpoint saw in training.

    Attributes:
        pixels: Uint8 [H, W, 3] RGB, decoded and no more; often a view of the message, so read-only.
        orientation: As ``camera.orientation``.
        processor: Follows the orientation; None leaves the image at its size.
        stamp: Nanoseconds of the ROS clock at exposure.
    """

    pixels: UInt8Array
    orientation: str = "none"
    processor: ImageProcessor | None = None
    stamp: int = 0


@dataclass(frozen=True)
class Observation:
    """What a policy is asked about: the images as the checkpoint saw them in training, and the instruction.

    Attributes:
        images: Key (``ActionSpec.image_keys``) to uint8 [H, W, 3] RGB, after orientation and image processor.
        instruction: The command in natural language.
        stamp: Nanoseconds of the ROS clock at which the (first) image was taken.
        joints: Newest joint state at that moment, or None where the policy needs none.
        state: Further named measurements by feed (``ActionSpec.state_keys``), with their own stamps.
        raw_images: The same before all that, for a policy that does it where its network runs; may be empty.
    """

    images: Mapping[str, UInt8Array]
    instruction: str
    stamp: int
    joints: JointState | None = None
    state: Mapping[str, JointState] = field(default_factory=lambda: _EMPTY)
    raw_images: Mapping[str, RawImage] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class ActionChunk:
    """One answer of a policy: K actions to be executed one after the other.

    Attributes:
        actions: Float64 [K, D], un-normalised: metres, radians and the dataset's gripper convention.
        stamp: Stamp of the observation that it answers, nanoseconds.
        normalized: Float64 [K, D] before un-normalisation, nominally in [-1, 1]; None where it does not exist.
        tokens: Int64 action tokens in decoding order; None for policies without tokens.
        stages_ms: Stage name to milliseconds (``preprocess``, ``vision``, ``prefill``, ``decode``, ...).
        info: Anything else that reports may show (logit margins, draft acceptance). ``outside_bins`` counts tokens
            that were no action tokens; ``/diagnostics`` warns of them.
    """

    actions: FloatArray
    stamp: int
    normalized: FloatArray | None = None
    tokens: IntArray | None = None
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    info: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class ActionSpec:
    """What a policy expects and returns; fixed once it is loaded.

    Attributes:
        dimension: D, numbers in one action (7 for OpenVLA).
        horizon: K, actions in one chunk (1 for OpenVLA, 8 for OpenVLA-OFT on LIBERO).
        control_mode: What the numbers mean.
        gripper_index: Position of the gripper in an action, or None.
        image_keys: Names of the images that it needs, in order.
        processors: Name to what the image goes through; one without an entry keeps the camera's size.
        state_keys: Extra feeds that it needs in ``Observation.state``.
        needs_joints: True where it reads ``Observation.joints``.
        rate_hz: Control rate of its training data in hertz, or None where unknown.
    """

    dimension: int = 7
    horizon: int = 1
    control_mode: ControlMode = ControlMode.END_EFFECTOR_DELTA
    gripper_index: int | None = 6
    image_keys: tuple[str, ...] = ("image",)
    processors: Mapping[str, ImageProcessor] = field(default_factory=dict)
    state_keys: tuple[str, ...] = ()
    needs_joints: bool = False
    rate_hz: float | None = None
