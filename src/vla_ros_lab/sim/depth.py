"""The table's depth camera: from the renderer's depth to points, as the camera's driver and TF would give them."""

import math
from functools import lru_cache
from typing import Any

import cv2
import numpy as np

from vla_ros.types import Float32Array, FloatArray

BASELINE, FOCAL, SUBPIXEL = 0.050, 640.0, 0.08
"""Intel RealSense D435: metres between its imagers, focal length in pixels (1280x720), RMS error of a disparity."""

_FARTHEST = 5.0  # m; what is behind is the sky
_BLUR = 2.0  # pixels over which neighbouring errors are alike: stereo compares windows
_BLIND = 0.03  # share of the pixels without texture to match
_STEP = 0.001  # m, resolution of 16UC1


def unproject(depth: FloatArray, fovy: float, position: FloatArray, rotation: FloatArray) -> Float32Array:
    """Return the point of each pixel, float32 [H, W, 3]; NaN where ``depth`` [H, W], metres, is not known.

    ``fovy`` is the vertical field of view in degrees; ``rotation`` [3, 3] has the camera's axes (right, up,
    backward) in the frame of ``position`` and of the points.
    """
    seen = np.where(depth < _FARTHEST, depth, np.nan)
    points: Float32Array = (position + seen[..., None] * (_rays(*depth.shape, fovy) @ rotation.T)).astype(
        np.float32
    )
    return points


@lru_cache(maxsize=4)
def _rays(height: int, width: int, fovy: float) -> FloatArray:
    """Return where each pixel's centre looks, float64 [H, W, 3]: right, up, and -1 backward."""
    slope = 2 * math.tan(math.radians(fovy) / 2) / height
    right, up = (np.arange(width) + 0.5 - width / 2) * slope, (height / 2 - 0.5 - np.arange(height)) * slope
    return np.stack([*np.meshgrid(right, up), -np.ones((height, width))], axis=-1)


def sensed(depth: FloatArray, fovy: float, random: np.random.Generator) -> FloatArray:
    """Return what a stereo camera measures of ``depth`` [H, W], metres; NaN where it finds no match.

    The error of a depth z is z^2 * SUBPIXEL / (FOCAL * BASELINE) (Intel, "Best-Known-Methods for Tuning D400
    Depth Cameras"). The right imager does not see what is hidden for it; nothing is measured there, nor on some
    surfaces without texture.
    """
    height, width = depth.shape
    noise, texture = (_smooth(random.standard_normal((height, width))) for _ in range(2))
    found = depth + noise * depth**2 * SUBPIXEL / (FOCAL * BASELINE)
    shift = height / (2 * math.tan(math.radians(fovy) / 2)) * BASELINE / depth  # disparity in these pixels
    hidden = np.zeros(depth.shape, np.bool_)
    for step in range(1, 1 + math.ceil(float(np.ptp(shift)))):
        hidden[:, :-step] |= shift[:, step:] - shift[:, :-step] >= step
    blind = texture > np.quantile(texture, 1 - _BLIND)
    return np.where(hidden | blind, np.nan, np.round(found / _STEP) * _STEP)


def _smooth(noise: FloatArray) -> FloatArray:
    blurred = cv2.GaussianBlur(noise, (0, 0), _BLUR)
    return np.asarray(blurred / blurred.std(), np.float64)


def misplaced(
    position: FloatArray, rotation: FloatArray, metres: float, degrees: float, random: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Return a camera's pose as a wrong calibration states it: off by these amounts, in random directions."""
    way, axis = (one / np.linalg.norm(one) for one in random.standard_normal((2, 3)))
    turn, _ = cv2.Rodrigues(axis * math.radians(degrees))
    return position + metres * way, np.asarray(turn) @ rotation


def turn_camera(mujoco: Any, camera: Any, angle: float, height: float = 0.0) -> None:
    """Turn a camera of the world about the vertical through the point at ``height`` that it looks at.

    ``angle`` is in radians, counter-clockwise seen from above.
    """
    backward, turn, moved = camera.mat0.reshape(3, 3)[:, 2], np.empty(4), np.empty(3)
    offset = backward * (camera.pos[2] - height) / backward[2]  # from that point
    mujoco.mju_axisAngle2Quat(turn, np.array([0.0, 0.0, 1.0]), angle)
    mujoco.mju_rotVecQuat(moved, offset, turn)
    camera.pos += moved - offset
    mujoco.mju_mulQuat(camera.quat, turn, camera.quat.copy())
