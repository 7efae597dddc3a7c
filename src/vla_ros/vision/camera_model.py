"""The geometry of depth cameras: where the surface in each pixel is, by ``sensor_msgs/CameraInfo``.

The conventions are those of ROS: K and D describe the image as the camera sends it, P the rectified image. Region
and binning change both as in image_geometry. Distortion is OpenCV's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.types import Float32Array, FloatArray
from vla_ros.vision.decode import MAX_PIXELS

_COEFFICIENTS = {"plumb_bob": (4, 5), "rational_polynomial": (8,), "equidistant": (4,)}
_ROUNDS, _STEP = 20, 1e-6  # of Newton's method, at a depth of 1 m
_EXACT, _FOUND = 1e-12, 1e-9  # m at that depth: a ray that is found, and one that still counts as found


@dataclass(frozen=True, eq=False)
class CameraModel:
    """Where points are in a camera's images, in its optical frame: z forward, x right, y down."""

    frame_id: str
    size: tuple[int, int]  # height, width of the images
    matrix: FloatArray  # float64 [3, 3], focal lengths and principal point in pixels of these images
    distortion: FloatArray  # float64 [N], of OpenCV's model or, if ``fisheye``, of its fisheye model; zeros: none
    fisheye: bool = False

    @cached_property
    def rays(self) -> FloatArray:
        """The points [H, W, 3] at a depth of 1 m that the pixels' centres show; NaN where distortion hides them."""
        height, width = self.size
        pixels = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1).reshape(-1, 2)
        seen = (pixels - self.matrix[:2, 2]) / self.matrix[[0, 1], [0, 1]]
        places = self._undistort(seen) if self.distortion.any() else seen
        return np.concatenate((places, np.ones((len(places), 1))), axis=1).reshape(height, width, 3)

    @cached_property
    def borders(self) -> tuple[FloatArray, FloatArray]:
        """The least and greatest x and y [2] of :attr:`rays`."""
        return np.nanmin(self.rays[..., :2], axis=(0, 1)), np.nanmax(self.rays[..., :2], axis=(0, 1))

    def pixels(self, points: FloatArray) -> FloatArray:
        """Return where points [N, 3] in front of the camera are in its images, [N, 2] as column and row."""
        places = points[:, :2] / points[:, 2:]
        if self.distortion.any():
            places = self._distort(places)
        found: FloatArray = places * self.matrix[[0, 1], [0, 1]] + self.matrix[:2, 2]
        return found

    def _distort(self, places: FloatArray) -> FloatArray:
        square = (places**2).sum(axis=1)
        if self.fisheye:
            radius = np.maximum(np.sqrt(square), 1e-12)
            angle = np.arctan(radius)
            found: FloatArray = places * (angle * _series(self.distortion, angle**2) / radius)[:, None]
            return found
        k1, k2, p1, p2, k3, k4, k5, k6 = np.pad(self.distortion, (0, 8 - len(self.distortion)))
        x, y = places.T
        radial = _series((k1, k2, k3), square) / _series((k4, k5, k6), square)
        tangential = (2 * p1 * x * y + p2 * (square + 2 * x**2), p1 * (square + 2 * y**2) + 2 * p2 * x * y)
        found = places * radial[:, None] + np.stack(tangential, axis=1)
        return found

    def _undistort(self, seen: FloatArray) -> FloatArray:
        """Invert :meth:`_distort` by Newton's method; NaN where it finds nothing."""
        places = seen.copy()
        with np.errstate(all="ignore"):
            for _ in range(_ROUNDS):
                at = self._distort(places)
                if not (np.abs(error := at - seen) > _EXACT).any():
                    break
                (xx, yx), (xy, yy) = ((self._distort(places + step) - at).T / _STEP for step in np.eye(2) * _STEP)
                x, y = error.T / (xx * yy - xy * yx)
                places -= np.stack((yy * x - xy * y, xx * y - yx * x), axis=1)
            places[~(np.abs(self._distort(places) - seen).max(axis=1) < _FOUND)] = np.nan
        return places

    def points(self, depth: Float32Array, transform: FloatArray) -> Float32Array:
        """Return where each pixel's surface is, float32 [H, W, 3] in metres; NaN where unknown.

        ``depth`` [H, W] is along the optical axis, in metres; ``transform`` [4, 4] leads from the optical frame to
        that of the points.
        """
        rays = self.rays @ transform[:3, :3].T
        rays *= depth[..., None]
        rays += transform[:3, 3]
        return rays.astype(np.float32)

    def register(self, depth: Float32Array, to: "CameraModel", transform: FloatArray) -> Float32Array:
        """Return the depth image that another camera would see, float32 [H, W] of its size; NaN where unknown.

        ``transform`` [4, 4] leads from this optical frame to the other one. Of surfaces in one pixel, the nearest
        is kept; what lies between the pixels of this camera stays unknown, as in depth_image_proc.
        """
        points = self.points(depth, transform).reshape(-1, 3).astype(float)
        points = points[points[:, 2] > 0]
        # What is far outside of the image would be folded into it by the distortion.
        places, (low, high) = points[:, :2] / points[:, 2:], to.borders
        outside = np.maximum(low - places, places - high)
        points = points[(outside < 1 / to.matrix[[0, 1], [0, 1]]).all(axis=1)]
        column, row = np.floor(to.pixels(points) + 0.5).T
        inside = (column >= 0) & (column < to.size[1]) & (row >= 0) & (row < to.size[0])
        seen = np.full(to.size[0] * to.size[1], np.inf, np.float32)
        at = (row[inside] * to.size[1] + column[inside]).astype(int)
        np.minimum.at(seen, at, points[inside, 2].astype(np.float32))
        seen[np.isinf(seen)] = np.nan
        return seen.reshape(to.size)


