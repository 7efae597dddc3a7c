"""The image processor of OpenVLA-OFT's evaluation code."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.types import ImageProcessor, UInt8Array
from vla_ros.vision.processors import crop_center, jpeg_round_trip, require_image, resize_bicubic, resize_lanczos3


@dataclass(frozen=True)
class OFTResize(ImageProcessor):
    """JPEG round trip and Lanczos-3, skipped at ``size`` already; then the centre crop.

    Attributes:
        crop_area: Share of the area that the crop keeps; 1 crops nothing.
        camera_side: Side to which Pillow first resizes any image, without keeping its aspect ratio (ALOHA: 256); 0
            for none.
    """

    size: tuple[int, int] = (224, 224)
    crop_area: float = 0.9
    camera_side: int = 0

    def __call__(self, image: UInt8Array) -> UInt8Array:
        """See :class:`~vla_ros.types.ImageProcessor`."""
        require_image(image)
        if self.camera_side:
            image = resize_bicubic(image, (self.camera_side, self.camera_side))
        if image.shape[:2] != self.size:
            image = resize_lanczos3(jpeg_round_trip(image), self.size)
        return image if self.crop_area == 1.0 else crop_center(image, self.crop_area, self.size)
