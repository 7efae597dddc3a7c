"""Turns a camera message into the policy's image: decodes, orients, and processes as in training."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import cv2
from numpy.typing import NDArray

from vla_ros.config.sections import Camera, CameraConfig
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import ConfigError, ImageError
from vla_ros.types import ImageProcessor, RawImage, UInt8Array
from vla_ros.vision.decode import decode_compressed, decode_image
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.processors import PROCESSORS, ResizeWithPad

TURNS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "none": lambda image: image,
    "rotate_90": partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
    "rotate_180": partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
    "rotate_270": partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
    "flip_horizontal": partial(cv2.flip, flipCode=1),
    "flip_vertical": partial(cv2.flip, flipCode=0),
}
"""``camera.orientation`` to the function that applies it to [H, W, 3]; rotations are clockwise.

Images of LIBERO's renderer need ``rotate_180``, which the OpenVLA evaluation applies as ``[::-1, ::-1]``.
"""


class Preprocessor:
    """Decodes the messages of each camera and chooses their orientation and image processor.

    Keeps no state between frames; any thread may call it.
    """

    def __init__(self, camera: CameraConfig, spec: PolicySpec) -> None:
        self._decode = [decode_image if one.transport == "raw" else decode_compressed for one in camera.each]
        self._topics = camera.topics
        processors = {image.source: _named(image) for image in spec.images}
        self._cameras = [(one.orientation, _chosen(one, processors.get(one.key))) for one in camera.each]

    def __call__(self, cdr: CdrBytes, camera_index: int = 0) -> RawImage:
        """Decode one serialised ``sensor_msgs/Image`` or ``CompressedImage``, according to ``camera.transport``.

        Raises ImageError, with the camera's topic, if the message is not an image.
        """
        try:
            decoded = self._decode[camera_index](cdr)
        except ImageError as error:
            raise ImageError(f"{self._topics[camera_index]}: {error}") from None
        return self.raw(decoded.image, camera_index, decoded.stamp)

    def raw(self, image: UInt8Array, camera_index: int = 0, stamp: int = 0) -> RawImage:
        """Return a decoded image, uint8 [H, W, 3] RGB, with the orientation and processor still to be applied."""
        return RawImage(image, *self._cameras[camera_index], stamp)


def process(raw: RawImage) -> UInt8Array:
    """Apply orientation and image processor on the host; returns uint8 [height, width, 3] RGB."""
    upright = TURNS[raw.orientation](raw.pixels)
    return upright if raw.processor is None else raw.processor(upright)


def _named(image: ImageFeature) -> ImageProcessor | None:
    return ResizeWithPad(image.size) if image.processor is None and image.size else image.processor


def _chosen(camera: Camera, named: ImageProcessor | None) -> ImageProcessor | None:
    """Return the policy's processor, or the processor that the camera's options choose."""
    if camera.processor != "policy":
        kind = PROCESSORS[camera.processor]
        named = kind() if named is None else kind(size=named.size)
    if not camera.crop_area:
        return named
    if not hasattr(named, "crop_area"):
        raise ConfigError(
            f"camera.crop_area: found {camera.crop_area:g} for '{camera.key}', which is not cropped "
            f"({named or 'the policy takes unprocessed images'}); set camera.processor, or set crop_area to 0"
        )
    return replace(named, crop_area=camera.crop_area)  # type: ignore[type-var]


class LazyImages(Mapping[str, UInt8Array]):
    """Maps image keys to uint8 [H, W, 3]; each image is oriented and resized on first access.

    ``makers`` maps a key to the function that prepares its image. ``spent_ms`` is the total preparation time.
    """

    def __init__(self, makers: Mapping[str, Callable[[], UInt8Array]]) -> None:
        self._makers = makers
        self._made: dict[str, UInt8Array] = {}
        self.spent_ms = 0.0

    @property
    def prepared(self) -> int:
        """Number of images prepared so far."""
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
