"""Kinematics of the simulated arm (``demo_arm.urdf`` of :mod:`vla_ros.kinematics`) in plain numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vla_ros.kinematics import urdf
from vla_ros.kinematics.rotations import rotation_vector
from vla_ros.types import FloatArray

ASSETS = Path(__file__).parent / "assets"

FINGER_TRAVEL = 0.04
"""Opening of each finger in metres; 0 is closed."""


class Joint(NamedTuple):
    """A revolute joint: its axis, its offset from the previous joint along z (metres) and its limits (radians)."""

    axis: Literal["y", "z"]
    offset: float
    limits: tuple[float, float]


CHAIN = (
    Joint("z", 0.16, (-2.8, 2.8)),
    Joint("y", 0.18, (-1.9, 1.9)),
    Joint("z", 0.20, (-2.8, 2.8)),
    Joint("y", 0.20, (0.05, 2.6)),
    Joint("z", 0.20, (-2.8, 2.8)),
    Joint("y", 0.18, (-2.0, 2.4)),
    Joint("z", 0.09, (-2.8, 2.8)),
)
_LIMITS = np.array([joint.limits for joint in CHAIN]).T
JOINT_NAMES = tuple(f"joint_{number}" for number in range(1, 8))
FINGER_NAMES = ("finger_left", "finger_right")
HOME: FloatArray = np.array([0.0, 0.438, 0.0, 1.834, 0.0, math.pi - 0.438 - 1.834, 0.0])
"""Joint positions, radians, with the tool pointing straight down 0.25 m above the table at x = 0.46 m."""
HOME.setflags(write=False)

TOOL_DOWN: FloatArray = np.diag([-1.0, 1.0, -1.0])
"""Rotation of ``tool`` in the base frame when the hand points straight down and the fingers open along y."""
TOOL_DOWN.setflags(write=False)


class Mount(NamedTuple):
    """The names of an arm and its place on the table."""

    name: str  # its name in ``robot.arms``; ``arm`` if it is the only one
    prefix: str = ""  # prefix of its joint names
    position: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of its unrotated base in the table's frame, metres

    @property
    def joint_names(self) -> tuple[str, ...]:
        """The nine joint names: seven of the arm, then two fingers."""
        return tuple(f"{self.prefix}{name}" for name in (*JOINT_NAMES, *FINGER_NAMES))


ONE_ARM = (Mount("arm"),)
TWO_ARMS = tuple(Mount(name, f"{name}_", place) for name, place in urdf.DEMO_MOUNTS.items())

_TOOL_OFFSET = 0.117  # m from the last joint
_DAMPING, _EYE = 0.01**2 * np.eye(6), np.eye(7)


def forward(joints: FloatArray) -> FloatArray:
    """Return the pose of ``tool`` in the base frame, float64 [4, 4], metres, at joint positions [7], radians."""
    return _chain(joints)[0]


def _chain(joints: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the tool pose [4, 4], and axes [7, 3] and origins [7, 3] of the joints, in the base frame."""
    x, y, z = np.eye(3)
    origin = np.zeros(3)
    axes, origins = np.empty((7, 3)), np.empty((7, 3))
    for index, (joint, angle) in enumerate(zip(CHAIN, joints.tolist(), strict=True)):
        origin = origin + z * joint.offset
        origins[index] = origin
        cos, sin = math.cos(angle), math.sin(angle)
        if joint.axis == "y":
            axes[index] = y
            x, z = cos * x - sin * z, sin * x + cos * z
        else:
            axes[index] = z
            x, y = cos * x + sin * y, cos * y - sin * x
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2] = x, y, z
    pose[:3, 3] = origin + z * _TOOL_OFFSET
    return pose, axes, origins


def _jacobian(pose: FloatArray, axes: FloatArray, origins: FloatArray) -> FloatArray:
    """Return the geometric Jacobian of the tool, linear above angular, [6, 7]."""
    (ax, ay, az), (lx, ly, lz) = axes.T, (pose[:3, 3] - origins).T
    return np.stack((ay * lz - az * ly, az * lx - ax * lz, ax * ly - ay * lx, ax, ay, az))


def inverse(position: FloatArray, start: FloatArray = HOME) -> FloatArray:
    """Return the joint positions, float64 [7], that bring ``tool`` to ``position`` [3] pointing straight down.

    Raises ValueError if the position is out of reach.
    """
    joints = solve(position, TOOL_DOWN, start, 60)
    missed = float(np.linalg.norm(position - forward(joints)[:3, 3]))
    if missed > 1e-3:
        raise ValueError(f"{position} m is out of the arm's reach (missed by {missed:.3f} m)")
    return joints


def solve(position: FloatArray, rotation: FloatArray, start: FloatArray, iterations: int) -> FloatArray:
    """Return the joint positions, float64 [7], that move ``tool`` towards ``position`` [3] and ``rotation`` [3, 3].

    Damped least squares (Nakamura and Hanafusa, 1986) with a pull to :data:`HOME` in the null space.
    """
    joints = np.array(start, dtype=np.float64)
    for _ in range(iterations):
        pose, *frames = _chain(joints)
        jacobian = _jacobian(pose, *frames)
        error = np.concatenate([position - pose[:3, 3], rotation_vector(rotation @ pose[:3, :3].T)])
        inverted = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + _DAMPING)
        rest = (_EYE - inverted @ jacobian) @ (HOME - joints)
        joints = np.clip(joints + inverted @ error + 0.1 * rest, *_LIMITS)
    return joints
