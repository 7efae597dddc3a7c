"""Turns one camera message into one image for the policy: decode, orient, process as in training."""

from __future__ import annotations

from dataclasses import replace

from vla_ros.config.sections import Camera, CameraConfig
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.types import ImageProcessor, RawImage, UInt8Array
from vla_ros.vision.decode import DecodedImage, decode_compressed, decode_image
from vla_ros.vision.geometry import make_orientation
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.processors import PROCESSORS, ResizeWithPad


class Preprocessor:
    """Prepares the images of each camera as policy and configuration require, for the live node and replay.

    It keeps no state between frames and may be called from several threads.
    """

    def __init__(self, camera: CameraConfig, spec: PolicySpec) -> None:
        decoders = {"raw": decode_image, "compressed": decode_compressed}
        if camera.transport not in decoders:
            raise ConfigError(f"camera.transport: found {camera.transport!r}, expected raw or compressed")
        self._decode = decoders[camera.transport]
        for one in camera.each:
            make_orientation(one.orientation)
        processors = {image.source: _named(image) for image in spec.images}
        self._cameras = [(one.orientation, _chosen(one, processors.get(one.key))) for one in camera.each]

    def __call__(self, cdr: CdrBytes, camera_index: int = 0) -> RawImage:
        """Decode one serialised ``sensor_msgs/Image`` or ``CompressedImage``, according to ``camera.transport``."""
        decoded: DecodedImage = self._decode(cdr)
        return self.raw(decoded.image, camera_index, decoded.stamp)

    def raw(self, image: UInt8Array, camera_index: int = 0, stamp: int = 0) -> RawImage:
        """Return a decoded image, uint8 [H, W, 3] RGB, with its pending orientation and processor."""
        return RawImage(image, *self._cameras[camera_index], stamp)


def process(raw: RawImage) -> UInt8Array:
    """Apply orientation and image processor on the host: uint8 [height, width, 3] RGB of the processor's size."""
    upright = make_orientation(raw.orientation)(raw.pixels)
    return upright if raw.processor is None else raw.processor(upright)


def _named(image: ImageFeature) -> ImageProcessor | None:
    return ResizeWithPad(image.size) if image.processor is None and image.size else image.processor


def _chosen(camera: Camera, named: ImageProcessor | None) -> ImageProcessor | None:
    """Return the policy's processor, unless an option overrides it for this camera."""
    if camera.pipeline != "policy":
        if camera.pipeline not in PROCESSORS:
            known = ", ".join(("policy", *PROCESSORS))
            raise ConfigError(f"camera.pipeline: found {camera.pipeline!r}, expected one of {known}")
        kind = PROCESSORS[camera.pipeline]
        chosen = kind() if named is None else kind(size=named.size)
        return _cropped(camera, chosen)
    return _cropped(camera, named)


def _cropped(camera: Camera, processor: ImageProcessor | None) -> ImageProcessor | None:
    if not camera.crop_area:
        return processor
    if not hasattr(processor, "crop_area"):
        raise ConfigError(
            f"camera.crop_area: found {camera.crop_area:g} for '{camera.key}', which is not cropped "
            f"({processor or 'the policy takes the image as it is'}); set camera.pipeline, or leave the area at 0"
        )
    return replace(processor, crop_area=camera.crop_area)  # type: ignore[type-var]
