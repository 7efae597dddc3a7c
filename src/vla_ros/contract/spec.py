"""What a policy needs and returns: named features, fixed once it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vla_ros.contract.parts import FEED, MOTIONS, Part
from vla_ros.errors import ConfigError
from vla_ros.types import ImageProcessor


@dataclass(frozen=True)
class Moment:
    """When a feature is measured, counted back from now."""

    steps: int = 0  # control steps (of :attr:`PolicySpec.rate_hz`, else ``control.rate_hz``) ago; not negative
    seconds: float = 0.0  # seconds ago, instead of steps; not negative


NOW = (Moment(),)


@dataclass(frozen=True)
class ImageFeature:
    """An image that the policy takes."""

    key: str  # the policy's name for it
    # Its image processor; None keeps the camera's size, or pads to ``size``.
    processor: ImageProcessor | None = None
    moments: tuple[Moment, ...] = NOW  # oldest first. With one the image is [H, W, 3], with T of them [T, H, W, 3].
    required: bool = True  # False if the policy also works without it (a camera that it masks)
    camera: str = ""  # the one of ``camera.keys`` that provides it; "" for the one of the same name
    size: tuple[int, int] | None = None  # (height, width) that the policy takes, if it names no processor

    @property
    def source(self) -> str:
        """The one of ``camera.keys`` that provides it; an optional image may have none."""
        return self.camera or self.key


@dataclass(frozen=True)
class StateFeature:
    """A state vector that the policy takes: the concatenation of its parts."""

    key: str  # the policy's name for it
    parts: tuple[Part, ...] = ()  # what its numbers are; empty if ``features.state`` must say
    size: int = 0  # N, how many numbers the checkpoint expects; 0 for any
    moments: tuple[Moment, ...] = NOW  # oldest first. With one the state is [N], with T of them [T, N].


@dataclass(frozen=True)
class PolicySpec:
    """What a policy needs and returns."""

    # In the policy's order; empty takes those of ``features.images`` (else ``camera.keys``).
    images: tuple[ImageFeature, ...] = (ImageFeature("image"),)
    state: tuple[StateFeature, ...] = ()  # state vectors, in the policy's order
    # What the D numbers of one action are; empty if ``features.action`` must say.
    action: tuple[Part, ...] = (Part("arm", "tip_delta"), Part("arm", "gripper"))
    dimension: int = 7  # D; 0 if it follows from the action's parts
    horizon: int = 1  # K, actions in one chunk
    rate_hz: float | None = None  # control rate of its training data in hertz; None if unknown
    open: bool = False  # True if it takes all state vectors that ``features.state`` names, besides its own
    noise: tuple[int, ...] = ()  # shape of what it samples from; empty if it does not sample
    continues_chunks: bool = False  # True if it takes ``Observation.previous`` (real-time chunking)

    @property
    def image_keys(self) -> tuple[str, ...]:
        """The policy's names for its images."""
        return tuple(image.key for image in self.images)

    @property
    def processors(self) -> Mapping[str, ImageProcessor]:
        """Image key to processor, for images that have one."""
        return {image.key: image.processor for image in self.images if image.processor is not None}

    @property
    def feeds(self) -> tuple[str, ...]:
        """Feeds of ``robot.state_topics`` used by the state vectors, each once."""
        return tuple(dict.fromkeys(part.form for one in self.state for part in one.parts if part.quantity == FEED))

    @property
    def motion(self) -> str:
        """The quantity of :data:`MOTIONS` that moves every arm; "" if arms differ."""
        found = {part.quantity for part in self.action if part.quantity in MOTIONS}
        return found.pop() if len(found) == 1 else ""

    @property
    def grippers(self) -> tuple[int, ...]:
        """Columns of the action that open and close grippers."""
        if not self.action:
            return ()
        return tuple(columns.start for part, columns in self.columns() if part.quantity == "gripper")

    @property
    def gripper(self) -> int | None:
        """The column of the gripper; None unless there is exactly one."""
        return self.grippers[0] if len(self.grippers) == 1 else None

    def columns(self, joints: Mapping[str, int] = MappingProxyType({})) -> tuple[tuple[Part, slice], ...]:
        """Return every part of the action with its columns; raises ConfigError if they do not add up to D.

        ``joints`` is arm to number of joints. Other arms share the remaining numbers of D evenly.
        """
        known = [part.size(joints.get(part.arm, 0)) for part in self.action]
        left, open_parts = self.dimension - sum(known), known.count(0)
        if open_parts:
            share, left = divmod(left, open_parts)
            known = [size or share for size in known]
        if left or min(known, default=1) < 1:
            numbers = " + ".join(f"{part} ({size})" for part, size in zip(self.action, known, strict=True))
            raise ConfigError(
                f"the policy's actions have {self.dimension} numbers, found {numbers or 'nothing'} for them "
                "(features.action)"
            )
        starts = [sum(known[:index]) for index in range(len(known))]
        return tuple(
            (part, slice(start, start + size)) for part, start, size in zip(self.action, starts, known, strict=True)
        )
