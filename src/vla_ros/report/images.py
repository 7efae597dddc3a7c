"""Images embedded in the page as data URIs, and animations of sprite sheets."""

import base64
import io
from collections.abc import Sequence

import numpy as np

from vla_ros.errors import ImageError
from vla_ros.report.markup import Markup, tag
from vla_ros.types import UInt8Array

_MAX_SIDE = 16_000
"""Longest side of a sprite sheet, in pixels, that every current browser decodes."""


def data_uri(image: UInt8Array, quality: int = 80) -> str:
    """Encode a uint8 [H, W, 3] RGB (or [H, W] grey) image as ``data:image/jpeg;base64,...``."""
    from PIL import Image

    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise ImageError(f"report image: found {image.dtype} {list(image.shape)}, expected uint8 [H, W, 3]")
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def shrink(image: UInt8Array, side: int) -> UInt8Array:
    """Scale ``image`` down until its longer side is at most ``side`` pixels; smaller images are unchanged."""
    from PIL import Image

    scale = side / max(image.shape[:2])
    if scale >= 1:
        return image
    height, width = (max(1, round(length * scale)) for length in image.shape[:2])
    pixels = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BOX))


def image(pixels: UInt8Array, caption: str = "", *, side: int = 320) -> Markup:
    """Return an image with a caption, if there is one."""
    small = shrink(pixels, side)
    height, width = small.shape[:2]
    shown = tag("img", src=data_uri(small), width=width, height=height, alt=caption or "image")
    return tag("figure", [shown, tag("figcaption", caption)] if caption else [shown])


def animation(
    frames: Sequence[UInt8Array], *, rate_hz: float = 10.0, caption: str = "", side: int = 224, most: int = 240
) -> Markup:
    """Return an animation of a sprite sheet, with a button and a slider.

    The animation starts paused; without scripts, the page shows the first frame. Frames are uint8 [H, W, 3] RGB of
    the same size. They are shrunk to ``side`` pixels; if there are more than ``most``, they are thinned evenly.
    """
    if not frames:
        return tag("p", "No images were recorded.", class_="note")
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int))
    small = [shrink(frames[index], side) for index in chosen]
    height, width = small[0].shape[:2]
    columns = max(1, min(len(small), 16, _MAX_SIDE // width))
    rows = -(-len(small) // columns)
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for index, frame in enumerate(small):
        y, x = index // columns * height, index % columns * width
        sheet[y : y + height, x : x + width] = frame[:height, :width]
    style = (
        f"background-image:url({data_uri(sheet, 75)});background-size:{columns * 100}% {rows * 100}%;"
        f"aspect-ratio:{width}/{height}"
    )
    period_ms = round(1000.0 / rate_hz * len(frames) / len(small))
    slider = tag("input", type="range", min=0, max=len(small) - 1, value=0, aria_label="frame")
    parts = [
        tag("div", "", class_="flip", style=style, role="img", aria_label=caption or "recording"),
        tag("div", [tag("button", "Play", type="button"), slider], class_="controls"),
        *([tag("figcaption", caption)] if caption else []),
    ]
    return tag("figure", parts, data_frames=len(small), data_columns=columns, data_ms=period_ms)
