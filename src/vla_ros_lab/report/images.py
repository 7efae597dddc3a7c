"""Images and animations embedded in the page as data URIs."""

import base64
import io
from collections.abc import Sequence

import numpy as np

from vla_ros.errors import ImageError
from vla_ros.types import UInt8Array
from vla_ros_lab.report.markup import Markup, tag


def data_uri(image: UInt8Array, quality: int = 80) -> str:
    """Encode a uint8 [H, W, 3] RGB (or [H, W] grey) image as ``data:image/jpeg;base64,...``."""
    from PIL import Image

    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise ImageError(f"report image: found {image.dtype} {list(image.shape)}, expected uint8 [H, W, 3]")
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "JPEG", quality=quality, optimize=True)
    return _uri("jpeg", buffer)


def shrink(image: UInt8Array, side: int) -> UInt8Array:
    """Scale ``image`` down until its longer side is at most ``side`` pixels; smaller images are unchanged."""
    from PIL import Image

    scale = side / max(image.shape[:2])
    if scale >= 1:
        return image
    height, width = (max(1, round(length * scale)) for length in image.shape[:2])
    pixels = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BOX))


def image(pixels: UInt8Array, caption: str = "") -> Markup:
    small = shrink(pixels, 320)
    height, width = small.shape[:2]
    return _figure(data_uri(small), (width, height), caption or "image", caption)


def animation(frames: Sequence[UInt8Array], *, rate_hz: float, caption: str = "", side: int = 224) -> Markup:
    """Return an animated image that repeats; frames are uint8 [H, W, 3] RGB, shrunk to ``side`` pixels."""
    from PIL import Image

    if not frames:
        return tag("p", "No images were recorded.", class_="note")
    first, *others = (Image.fromarray(np.ascontiguousarray(shrink(frame, side))) for frame in frames)
    buffer = io.BytesIO()
    timing = {"duration": round(1000 / rate_hz), "loop": 0}
    first.save(buffer, "WEBP", save_all=True, append_images=others, quality=75, method=0, **timing)
    return _figure(_uri("webp", buffer), first.size, caption or "recording", caption)


def _uri(kind: str, buffer: io.BytesIO) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _figure(source: str, size: tuple[int, int], alt: str, caption: str) -> Markup:
    shown = tag("img", src=source, width=size[0], height=size[1], alt=alt)
    return tag("figure", [shown, tag("figcaption", caption)] if caption else [shown])
