"""Data types that all packages share, such as observations and action chunks.

Plain frozen dataclasses over numpy arrays; nothing here imports torch, ROS or a DDS library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_NO_NUMBERS: FloatArray = np.zeros(0)


@dataclass(frozen=True)
class JointState:
    """Measured joints, as in ``sensor_msgs/JointState``."""

    names: tuple[str, ...]  # N joint names
    positions: FloatArray  # float64 [N], radians (revolute) or metres (prismatic)
    stamp: int  # nanoseconds of the ROS clock at the measurement
    # Float64 [N], rad/s or m/s; empty if the driver sets no velocities.
    velocities: FloatArray = field(default_factory=lambda: _NO_NUMBERS)
    # Float64 [N], Nm or N; empty if the driver sets no efforts.
    efforts: FloatArray = field(default_factory=lambda: _NO_NUMBERS)
    publisher: bytes = b""  # its id; empty if unknown, or if several publish the arm's joints

    def select(self, names: tuple[str, ...], what: str = "positions") -> FloatArray:
        """Return the positions of ``names`` in that order, float64 [len(names)].

        ``what`` selects ``velocities`` or ``efforts`` instead.

        Raises:
            KeyError: A joint is not measured, or the driver does not publish the selected values.
        """
        index = {name: position for position, name in enumerate(self.names)}
        missing = [name for name in names if name not in index]
        if missing:
            raise KeyError(f"joint state lacks {missing}; it has {list(self.names)}")
        values: FloatArray = getattr(self, what)
        if len(values) != len(self.names):
            raise KeyError(f"joint state has {len(self.names)} joints and {len(values)} {what}")
        return values[[index[name] for name in names]]


@dataclass(frozen=True, eq=False)
class CropTaps:
    """Taps of a crop along one axis: each sample interpolates between two source samples."""

    below: NDArray[np.intp]  # intp [target], position of the lower source sample
    above: NDArray[np.intp]  # intp [target], position of the upper source sample
    share: NDArray[np.float32]  # float32 [target], weight of the upper source sample


@dataclass(frozen=True, eq=False)
class FixedPointResize:
    """Pillow's resize along one axis: each of M samples is an integer sum over K source samples."""

    axis: int  # 0 for rows, 1 for columns
    positions: NDArray[np.int64]  # int64 [K, M], position in the source of tap k of sample m
    weights: NDArray[np.int32]  # int32 [K, M], multiples of 2^-22; zero where a sample has fewer taps


@dataclass(frozen=True, eq=False)
class BilinearCrop:
    """``tf.image.crop_and_resize``: columns first, each operation on [0, 1] rounded to float32."""

    rows: CropTaps
    columns: CropTaps


@dataclass(frozen=True)
class Padding:
    """Pads the image with black."""

    size: tuple[int, int]  # (height, width) of the result
    corner: tuple[int, int]  # (row, column) at which the image begins


@dataclass(frozen=True, eq=False)
class FloatResize:
    """A float32 resize, rows first, rounded half to even; adds the taps in order, as TensorFlow does."""

    # Positions (intp) and weights (float32) of each sample's taps, each [target height, taps].
    rows: tuple[NDArray[np.intp], NDArray[np.float32]]
    columns: tuple[NDArray[np.intp], NDArray[np.float32]]  # the same with [target width, taps]


@dataclass(frozen=True)
class JpegRoundTrip:
    """Encodes images of ``size`` as JPEG and decodes them again, with TensorFlow's default settings."""

    size: tuple[int, int]


@dataclass(frozen=True)
class BilinearPad:
    """A bilinear resize with float32 results in [0, 1], put on black at ``corner``."""

    rows: CropTaps
    columns: CropTaps
    size: tuple[int, int]  # (height, width) with the padding
    corner: tuple[int, int]  # (row, column) of the resized image


Resampling = tuple[FixedPointResize | BilinearCrop | FloatResize | Padding | JpegRoundTrip | BilinearPad, ...]
"""Steps in order; each but the last named rounds to uint8 as the step's implementation on the host does."""


