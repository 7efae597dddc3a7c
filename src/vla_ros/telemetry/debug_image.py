"""Draws the debug image: what the policy saw, its action and the state of the arm."""

import math
from collections.abc import Sequence

import numpy as np

from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray, UInt8Array

_LEAST_SIDE = 448  # px; smaller images are enlarged to keep text readable
_WHITE, _BLACK, _ORANGE, _BLUE = (255, 255, 255), (0, 0, 0), (255, 140, 30), (80, 170, 255)
_FULL_SCALE = 0.02  # m; the arrow of a translation of this length reaches the circle of the compass


def annotate(
    image: UInt8Array, instruction: str, action: FloatArray, spec: PolicySpec, scale: float, state: str
) -> UInt8Array:
    """Draw instruction, action and state on a copy of the policy's image (uint8 [H, W, 3], RGB).

    A translation is drawn on a compass, because without calibration its direction in the image is unknown: up is +x
    of ``control.delta_frame``, left is +y, and the bar beside it shows z. ``scale`` is
    ``control.translation_scale``; 2 cm reach the circle. The result is at least 448 pixels wide and high.
    """
    import cv2

    factor = max(1, math.ceil(_LEAST_SIDE / min(image.shape[:2])))
    canvas = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    height, width = canvas.shape[:2]
    _say(canvas, (8, 20), _shortened(instruction or "(no instruction)", width // 9))
    _say(canvas, (8, 40), _shortened(state, width // 9))
    _say(canvas, (8, height - 10), _numbers(action))
    if spec.motion == "tip_delta" and len(action) >= 3:
        _compass(canvas, np.asarray(action[:3]) * scale)
    drawn: UInt8Array = canvas
    return drawn


def beside(drawn: UInt8Array, others: Sequence[UInt8Array]) -> UInt8Array:
    """Return the policy's other images (uint8 [H, W, 3]) to the right of the first, which is ``drawn``, as high."""
    import cv2

    height = drawn.shape[0]
    widths = [round(image.shape[1] * height / image.shape[0]) for image in others]
    scaled = [
        cv2.resize(image, (width, height), interpolation=cv2.INTER_NEAREST)
        for image, width in zip(others, widths, strict=True)
    ]
    return np.ascontiguousarray(np.hstack([drawn, *scaled]))


def _compass(canvas: UInt8Array, translation: FloatArray) -> None:
    import cv2

    height, width = canvas.shape[:2]
    radius = min(height, width) // 8
    x, y = width - 2 * radius, height - radius - 30
    cv2.circle(canvas, (x, y), radius, _WHITE, 1, cv2.LINE_AA)
    reach = np.clip(np.nan_to_num(translation), -_FULL_SCALE, _FULL_SCALE) * (radius / _FULL_SCALE)
    forward, left, up = (round(float(part)) for part in reach)
    cv2.arrowedLine(canvas, (x, y), (x - left, y - forward), _ORANGE, 3, cv2.LINE_AA)
    bar = x + radius + 12
    cv2.line(canvas, (bar, y - radius), (bar, y + radius), _WHITE, 1)
    cv2.line(canvas, (bar, y), (bar, y - up), _BLUE, 5)


def _numbers(action: FloatArray) -> str:
    return " ".join(f"{number:+.3f}" for number in action[:8]) + (" ..." if len(action) > 8 else "")


def _shortened(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _say(canvas: UInt8Array, where: Sequence[int], text: str) -> None:
    """Write white text with a black outline, readable on every image. OpenCV's fonts are ASCII only."""
    import cv2

    plain = text.encode("ascii", "replace").decode()
    for colour, thickness in ((_BLACK, 3), (_WHITE, 1)):
        cv2.putText(canvas, plain, tuple(where), cv2.FONT_HERSHEY_SIMPLEX, 0.45, colour, thickness, cv2.LINE_AA)
