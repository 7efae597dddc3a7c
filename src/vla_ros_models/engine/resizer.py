"""Rotates, crops and resizes camera images on the device, bit-identical to the host."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_ros.errors import ConfigError
from vla_ros.types import ImageProcessor, RawImage
from vla_ros.vision.processors import require_image
from vla_ros_models.engine.resample import make_pipeline, resampling_on
from vla_ros_models.engine.runner import Runner

logger = logging.getLogger(__name__)

_KEPT = 8  # slots kept; more if a request has more kinds of images
_Kind = tuple[np.dtype[Any], tuple[int, ...], str, ImageProcessor | None]


def resizes(device: torch.device, raw: RawImage) -> bool:
    """Return True if ``device`` can resize an image bit-identically to the host."""
    height, width = raw.pixels.shape[:2]
    return raw.processor is not None and resampling_on(device, raw.processor, (height, width)) is not None


@dataclass(eq=False)
class Slot:
    """A buffer for N images of one size, orientation and processor, with the launches that resize them."""

    pixels: Tensor  # uint8 [N, H, W, 3]
    buffers: tuple[Tensor, ...]  # its images
    dtype: torch.dtype  # of the resized images
    launches: Callable[[], Tensor]  # resizes to [N, height, width, 3]; owns the tables that ``graph`` reads
    graph: Callable[[], Tensor] | None = None  # the launches as one graph; None before the capture


class ImageResizer:
    """Uploads camera images and resizes them to ``size``, (height, width). Not thread-safe.

    Images of one kind (size, orientation, processor) are processed together. A camera may change its resolution at
    any time: the first images of a new kind allocate buffers, which takes a few milliseconds, and are resized
    launch by launch, while a second thread captures the launches as one graph. Call :meth:`upload` and
    :meth:`resize` on the stream of ``runner``.
    """

    def __init__(self, size: tuple[int, int], device: torch.device, runner: Runner) -> None:
        self._size, self._device, self._runner = size, device, runner
        self._slots: OrderedDict[tuple[int, _Kind], Slot] = OrderedDict()  # the most recently used last
        self._worker: ThreadPoolExecutor | None = None
        self._capturing: Future[None] | None = None  # the last capture requested; captures run one after the other

    def upload(self, images: Sequence[RawImage]) -> list[tuple[Slot, list[int]]]:
        """Start the upload; the images' memory may be reused immediately.

        Returns the slot of each kind of image, with the indices of its images in ``images``.
        """
        kinds: dict[_Kind, list[int]] = {}
        for index, image in enumerate(images):
            pixels = image.pixels
            kinds.setdefault((pixels.dtype, pixels.shape, image.orientation, image.processor), []).append(index)
        uploaded = []
        for kind, places in kinds.items():
            slot = self._slot(len(places), kind, images[places[0]])
            for buffer, index in zip(slot.buffers, places, strict=True):
                self._runner.upload(buffer, images[index].pixels)
            uploaded.append((slot, places))
        self._keep(max(_KEPT, len(kinds)))
        return uploaded

    def resize(self, uploaded: Sequence[tuple[Slot, list[int]]], target: Tensor) -> None:
        """Rotate, crop and resize the uploaded images to [B, height, width, 3]."""
        for slot, places in uploaded:
            resized = slot.launches() if slot.graph is None else slot.graph()
            if len(places) == len(target):
                target.copy_(resized)
                continue
            for image, place in zip(resized, places, strict=True):
                target[place] = image

    def wait(self, timeout: float | None = None) -> bool:
        capturing = self._capturing
        return capturing is None or not wait_for([capturing], timeout).not_done

    def clear(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = self._capturing = None
        self._keep(0)

    def _slot(self, count: int, kind: _Kind, image: RawImage) -> Slot:
        key = count, kind
        slot = self._slots.get(key)
        if slot is None:
            require_image(image.pixels)
            _, (height, width, _), orientation, processor = kind
            if processor is None or processor.size != self._size:
                raise ConfigError(f"camera.processor: {processor} does not produce images of {self._size}")
            pipeline = make_pipeline(processor, (height, width), self._device, orientation)
            pixels = torch.empty((count, height, width, 3), dtype=torch.uint8, device=self._device)
            dtype = torch.float32 if processor.floating else torch.uint8
            self._slots[key] = slot = Slot(pixels, tuple(pixels), dtype, partial(pipeline, pixels))
            self._capture_soon(slot)
        self._slots.move_to_end(key)
        return slot

    def _capture_soon(self, slot: Slot) -> None:
        if not self._runner.graphs:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "capture-images")
        self._capturing = self._worker.submit(self._capture, slot)

    def _capture(self, slot: Slot) -> None:
        """Capture the resize. The graph only reads ``pixels``, so uploads may continue meanwhile."""
        resized = torch.zeros((len(slot.pixels), *self._size, 3), dtype=slot.dtype, device=self._device)

        def stage() -> None:
            resized.copy_(slot.launches())

        try:
            replay = self._runner.capture(stage)
        except Exception as error:
            height, width = slot.pixels.shape[1:3]
            logger.warning("images of %dx%d are resized without a graph: %s", width, height, error)
            return

        def run() -> Tensor:
            replay()
            return resized

        slot.graph = run

    def _keep(self, count: int) -> None:
        """Free the least recently used slots, so that changing sizes do not fill the memory."""
        while len(self._slots) > count:
            _, oldest = self._slots.popitem(last=False)
            for buffer in oldest.buffers:
                self._runner.forget(buffer)