class ImageProcessor(ABC):
    """Converts a camera image to the form that a checkpoint was trained on.

    Implementations are frozen dataclasses; equal processors produce equal images.

    Attributes:
        size: (height, width) of the result in pixels.
        floating: True if a device's result is float32 in [0, 1] instead of uint8.
    """

    size: tuple[int, int]
    floating: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, image: UInt8Array) -> UInt8Array:
        """Convert uint8 [H, W, 3] RGB, upright, to uint8 [*size, 3] RGB.

        Raises:
            ImageError: ``image`` is not uint8 [H, W, 3], or is empty.
        """

    def resampling(self, source: tuple[int, int]) -> Resampling | None:
        """Return resampling steps that yield identical bits on every device; None if only the host can resample.

        Args:
            source: (height, width) of the upright image.
        """
        return None


@dataclass(frozen=True, eq=False)
class RawImage:
    """A decoded camera image before its orientation and processor are applied."""

    pixels: UInt8Array  # uint8 [H, W, 3] RGB as decoded; often a view of the message, so read-only
    orientation: str = "none"  # as ``camera.orientation``
    processor: ImageProcessor | None = None  # applied after the orientation; None: no processing
    stamp: int = 0  # nanoseconds of the ROS clock at exposure


@dataclass(frozen=True, eq=False)
class PreviousChunk:
    """The rest of the chunk that is being executed, for a policy that continues it (real-time chunking)."""

    # Float64 [T, D], un-normalised as in :attr:`ActionChunk.actions`; the first is due at the time of the
    # observation.
    actions: FloatArray
    delay: int  # number of actions that will have been executed when the new chunk arrives, at most T
    guided: int = 0  # actions after those that guide the new chunk; 0: as the policy's options say


@dataclass(frozen=True)
class Observation:
    """The input of a policy: images, state vectors and the instruction, named as in its spec."""

    # Key to uint8 [H, W, 3] RGB, after orientation and image processor; [T, H, W, 3] at T times, oldest first.
    images: Mapping[str, UInt8Array]
    instruction: str  # the command in natural language
    stamp: int  # nanoseconds of the ROS clock at which the first image was taken
    # Key to float64 [N]; [T, N] at T times, oldest first.
    state: Mapping[str, FloatArray] = field(default_factory=lambda: _EMPTY)
    # Unprocessed images of features without past values, for a policy that processes them on its network's
    # device; may be empty.
    raw_images: Mapping[str, RawImage] = field(default_factory=lambda: _EMPTY)
    # Initial noise of a sampling policy (``PolicySpec.noise``); None lets the policy draw it.
    noise: FloatArray | None = None
    # The chunk to continue, for a policy with ``PolicySpec.continues_chunks``; None starts a new one.
    previous: PreviousChunk | None = None
    # Key to float32 [H, W, 3]: where each pixel's surface is, metres in ``robot.base_frame``; NaN where unknown.
    points: Mapping[str, Float32Array] = field(default_factory=lambda: _EMPTY)
    # Key to float32 [H, W]: how far each pixel's surface is along the optical axis, metres; NaN where unknown.
    depth: Mapping[str, Float32Array] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class ActionChunk:
    """The result of one inference: K actions to be executed in order."""

    actions: FloatArray  # float64 [K, D], un-normalised: metres, radians and the dataset's gripper convention
    stamp: int  # stamp of the observation, nanoseconds
    # Float64 [K, D] before un-normalisation, nominally in [-1, 1]; None if the policy does not normalise.
    normalized: FloatArray | None = None
    tokens: IntArray | None = None  # int64 action tokens in decoding order; None for policies without tokens
    # Stage name to milliseconds (``preprocess``, ``vision``, ``prefill``, ``decode``, ...).
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    # Further figures for reports (logit margins, draft acceptance). ``outside_bins`` counts tokens that are not
    # action tokens; ``/diagnostics`` warns about them.
    info: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
