"""Image processors that resize uint8 RGB images with the same bits as the published code.

The policies normalise the images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeVar

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from vla_ros.errors import ConfigError, ImageError
from vla_ros.types import BilinearPad, CropTaps, ImageProcessor, JpegRoundTrip, Padding, Resampling, UInt8Array
from vla_ros.vision import resample
from vla_ros.vision.resample import center_crop_box

_Levels = NDArray[np.float32]
_Pixels = TypeVar("_Pixels", UInt8Array, NDArray[np.float32])

_JPEG_QUALITY = 95  # tf.io.encode_jpeg's default, with its default 4:2:0


def resize_bicubic(image: UInt8Array, size: tuple[int, int] = (224, 224)) -> UInt8Array:
    """Resize with Pillow's antialiased bicubic filter, as OpenVLA's ``resize-naive`` does."""
    resized = pillow_resized(image, size, Image.Resampling.BICUBIC)
    return np.array(resized, np.uint8)  # a copy, because torch warns of read-only memory


def jpeg_round_trip(image: UInt8Array) -> UInt8Array:
    """Encode and decode ``image`` as TensorFlow's JPEG codec does, to reproduce the loss in the training data.

    OpenCV's encoder (quality 95, 4:2:0) and libjpeg-turbo's decoder with the fast DCT, TensorFlow's default,
    produce the same pixels as TensorFlow 2. ``image`` is uint8 [height, width, 3]; it must already be upright,
    because the loss depends on the position of the 16 x 16 blocks.
    """
    _, encoded = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    return np.asarray(simplejpeg.decode_jpeg(encoded.data, colorspace="RGB", fastdct=True), np.uint8)


def resize_lanczos3(image: UInt8Array, size: tuple[int, int] = (224, 224)) -> UInt8Array:
    """Resize as ``tf.image.resize(method="lanczos3", antialias=True)`` does, and round to uint8."""
    height, width, _ = image.shape
    if (height, width) == size:  # TensorFlow, too, returns the image unchanged
        return image
    return resample.lanczos3((height, width), size)(image)


def crop_center(image: UInt8Array, area: float, size: tuple[int, int] = (224, 224)) -> UInt8Array:
    """Crop the centre to the share ``area`` in (0, 1] and resize bilinearly, as the OpenVLA evaluation does.

    Performs the float32 operations of TensorFlow's ``crop_and_resize`` on [0, 1] and of its conversion to uint8,
    ``floor(255.5 x)``, in TensorFlow's order.
    """
    rows = resample.crop_taps(image.shape[0], size[0], area)
    columns = resample.crop_taps(image.shape[1], size[1], area)
    flat = image.reshape(len(image), -1)
    left, right = (
        3 * at[:, None] + np.arange(3) for at in (columns.below, columns.above)
    )  # indices of single channels
    across = np.repeat(columns.share, 3)

    def along_columns(at: NDArray[np.intp]) -> _Levels:
        """Return the rows ``at`` of the image, in [0, 1], with the target's columns: [height, width * 3]."""
        some = flat[at]
        return _between(_in_one(some.take(left.ravel(), axis=1)), _in_one(some.take(right.ravel(), axis=1)), across)

    result = _between(along_columns(rows.below), along_columns(rows.above), rows.share[:, None])
    np.clip(result, 0, 1, out=result)
    result *= np.float32(255.5)
    return result.astype(np.uint8).reshape(*size, 3)  # the cast truncates


def _in_one(image: UInt8Array) -> _Levels:
    """Scale levels to [0, 1] as ``tf.image.convert_image_dtype`` does."""
    levels = image.astype(np.float32)
    levels *= np.float32(1 / 255)
    return levels


def _between(one: _Levels, other: _Levels, share: _Levels) -> _Levels:
    """Compute ``one + (other - one) * share`` and overwrite ``other`` with it."""
    other -= one
    other *= share
    other += one
    return other


# openpi and LeRobot resize without distortion and pad with black. When images shrink, openpi uses Pillow's
# antialiasing filter, LeRobot interpolates between four pixels: on fine textures they differ by up to 70 levels.


