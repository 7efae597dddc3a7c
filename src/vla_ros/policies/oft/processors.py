"""The image processor of OpenVLA-OFT's evaluation code, in two parts: JPEG on the host, the rest on any device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vla_ros.types import ImageProcessor, RawImage, Resampling, UInt8Array
from vla_ros.vision.geometry import make_orientation
from vla_ros.vision.preprocess import process
from vla_ros.vision.processors import (
    ResizeNaive,
    crop_center,
    jpeg_round_trip,
    require_image,
    resize_bicubic,
    resize_lanczos3,
)
from vla_ros.vision.resample import bilinear_crop, lanczos3_steps

if TYPE_CHECKING:
    from vla_ros.policies.oft.inference import ChunkInference


@dataclass(frozen=True)
class _Sized(ImageProcessor):
    """Size of the result, and the share of the area that the centre crop keeps; 1 crops nothing."""

    size: tuple[int, int] = (224, 224)
    crop_area: float = 0.9


@dataclass(frozen=True)
class LanczosCrop(_Sized):
    """Lanczos-3, then the centre crop."""

    def __call__(self, image: UInt8Array) -> UInt8Array:
        """See :class:`~vla_ros.types.ImageProcessor`."""
        image = resize_lanczos3(image, self.size)
        return image if self.crop_area == 1.0 else crop_center(image, self.crop_area, self.size)

    def resampling(self, source: tuple[int, int]) -> Resampling:
        """See :class:`~vla_ros.types.ImageProcessor`."""
        crop = () if self.crop_area == 1.0 else bilinear_crop(self.size, self.size, self.crop_area)
        return (*lanczos3_steps(source, self.size), *crop)


@dataclass(frozen=True)
class OFTResize(_Sized):
    """JPEG round trip and Lanczos-3, both skipped at ``size`` already; then the centre crop.

    Attributes:
        camera_side: Side to which Pillow first resizes any image, without keeping its aspect ratio (ALOHA: 256); 0
            for none.
    """

    camera_side: int = 0

    def __call__(self, image: UInt8Array) -> UInt8Array:
        """See :class:`~vla_ros.types.ImageProcessor`."""
        return self.rest(self.prepare(image))

    def prepare(self, image: UInt8Array) -> UInt8Array:
        """The first resize and the JPEG round trip.

        Raises:
            ImageError: ``image`` is not uint8 [H, W, 3] with pixels.
        """
        require_image(image)
        side = self.camera_side or 0
        if side and image.shape[:2] != (side, side):
            image = resize_bicubic(image, (side, side))
        return image if image.shape[:2] == self.size else jpeg_round_trip(image)

    @property
    def first(self) -> ResizeNaive | None:
        """What comes before JPEG, for another device; None where nothing does."""
        return ResizeNaive((self.camera_side, self.camera_side)) if self.camera_side else None

    @property
    def rest(self) -> LanczosCrop:
        """What follows :meth:`prepare`."""
        return LanczosCrop(self.size, self.crop_area)


def prepare(inference: ChunkInference, raw: Sequence[RawImage], threads: Executor | None) -> list[RawImage]:
    """Camera images up to and with JPEG, which is the host's, side by side; resizes run on the device."""
    first = {one.processor.first for one in raw if isinstance(one.processor, OFTResize)}
    if len(first) == 1 and (shrink := first.pop()) is not None:
        small = inference.resized([RawImage(one.pixels, one.orientation, shrink) for one in raw], shrink.size)
        raw = [RawImage(image, "none", one.processor) for image, one in zip(small, raw, strict=True)]
    return list(map(_compressed, raw) if threads is None else threads.map(_compressed, raw))


def _compressed(raw: RawImage) -> RawImage:
    if not isinstance(raw.processor, OFTResize):  # camera.pipeline says otherwise
        return RawImage(process(raw), processor=LanczosCrop(crop_area=1.0))
    upright = make_orientation(raw.orientation)(raw.pixels)
    return RawImage(raw.processor.prepare(upright), processor=raw.processor.rest)
