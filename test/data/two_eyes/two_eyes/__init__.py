"""Moves forward in proportion to how much brighter the front camera has become, sideways by what the wrist sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.config import Config, PolicyConfig
from vla_ros.config.options import option
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import ImageError
from vla_ros.policies import Policy, Session
from vla_ros.policies.base import options_of
from vla_ros.types import ActionChunk, ImageProcessor, Observation, UInt8Array
from vla_ros.vision.processors import ResizeNaive

__all__ = ["EveryOther", "TwoEyes", "TwoEyesOptions"]


@dataclass(frozen=True)
class TwoEyesOptions(PolicyConfig):
    """Options of this policy."""

    gain: float = option(0.001, "Metres per level of brightness", unit="m", low=0.0, high=0.1, live=True)
    side: int = option(8, "Side of the wrist camera's image", unit="px", low=1, high=512)


@dataclass(frozen=True)
class EveryOther(ImageProcessor):
    """Every n-th pixel of an image: a processor that only this package has."""

    size: tuple[int, int]

    def __call__(self, image: UInt8Array) -> UInt8Array:
        """Take them."""
        (height, width), (rows, columns) = image.shape[:2], self.size
        if height < rows or width < columns:
            raise ImageError(f"found an image of {width}x{height}, expected at least {columns}x{rows}")
        return np.ascontiguousarray(image[:: height // rows, :: width // columns][:rows, :columns])


@dataclass
class Memory(Session):
    """Of one robot: how bright the front was, and how often it was asked."""

    brightness: float = float("nan")
    steps: int = 0

    def reset(self) -> None:
        """A new episode."""
        self.brightness, self.steps = float("nan"), 0


class TwoEyes(Policy):
    """Needs the images ``front`` and ``wrist``; answers with two end-effector deltas."""

    Options = TwoEyesOptions

    @staticmethod
    def claims(config: Mapping[str, Any]) -> int:
        """Its checkpoints look like LeRobot's, and say that they are its own."""
        return 2 * (config.get("type") == "two_eyes")

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, TwoEyesOptions)
        side = self._options.side
        self.spec = PolicySpec(
            (ImageFeature("front", ResizeNaive((20, 30))), ImageFeature("wrist", EveryOther((side, side)))),
            horizon=2,
        )

    def configure(self, options: PolicyConfig) -> None:
        """The gain may change while running."""
        assert isinstance(options, TwoEyesOptions)
        self._options = options

    def start_session(self) -> Memory:
        """Of one robot."""
        return Memory()

    def infer(self, session: Memory, observation: Observation) -> ActionChunk:
        """Compare the front with what this robot saw before."""
        front, wrist = observation.images["front"], observation.images["wrist"]
        if front.shape != (20, 30, 3) or wrist.shape != (self._options.side, self._options.side, 3):
            raise ImageError(f"found {front.shape} and {wrist.shape}, expected each processor's own size")
        brightness = float(front.mean())
        change = 0.0 if session.steps == 0 else brightness - session.brightness
        session.brightness, session.steps = brightness, session.steps + 1
        step = [self._options.gain * change, 1e-5 * float(wrist.mean()), 0.0, 0.0, 0.0, 0.0, 1.0]
        actions = np.array([step, step])
        return ActionChunk(actions, observation.stamp, info={"steps": session.steps})
