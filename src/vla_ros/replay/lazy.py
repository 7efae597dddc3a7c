"""The stepper of replay: frames are decoded and checked as live, but resized only when the policy looks at them.

A policy that answers without looking (``hold``, an open-loop baseline) then costs no resize, and the time that the
resize takes is still told as ``preprocess`` for those that do look. What a policy sees is the same to the pixel.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from vla_ros.control.inputs import Snapshot
from vla_ros.policies.base import Progress, no_progress
from vla_ros.stepper import Stepper, Trip
from vla_ros.types import JointState, Observation, UInt8Array
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.preprocess import Prepared, Preprocessor


class Pictures(Mapping[str, UInt8Array]):
    """Picture key to uint8 [H, W, 3], each prepared when it is first asked for.

    Attributes:
        prepared: How many were.
        spent_ms: Milliseconds that it took.
    """

    def __init__(self, makers: Mapping[str, Callable[[], UInt8Array]]) -> None:
        self._makers = makers
        self._made: dict[str, UInt8Array] = {}
        self.spent_ms = 0.0

    @property
    def prepared(self) -> int:
        """How many pictures were prepared."""
        return len(self._made)

    def __getitem__(self, key: str) -> UInt8Array:
        if key not in self._made:
            began = time.perf_counter()
            self._made[key] = self._makers[key]()
            self.spent_ms += 1e3 * (time.perf_counter() - began)
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class _Deferring(Preprocessor):
    """Decodes at once; in place of the prepared picture it gives a function that prepares it."""

    def __call__(self, cdr: CdrBytes, camera_index: int = 0) -> Prepared:
        frame = self._decode(cdr)
        height, width, _ = frame.image.shape
        later: Any = lambda: self.prepare(frame.image, camera_index)  # noqa: E731 - LazyStepper unpacks it
        return Prepared(later, frame.stamp, (height, width), frame)


class LazyStepper(Stepper):
    """A stepper whose observations hold :class:`Pictures`."""

    def load(self, progress: Progress = no_progress) -> None:
        """As :meth:`Stepper.load`."""
        super().load(progress)
        self._preprocessor = _Deferring(self._config.camera, self.spec.image_size)

    def observe(self, frames: Sequence[CdrBytes | None], inputs: Snapshot) -> Observation:
        """As :meth:`Stepper.observe`; pictures are prepared when they are looked at."""
        observation = super().observe(frames, inputs)
        makers = cast("Mapping[str, Callable[[], UInt8Array]]", observation.images)
        return dataclasses.replace(observation, images=Pictures(makers))

    def trip(
        self,
        frames: Sequence[CdrBytes | None],
        inputs: Snapshot,
        dt: float,
        reference: JointState | None = None,
        newest: Callable[[], JointState | None] | None = None,
    ) -> Trip:
        """As :meth:`Stepper.trip`, the time of preparing booked where it belongs."""
        done = super().trip(frames, inputs, dt, reference, newest)
        spent = done.observation.images.spent_ms if done.observation is not None else 0.0  # type: ignore[attr-defined]
        if not spent:
            return done
        stages = dict(done.stages_ms)
        stages["preprocess"] += spent
        stages["inference"] -= spent
        return dataclasses.replace(done, stages_ms=stages)
