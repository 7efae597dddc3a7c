"""Camera frames to pictures of the network's size, on the device: one copy to it, everything else there."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_ros.engine.resample import Pipeline, make_pipeline
from vla_ros.engine.runner import Runner, Stage
from vla_ros.errors import ConfigError
from vla_ros.types import ImageProcessor, RawImage
from vla_ros.vision.processors import require_image

logger = logging.getLogger(__name__)

_KEPT = 8  # kinds of frames: cameras of one batch, and what a camera was set to before
_Kind = tuple[int, tuple[int, ...], str, ImageProcessor | None]


def on_device(raw: RawImage) -> bool:
    """True where the device makes the same of an image as the host."""
    height, width = raw.pixels.shape[:2]
    return raw.processor is not None and raw.processor.resampling((height, width)) is not None


@dataclass(eq=False)
class Place:
    """What frames of one kind need: a buffer on the device, and what makes a picture of it.

    Attributes:
        pixels: Uint8 [1, H, W, 3].
        pipeline: From those to uint8 [1, height, width, 3].
        captured: The same as one launch that leaves its picture in ``picture``; None before it is captured.
        picture: Uint8 [height, width, 3], written by nothing but ``captured``.
    """

    pixels: Tensor
    pipeline: Pipeline
    captured: Stage | None = None
    picture: Tensor | None = None


class ImageResizer:
    """Uploads frames and makes pictures of them. One thread uses it.

    Buffers and weights are made when the first frame of a size comes, which takes some milliseconds once; a camera
    may change its resolution at any time. That frame is resized by one launch after the other, while a second
    thread captures them as one graph for the frames that follow.

    Args:
        size: (height, width) of the pictures.
        device: Where they are wanted.
        runner: Its uploads; both methods run on its stream.
        background: False captures in the caller's thread, before the first frame of a size.
    """

    def __init__(
        self, size: tuple[int, int], device: torch.device, runner: Runner, background: bool = True
    ) -> None:
        self._size, self._device, self._runner = size, device, runner
        self._places: OrderedDict[_Kind, Place] = OrderedDict()  # the one that was used last stands last
        self._background = background
        self._worker: ThreadPoolExecutor | None = None
        self._capturing: Future[None] | None = None  # the last that was asked for; they run one after the other

    def upload(self, frames: Sequence[RawImage]) -> list[Place]:
        """Start to copy; the frames' memory may be changed at once.

        Raises:
            ImageError: A frame is not uint8 [H, W, 3] with pixels.
            ConfigError: The pipeline or orientation is unknown, or not one that the device can do alone.
        """
        places = []
        for index, frame in enumerate(frames):
            require_image(frame.pixels)
            place = self._place(index, frame)
            self._runner.upload(place.pixels, frame.pixels)
            places.append(place)
        self._keep(max(_KEPT, len(frames)))
        return places

    def resize(self, places: Sequence[Place], target: Tensor) -> None:
        """Turn, crop and resize what was uploaded, into uint8 [B, height, width, 3]."""
        for row, place in enumerate(places):
            if place.captured is None or place.picture is None:
                target[row] = place.pipeline(place.pixels)[0]
            else:
                place.captured()
                target[row] = place.picture

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being captured; False where that took longer than ``timeout`` seconds."""
        capturing = self._capturing
        return capturing is None or not wait_for([capturing], timeout).not_done

    def clear(self) -> None:
        """Free the buffers."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = self._capturing = None
        self._keep(0)

    def _place(self, index: int, frame: RawImage) -> Place:
        shape, processor = frame.pixels.shape, frame.processor
        # The index: two frames of one batch must not share a buffer.
        kind = (index, shape, frame.orientation, processor)
        if kind not in self._places:
            if processor is None or processor.size != self._size:
                raise ConfigError(f"camera.pipeline: {processor} does not make images of {self._size}")
            pipeline = make_pipeline(processor, (shape[0], shape[1]), self._device, frame.orientation)
            pixels = torch.empty((1, *shape), dtype=torch.uint8, device=self._device)
            self._places[kind] = place = Place(pixels, pipeline)
            self._capture_soon(place)
        self._places.move_to_end(kind)
        return self._places[kind]

    def _capture_soon(self, place: Place) -> None:
        if not self._runner.graphs:
            return
        if not self._background:
            self._capture(place)
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "capture-frames")
        self._capturing = self._worker.submit(self._capture, place)

    def _capture(self, place: Place) -> None:
        """Make one graph of it. That only reads the pixels, which are uploaded meanwhile; its output is its own."""
        picture = torch.zeros((*self._size, 3), dtype=torch.uint8, device=self._device)

        def stage() -> None:
            picture.copy_(place.pipeline(place.pixels)[0])

        try:
            captured = self._runner.capture(stage)
        except Exception as error:
            height, width = place.pixels.shape[1:3]
            logger.warning("frames of %dx%d are resized without a graph: %s", width, height, error)
            return
        # In this order: whoever sees the graph sees its picture.
        place.picture = picture
        place.captured = captured

    def _keep(self, count: int) -> None:
        """Free what was not used for longest: a camera that changes often must not fill the memory."""
        while len(self._places) > count:
            _, oldest = self._places.popitem(last=False)
            self._runner.forget(oldest.pixels)
