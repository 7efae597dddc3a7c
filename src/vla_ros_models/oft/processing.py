"""The image processor of OpenVLA-OFT's evaluation code."""

from dataclasses import dataclass

from vla_ros.types import Resampling, UInt8Array
from vla_ros.vision.processors import LiberoResize, require_image, resize_bicubic
from vla_ros.vision.resample import pillow_resize


@dataclass(frozen=True)
class OFTResize(LiberoResize):
    """Applies a JPEG round trip and Lanczos-3, except to images of ``size``; crops all images."""

    crop_area: float = 0.9
    # Side in pixels of a first resize, ignoring the aspect ratio, as by Pillow (ALOHA: 256); 0 for none.
    camera_side: int = 0

    def __call__(self, image: UInt8Array) -> UInt8Array:
        require_image(image)
        if self.camera_side:
            image = resize_bicubic(image, (self.camera_side, self.camera_side))
        return self._crop(image) if image.shape[:2] == self.size else super().__call__(image)

    def resampling(self, source: tuple[int, int]) -> Resampling | None:
        first: Resampling = ()
        if self.camera_side:
            first, source = pillow_resize(source, (self.camera_side, self.camera_side)), (self.camera_side,) * 2
        rest = self._crop_steps() if source == self.size else super().resampling(source)
        return None if rest is None else (*first, *rest)