def read_camera_info(message: Any, *, rectified: bool = False) -> CameraModel:
    """Return the model of a ``sensor_msgs/CameraInfo``, of ``rectified`` images or of those that the camera sends.

    Raises ConfigError if the camera is not calibrated, or its distortion is not known.
    """
    full = np.array(message.p if rectified else message.k, float).reshape(3, -1)
    if not (np.isfinite(full).all() and full[0, 0] > 0 and full[1, 1] > 0):
        raise ConfigError(f"found {'P' if rectified else 'K'} {full.tolist()}: the camera is not calibrated")
    if full[0, 1] or (rectified and full[:, 3].any()):
        raise ConfigError(f"found {full.tolist()}: a skewed camera, or the second of a stereo pair, has no depth")
    model, distortion = message.distortion_model, np.array(() if rectified else message.d, float)
    if distortion.any() and not (len(distortion) in _COEFFICIENTS.get(model, ()) and np.isfinite(distortion).all()):
        known = ", ".join(f"{name} ({' or '.join(map(str, counts))})" for name, counts in _COEFFICIENTS.items())
        raise ConfigError(f"found distortion {model!r}, {distortion.tolist()}, expected one of {known}")
    region, matrix = message.roi, full[:, :3].copy()
    binning = np.array([max(1, message.binning_x), max(1, message.binning_y)])
    whole = not (region.width or region.height or region.x_offset or region.y_offset)
    width, height = (message.width, message.height) if whole else (region.width, region.height)
    matrix[:2, 2] -= region.x_offset, region.y_offset
    matrix[:2] /= binning[:, None]
    size = int(height // binning[1]), int(width // binning[0])
    if not 0 < size[0] * size[1] <= MAX_PIXELS:
        raise ConfigError(f"found size {width} x {height}, expected that of an image")
    distorted = distortion if distortion.any() else np.zeros(4)
    return CameraModel(
        message.header.frame_id.lstrip("/"), size, matrix, distorted, model == "equidistant" and not rectified
    )


def _series(factors: Sequence[float] | FloatArray, value: FloatArray) -> FloatArray:
    """Return 1 + a v + b v^2 + ... for ``factors`` a, b, ..."""
    return np.polyval([*reversed(factors), 1.0], value)
