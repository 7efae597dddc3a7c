"""Poses and rotations, and the forms in which states and actions have them.

``contract.components.ROTATION_SIZES`` lists the forms. Quaternions are written with w >= 0, and read with either
sign and any length but zero. Rotation vectors are written with an angle up to pi. Euler angles are roll, pitch and
yaw about fixed axes (REP 103). :func:`nearest` finds other numbers of the same rotation. The 6-D rotation (Zhou et
al., "On the Continuity of Rotation Representations in Neural Networks", 2019) is orthonormalised by the
Gram-Schmidt process. For three numbers, plain floats are five times as fast as numpy.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from vla_ros.types import FloatArray

_SMALLEST = 1e-6  # a shorter vector has no direction


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


def transform(rotation: FloatArray, position: FloatArray) -> FloatArray:
    """Return the matrix [4, 4] of a rotation [3, 3] and a position [3]."""
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = rotation, position
    return found


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
