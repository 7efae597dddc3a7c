"""Camera frames to pictures of the network's size, on the device: one copy to it, everything else there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_ros.engine.preprocess import Pipeline, make_pipeline
from vla_ros.engine.runner import Runner
from vla_ros.errors import ConfigError
from vla_ros.types import CameraFrame, UInt8Array
from vla_ros.vision import pipelines
from vla_ros.vision.geometry import make_orientation

_KEPT = 8  # kinds of frames: cameras of one batch, and what a camera was set to before
_Kind = tuple[int, tuple[int, ...], str, str, float]


def resized_on_host(frame: CameraFrame, size: tuple[int, int]) -> UInt8Array:
    """What :mod:`vla_ros.vision` makes of a frame: uint8 [height, width, 3]; what the device must come up to."""
    return pipelines.make_pipeline(frame.pipeline, size, frame.crop_area)(
        make_orientation(frame.orientation)(frame.pixels)
    )


@dataclass(frozen=True, eq=False)
class Place:
    """What frames of one kind need: a buffer on the device, and what makes a picture of it."""

    pixels: Tensor  # uint8 [1, H, W, 3]
    pipeline: Pipeline


class FrameResizer:
    """Uploads frames and makes pictures of them. One thread uses it.

    Buffers and weights are made when the first frame of a size comes, which takes some milliseconds once; a camera
    may change its resolution at any time.

    Args:
        size: (height, width) of the pictures.
        device: Where they are wanted.
        runner: Its uploads; both methods run on its stream.
    """

    def __init__(self, size: tuple[int, int], device: torch.device, runner: Runner) -> None:
        self._size, self._device, self._runner = size, device, runner
        self._places: OrderedDict[_Kind, Place] = OrderedDict()  # the one that was used last stands last

    def upload(self, frames: Sequence[CameraFrame]) -> list[Place]:
        """Start to copy; the frames' memory may be changed at once.

        Raises:
            ImageError: A frame is not uint8 [H, W, 3] with pixels.
            ConfigError: The pipeline or orientation is unknown, or not one that the device can do alone.
        """
        places = []
        for index, frame in enumerate(frames):
            pipelines.require_picture(frame.pixels)
            place = self._place(index, frame)
            self._runner.upload(place.pixels, frame.pixels)
            places.append(place)
        self._keep(max(_KEPT, len(frames)))
        return places

    def resize(self, places: Sequence[Place], target: Tensor) -> None:
        """Turn, crop and resize what was uploaded, into uint8 [B, height, width, 3]."""
        for row, place in enumerate(places):
            target[row] = place.pipeline(place.pixels)[0]

    def clear(self) -> None:
        """Free the buffers."""
        self._keep(0)

    def _place(self, index: int, frame: CameraFrame) -> Place:
        shape = frame.pixels.shape
        # The index: two frames of one batch must not share a buffer.
        kind = (index, shape, frame.orientation, frame.pipeline, frame.crop_area)
        if kind not in self._places:
            if frame.pipeline == "libero":
                raise ConfigError("camera.pipeline: libero's JPEG is the host's; hand its pictures over resized")
            pipeline = make_pipeline(
                frame.pipeline, (shape[0], shape[1]), self._size, self._device, frame.crop_area, frame.orientation
            )
            pixels = torch.empty((1, *shape), dtype=torch.uint8, device=self._device)
            self._places[kind] = Place(pixels, pipeline)
        self._places.move_to_end(kind)
        return self._places[kind]

    def _keep(self, count: int) -> None:
        """Free what was not used for longest: a camera that changes often must not fill the memory."""
        while len(self._places) > count:
            _, oldest = self._places.popitem(last=False)
            self._runner.forget(oldest.pixels)
