"""The inputs and outputs of a policy: named features, fixed once the policy is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from vla_ros.contract.components import MOTIONS, TOPIC, Component
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray, ImageProcessor


@dataclass(frozen=True)
class DeltaTimestamp:
    """When a feature is measured, relative to the inference's frame, as in LeRobot: zero or negative."""

    steps: int = 0  # control steps, at :attr:`PolicySpec.rate_hz` or else ``control.rate_hz``
    seconds: float = 0.0  # instead of steps


NOW = (DeltaTimestamp(),)


@dataclass(frozen=True)
class ImageFeature:
    """An image that the policy takes."""

    key: str  # the policy's name for the image
    # The image processor; None keeps the camera's size, or resizes with padding to ``size``.
    processor: ImageProcessor | None = None
    # Oldest first; the shape is [H, W, 3] for one, [T, H, W, 3] for T.
    delta_timestamps: tuple[DeltaTimestamp, ...] = NOW
    required: bool = True  # False if the policy masks a missing image
    camera: str = ""  # a name of ``camera.keys``; "" if the camera has the name of the image
    size: tuple[int, int] | None = None  # (height, width) for a policy without an image processor
    takes: tuple[int, int] | None = None  # (height, width) of the only size that the policy accepts

    @property
    def source(self) -> str:
        """Key of the camera in ``camera.keys``; for an optional image, the camera may be missing."""
        return self.camera or self.key


@dataclass(frozen=True)
class StateFeature:
    """A state vector that the policy takes: the concatenation of its components."""

    key: str  # the policy's name for the vector
    components: tuple[Component, ...] = ()  # empty if ``features.state`` must name them
    size: int = 0  # N, numbers that the checkpoint expects; 0 for any
    delta_timestamps: tuple[DeltaTimestamp, ...] = NOW  # oldest first; the shape is [N] for one, [T, N] for T
    # Middle of the training data (mean, or middle of the bounds), [N]; empty if the checkpoint does not state it.
    middle: tuple[float, ...] = ()
    largest: tuple[float, ...] = ()  # largest magnitude of each number in the training data, [N]; empty if unknown
    parts: tuple[tuple[str, int], ...] = ()  # the policy's vectors that this one holds in turn; empty: only itself

    def split(self, values: FloatArray) -> dict[str, FloatArray]:
        """Return the policy's vectors [..., N] by name."""
        if not self.parts:
            return {self.key: values}
        ends = np.cumsum([size for _, size in self.parts])
        return dict(zip((key for key, _ in self.parts), np.split(values, ends[:-1], axis=-1), strict=True))


@dataclass(frozen=True)
class PolicySpec:
    """Inputs and outputs of a policy."""

    # Images in the policy's order; if empty, those of ``features.images``, or else one for each of ``camera.keys``.
    images: tuple[ImageFeature, ...] = (ImageFeature("image"),)
    state: tuple[StateFeature, ...] = ()  # state vectors, in the policy's order
    # Parts of the D numbers of an action; empty if ``features.action`` must name them.
    action: tuple[Component, ...] = (Component("arm", "tip_delta"), Component("arm", "gripper"))
    dimension: int = 7  # D; 0 if it follows from the action's components
    horizon: int = 1  # K, actions in one chunk
    # Actions to execute before the next inference, as the checkpoint or its published evaluation says; 0: all.
    execute_steps: int = 0
    rate_hz: float | None = None  # control rate of the training data in hertz; None if unknown
    takes_any_state: bool = False  # True if it takes all state vectors of ``features.state`` besides ``state``
    noise: tuple[int, ...] = ()  # shape of the noise that the policy starts from; empty if it does not sample
    continues_chunks: bool = False  # True if the policy takes ``Observation.previous`` (real-time chunking)
    uses_instruction: bool = True  # False if the policy ignores the instruction
    # m of ACT's temporal ensembling (weights exp(-m i), i = 0 for the oldest chunk); None: the checkpoint has none
    ensemble_decay: float | None = None
    view: str = ""  # SHA-256 of the viewpoint adapter's file that is part of the weights; empty without one
    # (key of an image, key of its points): where each pixel's surface is (``Observation.points``)
    points: tuple[tuple[str, str], ...] = ()
    # (key of an image, key of its depth image): how far each pixel's surface is (``Observation.depth``)
    depth: tuple[tuple[str, str], ...] = ()

    @property
    def image_keys(self) -> tuple[str, ...]:
        return tuple(image.key for image in self.images)

    @property
    def processors(self) -> Mapping[str, ImageProcessor]:
        """Image key to processor, for images that have one."""
        return {image.key: image.processor for image in self.images if image.processor is not None}

    @property
    def state_topics(self) -> tuple[str, ...]:
        """Names of ``robot.state_topics`` that the state vectors use, without duplicates."""
        return tuple(
            dict.fromkeys(
                component.form for one in self.state for component in one.components if component.quantity == TOPIC
            )
        )

    @property
    def motion(self) -> str:
        """The quantity of :data:`MOTIONS` that moves every arm; "" if arms differ."""
        motions = {component.quantity for component in self.action if component.quantity in MOTIONS}
        return motions.pop() if len(motions) == 1 else ""

    @property
    def grippers(self) -> tuple[int, ...]:
        """Columns of the action that open and close grippers."""
        if not self.action:
            return ()
        return tuple(columns.start for component, columns in self.columns() if component.quantity == "gripper")

    @property
    def gripper(self) -> int | None:
        """Column of the action for the only gripper; None unless there is exactly one gripper."""
        return self.grippers[0] if len(self.grippers) == 1 else None

    def columns(self, joints: Mapping[str, int] = MappingProxyType({})) -> tuple[tuple[Component, slice], ...]:
        """Return every component of the action with its columns; raises ConfigError if they do not add up to D.

        ``joints`` maps arms to their numbers of joints. Arms without an entry share the remaining columns evenly.
        """
        sizes = [component.size(joints.get(component.arm, 0)) for component in self.action]
        left, unsized = self.dimension - sum(sizes), sizes.count(0)
        if unsized:
            share, left = divmod(left, unsized)
            sizes = [size or share for size in sizes]
        if left or min(sizes, default=1) < 1:
            numbers = " + ".join(
                f"{component} ({size})" for component, size in zip(self.action, sizes, strict=True)
            )
            raise ConfigError(
                f"the policy's actions have {self.dimension} numbers, found {numbers or 'nothing'} in "
                "features.action"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(
            (component, slice(start, start + size))
            for component, start, size in zip(self.action, starts, sizes, strict=True)
        )
