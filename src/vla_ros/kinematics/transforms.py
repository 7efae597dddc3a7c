"""Poses and rotations. For three numbers, plain floats are five times as fast as numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.types import FloatArray


@dataclass(frozen=True)
class Pose:
    """A frame's pose in the base frame."""

    position: FloatArray  # float64 [3], metres
    rotation: FloatArray  # float64 [3, 3]; its columns are the frame's axes


def euler_xyz_matrix(angles: FloatArray) -> FloatArray:
    """Return the rotation [3, 3] of roll, pitch and yaw [3] in radians about fixed axes (REP 103)."""
    roll, pitch, yaw = angles.tolist()
    sr, sp, sy = math.sin(roll), math.sin(pitch), math.sin(yaw)
    cr, cp, cy = math.cos(roll), math.cos(pitch), math.cos(yaw)
    return np.array(
        [
            [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
            [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
            [-sp, cp * sr, cp * cr],
        ]
    )


def rotation_vector_matrix(vector: FloatArray) -> FloatArray:
    """Return the rotation [3, 3] about ``vector`` [3], whose length is the angle in radians."""
    x, y, z = vector.tolist()
    angle = math.hypot(x, y, z)
    skew = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    if angle < 1e-6:  # sin(a)/a and (1-cos(a))/a^2 to second order
        first, second = 1.0, 0.5
    else:
        first, second = math.sin(angle) / angle, (1 - math.cos(angle)) / angle**2
    result: FloatArray = np.eye(3) + first * skew + second * (skew @ skew)
    return result


def rotation_vector(rotation: FloatArray) -> FloatArray:
    """Return the vector [3] along the axis of ``rotation``; its length is the angle in [0, pi]."""
    axis, sine, cosine = _axis(rotation)
    angle = math.atan2(sine, cosine)
    if sine > 1e-6:
        scale = angle / sine
        return np.array([scale * part for part in axis])
    if cosine > 0:
        return np.array(axis)
    # Half a turn: the axis is the column of R + R^T + 2 with the largest diagonal entry.
    symmetric = rotation + rotation.T + 2 * np.eye(3)
    column: FloatArray = symmetric[:, int(np.argmax(np.diag(symmetric)))]
    return column * math.copysign(angle / float(np.linalg.norm(column)), float(column @ axis) or 1.0)


def rotation_angle(rotation: FloatArray) -> float:
    """Return the angle of ``rotation`` in radians, in [0, pi]."""
    _, sine, cosine = _axis(rotation)
    return math.atan2(sine, cosine)


def _axis(rotation: FloatArray) -> tuple[tuple[float, float, float], float, float]:
    """Return the axis [3] times the sine of the angle, the sine (not negative), and the cosine."""
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = rotation.tolist()
    x, y, z = 0.5 * (zy - yz), 0.5 * (xz - zx), 0.5 * (yx - xy)
    return (x, y, z), math.hypot(x, y, z), 0.5 * (xx + yy + zz - 1.0)
