"""Converts rotation matrices to the forms of states and actions, and back.

``contract.components.ROTATION_SIZES`` lists the forms. Quaternions are written with w >= 0, and read with either
sign and any length but zero. Rotation vectors are written with an angle up to pi. Euler angles are roll, pitch and
yaw about fixed axes (REP 103). :func:`nearest` finds other numbers of the same rotation. The 6-D rotation (Zhou et
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
    """Return the numbers of the same rotation nearest to ``to``.

    A quaternion and its negative are the same rotation, and so are rotation vectors whose lengths differ by whole
    turns about the same axis, Euler angles that differ by whole turns, and roll + pi, pi - pitch, yaw + pi. At a
    pitch of 90 degrees, only the sum or difference of roll and yaw matters. A 6-D rotation is unique.
    """
    if form.startswith("quaternion"):
        return -numbers if numbers @ to < 0 else numbers
    if form == "euler_xyz":
        return _nearest_angles(numbers, to)
    return _nearest_vector(numbers, to) if form == "rotation_vector" else numbers


def _nearest_vector(vector: FloatArray, to: FloatArray) -> FloatArray:
    """Return the rotation vector whose quaternion is nearest: 2 pi more of length changes the quaternion's sign.

    The distance between the vectors themselves chooses wrongly for long vectors: for four of 160 poses of a LIBERO
    trajectory, near (pi, 0, 0).
    """
    angle, length = float(np.linalg.norm(vector)), float(np.linalg.norm(to))
    axis, direction = (each / (size or 1.0) for each, size in ((vector, angle), (to, length)))
    along = float(axis @ direction)
    cosine = np.cos(angle / 2) * np.cos(length / 2) + np.sin(angle / 2) * np.sin(length / 2) * along
    turns = -1.0 if cosine < 0 else 0.0
    if angle < _SMALLEST:  # the axis is unknown: a whole turn may be about any
        axis, along = direction, 1.0
    turns += 2 * np.round((length * along - angle - 2 * np.pi * turns) / (4 * np.pi))
    return vector + 2 * np.pi * turns * axis if turns else vector


def _nearest_angles(angles: FloatArray, to: FloatArray) -> FloatArray:
    roll, pitch, yaw = angles
    if np.cos(pitch) ** 2 < _SMALLEST**2:
        sign = np.copysign(1.0, np.sin(pitch))  # roll - sign * yaw is known
        half = 0.5 * _wrapped(roll - sign * yaw - (to[0] - sign * to[2]))
        angles = np.array([to[0] + half, pitch, to[2] - sign * half])
    other = np.array([np.pi, np.pi, np.pi]) + angles * (1, -1, 1)
    turned = [each + _turns(to - each) for each in (angles, other)]
    return min(turned, key=lambda each: float(np.abs(each - to).max()))


def _turns(angles: FloatArray) -> FloatArray:
    """Return ``angles``, rounded to whole turns."""
    whole: FloatArray = 2 * np.pi * np.round(angles / (2 * np.pi))
    return whole


def _wrapped(angle: float) -> float:
    return float(angle - 2 * np.pi * np.round(angle / (2 * np.pi)))


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
    "rot6d_interleaved": lambda matrix: matrix[:, :2].ravel(),
}
_READ: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "rotation_vector": rotation_vector_matrix,
    "quaternion_xyzw": _matrix_of_xyzw,
    "quaternion_wxyz": lambda q: _matrix_of_xyzw(np.roll(q, -1)),
    "euler_xyz": euler_xyz_matrix,
    "rot6d": _orthonormal,
    "rot6d_columns": lambda numbers: _orthonormal(numbers).T,
    "rot6d_interleaved": lambda numbers: _orthonormal(numbers.reshape(3, 2).T.ravel()).T,
}
