"""What a policy needs and answers: named features, fixed once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.contract.parts import Part
from vla_ros.types import ImageProcessor


@dataclass(frozen=True)
class Moment:
    """When a feature is measured, counted back from now.

    Attributes:
        steps: Control steps (of :attr:`PolicySpec.rate_hz`, else ``control.rate_hz``) ago; 0 or positive.
        seconds: Seconds ago, in place of steps; 0 or positive.
    """

    steps: int = 0
    seconds: float = 0.0


NOW = (Moment(),)


@dataclass(frozen=True)
class ImageFeature:
    """An image that the policy takes.

    Attributes:
        key: The policy's name for it, one of ``camera.keys``.
        processor: What it goes through; None leaves the camera's size.
        moments: Oldest first. With one the image is [H, W, 3], with T of them [T, H, W, 3].
        required: False where the policy answers without it, too (a camera that it masks).
    """

    key: str
    processor: ImageProcessor | None = None
    moments: tuple[Moment, ...] = NOW
    required: bool = True


@dataclass(frozen=True)
class StateFeature:
    """A state vector that the policy takes: its parts one after the other.

    Attributes:
        key: The policy's name for it.
        parts: What its numbers are; empty where the checkpoint does not say and ``features.state`` must.
        size: N, how many numbers the checkpoint expects; 0 where any.
        moments: Oldest first. With one the state is [N], with T of them [T, N].
    """

    key: str
    parts: tuple[Part, ...] = ()
    size: int = 0
    moments: tuple[Moment, ...] = NOW


@dataclass(frozen=True)
class PolicySpec:
    """What a policy needs and answers.

    Attributes:
        images: In the policy's order; one at least.
        state: State vectors, in the policy's order.
        action: What the D numbers of one action are; empty where the checkpoint does not say and
            ``features.action`` must.
        dimension: D.
        horizon: K, actions in one chunk.
        rate_hz: Control rate of its training data in hertz; None where unknown.
    """

    images: tuple[ImageFeature, ...] = (ImageFeature("image"),)
    state: tuple[StateFeature, ...] = ()
    action: tuple[Part, ...] = (Part("arm", "tip_delta", "euler_xyz"), Part("arm", "gripper", "0..1"))
    dimension: int = 7
    horizon: int = 1
    rate_hz: float | None = None
