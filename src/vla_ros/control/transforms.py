"""Rotations and poses as small functions over numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.types import FloatArray


@dataclass(frozen=True)
class Pose:
    """Where a frame is, seen from the base frame.

    Attributes:
        position: Float64 [3], metres.
        rotation: Float64 [3, 3]; its columns are the frame's axes.
    """

    position: FloatArray
    rotation: FloatArray


def euler_xyz_matrix(angles: FloatArray) -> FloatArray:
    """Rotation of roll, pitch and yaw [3] in radians about fixed axes x, y, z, in this order (REP 103)."""
    (sr, sp, sy), (cr, cp, cy) = np.sin(angles), np.cos(angles)
    return np.array(
        [
            [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
            [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
            [-sp, cp * sr, cp * cr],
        ]
    )


def rotation_vector_matrix(vector: FloatArray) -> FloatArray:
    """Rotation about ``vector`` [3] by its length in radians (Rodrigues' formula)."""
    angle = float(np.linalg.norm(vector))
    x, y, z = vector
    skew = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    if angle < 1e-6:  # sin(a)/a and (1-cos(a))/a^2 to second order
        first, second = 1.0, 0.5
    else:
        first, second = math.sin(angle) / angle, (1 - math.cos(angle)) / angle**2
    result: FloatArray = np.eye(3) + first * skew + second * (skew @ skew)
    return result


def rotation_vector(rotation: FloatArray) -> FloatArray:
    """The vector [3] whose direction is the axis and whose length in [0, pi] is the angle of ``rotation``."""
    axis: FloatArray = 0.5 * np.array(
        [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    )
    sine = float(np.linalg.norm(axis))
    cosine = 0.5 * (float(np.trace(rotation)) - 1.0)
    angle = math.atan2(sine, cosine)
    if sine > 1e-6:
        axis *= angle / sine
        return axis
    if cosine > 0:
        return axis
    # Half a turn: the axis is the column of R + 1 with the largest diagonal entry.
    symmetric = 0.5 * (rotation + np.eye(3))
    column: FloatArray = symmetric[:, int(np.argmax(np.diag(symmetric)))]
    return column * (angle / float(np.linalg.norm(column)))


def rotation_angle(rotation: FloatArray) -> float:
    """Angle of ``rotation`` in radians, in [0, pi]."""
    return float(np.linalg.norm(rotation_vector(rotation)))
