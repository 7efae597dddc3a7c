"""Converts rotation matrices to the forms of states and actions, and back.

``contract.parts.ROTATION_SIZES`` lists the forms. Quaternions are written with w >= 0, and read with either sign
and any length but zero. Euler angles are roll, pitch and yaw about fixed axes (REP 103). The 6-D rotation (Zhou et
al., "On the Continuity of Rotation Representations in Neural Networks", 2019) is orthonormalised by the
Gram-Schmidt process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vla_ros.kinematics.transforms import euler_xyz_matrix, rotation_vector, rotation_vector_matrix
from vla_ros.types import FloatArray

_SMALLEST = 1e-6  # a shorter vector has no direction


def write_rotation(matrix: FloatArray, form: str) -> FloatArray:
    """Return the numbers [3, 4 or 6] of a rotation matrix [3, 3]."""
    return _WRITE[form](matrix)


def read_rotation(numbers: FloatArray, form: str) -> FloatArray:
    """Return the rotation matrix [3, 3] of ``numbers`` [3, 4 or 6].

    Raises ValueError if a quaternion has length zero, or the vectors of a 6-D rotation have no direction.
    """
    return _READ[form](np.asarray(numbers, dtype=np.float64))


def nearest(numbers: FloatArray, form: str, to: FloatArray) -> FloatArray:
    """Return the equivalent of ``numbers`` nearest to ``to``, so that the two can be averaged.

    A quaternion and its negative are the same rotation, as are angles that differ by whole turns.
    """
    if form.startswith("quaternion"):
        return -numbers if numbers @ to < 0 else numbers
    if form == "euler_xyz":
        turned: FloatArray = numbers + 2 * np.pi * np.round((to - numbers) / (2 * np.pi))
        return turned
    angle = float(np.linalg.norm(numbers))
    if form == "rotation_vector" and angle > 0:
        around: FloatArray = numbers * (1 - 2 * np.pi / angle)
        return min(numbers, around, key=lambda each: float(np.linalg.norm(each - to)))
    return numbers


def _quaternion_xyzw(matrix: FloatArray) -> FloatArray:
    """Compute the largest component first, to avoid dividing by small numbers (Shepperd 1978)."""
    m = matrix
    trace = m[0, 0] + m[1, 1] + m[2, 2]
    squares = np.array([m[0, 0], m[1, 1], m[2, 2], trace])
    best = int(np.argmax(squares))
    if best == 3:
        q = np.array([m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1], 1 + trace])
    else:
        i, j, k = best, (best + 1) % 3, (best + 2) % 3
        q = np.empty(4)
        q[i] = 1 + m[i, i] - m[j, j] - m[k, k]
        q[j], q[k], q[3] = m[j, i] + m[i, j], m[k, i] + m[i, k], m[k, j] - m[j, k]
    q /= np.linalg.norm(q)
    return -q if q[3] < 0 else q


def _matrix_of_xyzw(q: FloatArray) -> FloatArray:
    x, y, z, w = _unit(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def _euler_xyz(matrix: FloatArray) -> FloatArray:
    """Return roll, pitch and yaw; at a pitch of 90 degrees, roll is 0."""
    cosine = float(np.hypot(matrix[0, 0], matrix[1, 0]))
    pitch = np.arctan2(-matrix[2, 0], cosine)
    if cosine < _SMALLEST:
        return np.array([0.0, pitch, np.arctan2(-matrix[0, 1], matrix[1, 1])])
    return np.array([np.arctan2(matrix[2, 1], matrix[2, 2]), pitch, np.arctan2(matrix[1, 0], matrix[0, 0])])


def _orthonormal(numbers: FloatArray) -> FloatArray:
    """Return three orthonormal rows [3, 3] from two rows [6]."""
    first = _unit(numbers[:3])
    second = _unit(numbers[3:] - (first @ numbers[3:]) * first)
    return np.stack((first, second, np.cross(first, second)))


def _unit(vector: FloatArray) -> FloatArray:
    length = float(np.linalg.norm(vector))
    if not length > _SMALLEST:
        raise ValueError(f"{np.array2string(vector, precision=4)} has no direction")
    return vector / length


_WRITE: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "rotation_vector": rotation_vector,
    "quaternion_xyzw": _quaternion_xyzw,
    "quaternion_wxyz": lambda matrix: np.roll(_quaternion_xyzw(matrix), 1),
    "euler_xyz": _euler_xyz,
    "rot6d": lambda matrix: matrix[:2].ravel(),
    "rot6d_columns": lambda matrix: matrix.T[:2].ravel(),
}
_READ: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "rotation_vector": rotation_vector_matrix,
    "quaternion_xyzw": _matrix_of_xyzw,
    "quaternion_wxyz": lambda q: _matrix_of_xyzw(np.roll(q, -1)),
    "euler_xyz": euler_xyz_matrix,
    "rot6d": _orthonormal,
    "rot6d_columns": lambda numbers: _orthonormal(numbers).T,
}