def fitted_size(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Scale the size ``source`` (height, width) to fit into ``target``; each side is at least one pixel."""
    ratio = max(source[0] / target[0], source[1] / target[1])
    return max(1, int(source[0] / ratio)), max(1, int(source[1] / ratio))


def resize_with_pad(image: UInt8Array, target: tuple[int, int] = (224, 224)) -> UInt8Array:
    """Resize uint8 [H, W, 3] with Pillow's antialiased bilinear filter, bit for bit as openpi does.

    Returns uint8 [height, width, 3], which is ``image`` itself if it already has this size.
    """
    if image.shape[:2] == target:
        return image
    small = pillow_resized(image, fitted_size(image.shape[:2], target), Image.Resampling.BILINEAR)
    return _placed(np.asarray(small), target, centred_corner((small.height, small.width), target))


def pillow_resized(image: UInt8Array, size: tuple[int, int], kernel: Image.Resampling) -> Image.Image:
    """Resize to (height, width) with Pillow: columns first, then rows, rounded to 8 bits in between.

    Pillow versions used in training have this order; newer versions may resize the rows of tall images first.
    """
    height, width = size
    resized = Image.fromarray(np.ascontiguousarray(image))
    for step in ((width, resized.height), (width, height)):
        if resized.size != step:
            resized = resized.resize(step, kernel)
    return resized


def resize_with_pad_linear(
    image: UInt8Array, target: tuple[int, int] = (224, 224), centred: bool = True
) -> _Levels:
    """Resize uint8 [H, W, 3] as LeRobot does: bilinear, without antialiasing or rounding.

    Returns float32 [height, width, 3] in [0, 1]; without ``centred``, all black is at the top or left.
    """
    step = _bilinear_pad(image.shape[:2], target, centred)
    levels = image.astype(np.float32) / np.float32(255)
    rows = _mix(levels[step.rows.below], levels[step.rows.above], step.rows.share[:, None, None])
    columns = step.columns
    small = _mix(rows[:, columns.below], rows[:, columns.above], columns.share[:, None])
    return _placed(np.clip(small, 0, 1), target, step.corner)


def _bilinear_pad(source: tuple[int, int], target: tuple[int, int], centred: bool) -> BilinearPad:
    fitted = fitted_size(source, target)
    corner = centred_corner(fitted, target) if centred else (target[0] - fitted[0], target[1] - fitted[1])
    return BilinearPad(_taps(source[0], fitted[0]), _taps(source[1], fitted[1]), target, corner)


@lru_cache(maxsize=32)
def _taps(source: int, target: int) -> CropTaps:
    """Return the taps of a bilinear resize along one axis, with pixel centres at half-integers."""
    scale = np.float64(np.float32(source) / np.float32(target))
    # Rounded once, as in a fused multiply-add.
    position = np.maximum(((np.arange(target) + 0.5) * scale - 0.5).astype(np.float32), np.float32(0))
    return resample.linear_taps(position, source)


def _mix(one: _Levels, other: _Levels, share: _Levels) -> _Levels:
    result: _Levels = one * (np.float32(1) - share) + other * share
    return result


def centred_corner(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Return the corner (row, column) of a centred image; an odd pixel of padding is at the bottom or right."""
    return (target[0] - source[0]) // 2, (target[1] - source[1]) // 2


def _placed(small: _Pixels, target: tuple[int, int], corner: tuple[int, int]) -> _Pixels:
    (height, width), (top, left) = small.shape[:2], corner
    result = np.zeros((*target, small.shape[2]), small.dtype)
    result[top : top + height, left : left + width] = small
    return result


@dataclass(frozen=True)
class _Resize(ImageProcessor):
    """Base class: ``size`` is (height, width), ``crop_area`` the share of the area to keep (1: no crop)."""

    size: tuple[int, int] = (224, 224)
    crop_area: float = 1.0

    def __post_init__(self) -> None:
        center_crop_box(self.crop_area)
        if min(self.size) < 1:
            raise ConfigError(f"image size: found {self.size}, expected (height, width) of at least 1")


@dataclass(frozen=True)
class ResizeNaive(_Resize):
    """``resize-naive`` of the OpenVLA processor: bicubic, regardless of the aspect ratio.

    With a crop, a bilinear resize to ``size`` replaces the bicubic one, as in the OpenVLA code.
    """

    def __call__(self, image: UInt8Array) -> UInt8Array:
        require_image(image)
        if self.crop_area == 1.0:
            return resize_bicubic(image, self.size)
        return crop_center(image, self.crop_area, self.size)

    def resampling(self, source: tuple[int, int]) -> Resampling:
        """Return steps in integers or individually rounded float32 operations, identical on every device."""
        if self.crop_area == 1.0:
            return resample.pillow_resize(source, self.size)
        return resample.bilinear_crop(source, self.size, self.crop_area)


@dataclass(frozen=True)
class LiberoResize(_Resize):
    """JPEG round trip, Lanczos-3 and crop, for checkpoints fine-tuned on an RLDS data set such as LIBERO's.

    Checkpoints trained with image augmentation need a ``crop_area`` of 0.9.
    """

    def __call__(self, image: UInt8Array) -> UInt8Array:
        require_image(image)
        return self._crop(resize_lanczos3(jpeg_round_trip(image), self.size))

    def resampling(self, source: tuple[int, int]) -> Resampling | None:
        """Return steps identical on every device; None below five columns, which libjpeg decodes differently."""
        if source[1] < 5:
            return None
        return (JpegRoundTrip(source), *resample.lanczos3_steps(source, self.size), *self._crop_steps())

    def _crop(self, image: UInt8Array) -> UInt8Array:
        return image if self.crop_area == 1.0 else crop_center(image, self.crop_area, self.size)

    def _crop_steps(self) -> Resampling:
        return () if self.crop_area == 1.0 else resample.bilinear_crop(self.size, self.size, self.crop_area)


@dataclass(frozen=True)
class ResizeWithPad(ImageProcessor):
    """openpi's ``resize_with_pad``: bilinear with antialiasing, keeps the aspect ratio, centred on black."""

    size: tuple[int, int] = (224, 224)

    def __call__(self, image: UInt8Array) -> UInt8Array:
        require_image(image)
        return resize_with_pad(image, self.size)

    def resampling(self, source: tuple[int, int]) -> Resampling:
        """Return steps in integers, identical on every device."""
        if source == self.size:
            return ()
        fitted = fitted_size(source, self.size)
        padding = Padding(self.size, centred_corner(fitted, self.size))
        return (*resample.pillow_resize(source, fitted, "bilinear"), padding)


@dataclass(frozen=True)
class LinearResize(ImageProcessor):
    """LeRobot's resize, whose result is not rounded to uint8: the policy or its device resizes the image itself.

    ``centred`` is as for :func:`resize_with_pad_linear`.
    """

    size: tuple[int, int]
    centred: bool = True
    floating: ClassVar[bool] = True

    def __call__(self, image: UInt8Array) -> UInt8Array:
        return image

    def resampling(self, source: tuple[int, int]) -> Resampling:
        return (_bilinear_pad(source, self.size, self.centred),)


PROCESSORS: Mapping[str, type[ResizeNaive | LiberoResize | ResizeWithPad]] = {
    "openvla": ResizeNaive,
    "libero": LiberoResize,
    "resize_with_pad": ResizeWithPad,
}
"""Value of ``camera.processor`` to image processor."""


def client_pipeline(processor: ImageProcessor | None) -> str | None:
    """Return the ``camera.processor`` that a client may apply in advance: a second pass changes nothing."""
    if getattr(processor, "crop_area", 1.0) != 1.0:
        return None
    fit = (name for name, kind in PROCESSORS.items() if type(processor) is kind and kind is not LiberoResize)
    return next(fit, None)


def require_image(image: UInt8Array) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ImageError(
            f"found an image of type {image.dtype} and shape {image.shape}, expected uint8 [height, width, 3] RGB"
        )
