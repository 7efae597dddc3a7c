"""Pictures inside the page: data URIs, strips, and flip books made of one sprite sheet."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from vla_ros.errors import ImageError
from vla_ros.report.markup import Markup, tag
from vla_ros.types import UInt8Array

MAX_SIDE = 16_000
"""Largest side of a sprite sheet in pixels: what every current browser decodes."""


def data_uri(image: UInt8Array, quality: int = 80) -> str:
    """A uint8 [H, W, 3] RGB (or [H, W] grey) picture as ``data:image/jpeg;base64,...``.

    Raises:
        ImageError: Another shape or type.
    """
    from PIL import Image

    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise ImageError(f"report picture: found {image.dtype} {list(image.shape)}, expected uint8 [H, W, 3]")
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def shrink(image: UInt8Array, side: int) -> UInt8Array:
    """``image`` with its longer side at most ``side`` pixels; the same array where it is small enough."""
    from PIL import Image

    height, width = image.shape[:2]
    if max(height, width) <= side:
        return image
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BOX))


def picture(image: UInt8Array, caption: str = "", *, side: int = 320, quality: int = 80) -> Markup:
    """One picture with a caption."""
    small = shrink(image, side)
    parts = [
        tag(
            "img",
            src=data_uri(small, quality),
            width=small.shape[1],
            height=small.shape[0],
            alt=caption or "picture",
        )
    ]
    if caption:
        parts.append(tag("figcaption", caption))
    return tag("figure", parts)


def strip(
    frames: Sequence[UInt8Array],
    captions: Sequence[str] = (),
    *,
    count: int = 8,
    side: int = 160,
    quality: int = 75,
) -> Markup:
    """``count`` of the frames, evenly spread, first and last included, side by side.

    Args:
        frames: uint8 [H, W, 3] RGB.
        captions: One for each frame, or none.
        count: How many are shown.
        side: Longer side of each in pixels.
        quality: JPEG quality.
    """
    if not frames:
        return tag("p", "No pictures were recorded.", class_="note")
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(int))
    return tag(
        "div",
        [picture(frames[i], captions[i] if captions else "", side=side, quality=quality) for i in map(int, chosen)],
        class_="strip",
    )


def animation(
    frames: Sequence[UInt8Array],
    *,
    rate_hz: float = 10.0,
    caption: str = "",
    side: int = 224,
    quality: int = 75,
    most: int = 240,
) -> Markup:
    """A flip book with a button and a slider: all frames lie in one picture, of which a window is shown.

    It stands still until it is asked to play; without scripts the first frame is seen.

    Args:
        frames: uint8 [H, W, 3] RGB, all of one size.
        rate_hz: Frames a second when it plays.
        caption: One line below.
        side: Longer side of a frame in pixels.
        quality: JPEG quality.
        most: Frames at most; longer recordings are thinned evenly.
    """
    if not frames:
        return tag("p", "No pictures were recorded.", class_="note")
    chosen = [
        frames[i] for i in np.unique(np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int))
    ]
    small = [shrink(frame, side) for frame in chosen]
    height, width = small[0].shape[:2]
    columns = max(1, min(len(small), 16, MAX_SIDE // width))
    rows = -(-len(small) // columns)
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for i, frame in enumerate(small):
        y, x = i // columns * height, i % columns * width
        sheet[y : y + height, x : x + width] = frame[:height, :width]
    style = (
        f"background-image:url({data_uri(sheet, quality)});background-size:{columns * 100}% {rows * 100}%;"
        f"aspect-ratio:{width}/{height}"
    )
    period = 1000.0 / rate_hz * len(frames) / len(small)
    parts = [
        tag("div", "", class_="flip", style=style, role="img", aria_label=caption or "recording"),
        tag(
            "div",
            [
                tag("button", "Play", type="button"),
                tag("input", type="range", min=0, max=len(small) - 1, value=0, aria_label="frame"),
            ],
            class_="controls",
        ),
    ]
    if caption:
        parts.append(tag("figcaption", caption))
    return tag("figure", parts, data_frames=len(small), data_columns=columns, data_ms=round(period))
