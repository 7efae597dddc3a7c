"""The simulated arm as one table: joints, links, limits and inertias, from which MJCF and URDF are written.

Seven revolute joints in the order z y z y z y z (shoulder, elbow, wrist) and a parallel gripper. In the zero
configuration the arm stands straight up and every frame has the axes of the base: x forward, y left, z up
(REP 103). ``tool`` lies between the finger tips; its z axis points out of the hand. Metres, radians, kilograms.

Everything here is numpy; neither MuJoCo nor Pinocchio is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vla_ros.types import FloatArray

Shape = Literal["capsule", "cylinder", "box", "sphere"]
Vector = tuple[float, float, float]

URDF_PATH = Path(__file__).parent / "assets" / "arm.urdf"
"""The description that comes with the package; :func:`vla_ros.sim.description.urdf` wrote it."""


@dataclass(frozen=True)
class Part:
    """A simple solid of a link, visible and collidable.

    Attributes:
        shape: ``capsule`` and ``cylinder`` stand along z, or along y where ``along_y``.
        size: Capsule, cylinder: (radius, full length between the caps' centres or faces); box: edges; sphere:
            (radius,).
        position: Centre in the link frame, metres.
        colour: Name in :data:`PALETTE`.
        along_y: Lay a capsule or cylinder along y.
    """

    shape: Shape
    size: tuple[float, ...]
    position: Vector
    colour: str
    along_y: bool = False


@dataclass(frozen=True)
class Link:
    """A rigid body: solids, mass and inertia, and the joint by which it hangs on its parent.

    Attributes:
        name: Link name.
        parent: Name of the parent link; "" for the base.
        joint: Joint name; "" for a fixed attachment.
        kind: ``revolute``, ``prismatic`` or ``fixed``.
        axis: Joint axis in the link frame.
        offset: Origin of the link frame in the parent's, metres; no frame is turned at zero.
        limits: (lower, upper) position, radians or metres.
        velocity: Limit, radians or metres per second.
        effort: Limit, newton metres or newtons.
        mass: Kilograms.
        centre: Centre of mass in the link frame, metres.
        inertia: Principal moments about the centre of mass along the link axes, kg m2.
        parts: What it looks like.
    """

    name: str
    parent: str
    joint: str
    kind: Literal["revolute", "prismatic", "fixed"]
    axis: Vector
    offset: Vector
    limits: tuple[float, float]
    velocity: float
    effort: float
    mass: float
    centre: Vector
    inertia: Vector
    parts: tuple[Part, ...]


PALETTE: dict[str, tuple[float, float, float]] = {
    "shell": (0.86, 0.88, 0.90),
    "joint": (0.23, 0.27, 0.33),
    "accent": (0.95, 0.55, 0.15),
    "finger": (0.16, 0.18, 0.22),
}
"""Colours of the arm, RGB in [0, 1]."""

FINGER_TRAVEL = 0.04
"""Opening of each finger in metres; 0 is closed."""

_FIXED: tuple[float, float] = (0.0, 0.0)
_Z: Vector = (0.0, 0.0, 1.0)
_Y: Vector = (0.0, 1.0, 0.0)


def _tube(mass: float, radius: float, length: float) -> Vector:
    """Moments of a solid cylinder along z about its centre, kg m2."""
    across = mass * (3 * radius**2 + length**2) / 12
    return (across, across, mass * radius**2 / 2)


def _block(mass: float, edges: Vector) -> Vector:
    """Moments of a solid box about its centre, kg m2."""
    x, y, z = (edge**2 for edge in edges)
    return (mass * (y + z) / 12, mass * (x + z) / 12, mass * (x + y) / 12)


def _segment(
    number: int, axis: Vector, offset: float, limit: tuple[float, float], mass: float, radius: float, length: float
) -> Link:
    """One arm segment: a capsule up to the next joint, and a drum around a joint that turns about y."""
    centre: Vector = (0.0, 0.0, length / 2)
    drum = (
        (Part("cylinder", (radius * 1.12, radius * 2.3), (0.0, 0.0, 0.0), "joint", along_y=True),)
        if axis == _Y
        else (Part("cylinder", (radius * 1.04, 0.02), (0.0, 0.0, 0.01), "accent"),)
    )
    return Link(
        name=f"link_{number}",
        parent=f"link_{number - 1}" if number > 1 else "base_link",
        joint=f"joint_{number}",
        kind="revolute",
        axis=axis,
        offset=(0.0, 0.0, offset),
        limits=limit,
        velocity=3.0 if number < 5 else 4.0,
        effort=120.0 if number < 5 else 40.0,
        mass=mass,
        centre=centre,
        inertia=_tube(mass, radius, length + radius),
        parts=(*drum, Part("capsule", (radius, length), centre, "shell")),
    )


def _finger(side: Literal["left", "right"]) -> Link:
    sign = 1.0 if side == "left" else -1.0
    edges = (0.022, 0.014, 0.055)
    centre = (0.0, sign * edges[1] / 2, edges[2] / 2)
    return Link(
        name=f"{side}_finger",
        parent="link_7",
        joint=f"finger_{side}",
        kind="prismatic",
        axis=(0.0, sign, 0.0),
        offset=(0.0, 0.0, 0.075),
        limits=(0.0, FINGER_TRAVEL),
        velocity=0.5,
        effort=15.0,
        mass=0.06,
        centre=centre,
        inertia=_block(0.06, edges),
        parts=(Part("box", edges, centre, "finger"),),
    )


_HAND = (0.045, 0.125, 0.045)

LINKS: tuple[Link, ...] = (
    Link(
        name="base_link",
        parent="",
        joint="",
        kind="fixed",
        axis=_Z,
        offset=(0.0, 0.0, 0.0),
        limits=_FIXED,
        velocity=0.0,
        effort=0.0,
        mass=4.0,
        centre=(0.0, 0.0, 0.06),
        inertia=_tube(4.0, 0.085, 0.12),
        parts=(
            Part("cylinder", (0.105, 0.02), (0.0, 0.0, 0.01), "joint"),
            Part("cylinder", (0.075, 0.13), (0.0, 0.0, 0.085), "shell"),
        ),
    ),
    _segment(1, _Z, 0.16, (-2.8, 2.8), 3.0, 0.062, 0.16),
    _segment(2, _Y, 0.18, (-1.9, 1.9), 2.5, 0.058, 0.18),
    _segment(3, _Z, 0.20, (-2.8, 2.8), 2.2, 0.054, 0.18),
    _segment(4, _Y, 0.20, (0.05, 2.6), 1.8, 0.050, 0.18),
    _segment(5, _Z, 0.20, (-2.8, 2.8), 1.5, 0.046, 0.16),
    _segment(6, _Y, 0.18, (-2.0, 2.4), 0.9, 0.042, 0.06),
    Link(
        name="link_7",
        parent="link_6",
        joint="joint_7",
        kind="revolute",
        axis=_Z,
        offset=(0.0, 0.0, 0.09),
        limits=(-2.8, 2.8),
        velocity=4.0,
        effort=40.0,
        mass=0.7,
        centre=(0.0, 0.0, 0.04),
        inertia=_block(0.7, (0.05, 0.13, 0.08)),
        parts=(
            Part("cylinder", (0.036, 0.04), (0.0, 0.0, 0.015), "accent"),
            Part("box", _HAND, (0.0, 0.0, 0.0525), "joint"),
        ),
    ),
    _finger("left"),
    _finger("right"),
    Link(
        name="tool",
        parent="link_7",
        joint="",
        kind="fixed",
        axis=_Z,
        offset=(0.0, 0.0, 0.117),
        limits=_FIXED,
        velocity=0.0,
        effort=0.0,
        mass=0.0,
        centre=(0.0, 0.0, 0.0),
        inertia=(0.0, 0.0, 0.0),
        parts=(),
    ),
)
"""Every link, parents first."""

CHAIN: tuple[Link, ...] = tuple(link for link in LINKS if link.kind == "revolute")
JOINT_NAMES: tuple[str, ...] = tuple(link.joint for link in CHAIN)
FINGER_NAMES: tuple[str, ...] = ("finger_left", "finger_right")
HOME: FloatArray = np.array([0.0, 0.438, 0.0, 1.834, 0.0, math.pi - 0.438 - 1.834, 0.0])
"""Joint positions, radians, with the tool pointing straight down 0.25 m above the table at x = 0.46 m."""
HOME.setflags(write=False)

TOOL_DOWN: FloatArray = np.diag([-1.0, 1.0, -1.0])
"""Rotation of ``tool`` in the base frame when the hand points straight down and the fingers open along y."""
TOOL_DOWN.setflags(write=False)

_TOOL_OFFSET = LINKS[-1].offset[2]


def forward(joints: FloatArray) -> FloatArray:
    """Pose of ``tool`` in the base frame.

    Args:
        joints: Float64 [7], radians, in the order of :data:`JOINT_NAMES`.

    Returns:
        Float64 [4, 4] homogeneous transform, metres.
    """
    return _chain(joints)[0]


def _chain(joints: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Tool pose [4, 4] and its geometric Jacobian [6, 7] (linear above angular) in the base frame."""
    rotation = np.eye(3)
    origin = np.zeros(3)
    axes, origins = np.empty((7, 3)), np.empty((7, 3))
    for index, (link, angle) in enumerate(zip(CHAIN, joints, strict=True)):
        origin = origin + rotation[:, 2] * link.offset[2]
        cos, sin = math.cos(angle), math.sin(angle)
        x, y, z = rotation.T
        axes[index], origins[index] = (y if link.axis == _Y else z), origin
        columns = (
            (cos * x - sin * z, y, sin * x + cos * z)
            if link.axis == _Y
            else (cos * x + sin * y, cos * y - sin * x, z)
        )
        rotation = np.stack(columns, axis=1)
    pose = np.eye(4)
    pose[:3, :3] = rotation
    pose[:3, 3] = origin + rotation[:, 2] * _TOOL_OFFSET
    return pose, np.concatenate([np.cross(axes, pose[:3, 3] - origins).T, axes.T])


def rotation_vector(rotation: FloatArray) -> FloatArray:
    """Axis times angle, float64 [3] radians, of a rotation matrix [3, 3] that turns by less than pi."""
    skew = np.array(
        [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    )
    sine = float(np.linalg.norm(skew)) / 2
    angle = math.atan2(sine, (float(np.trace(rotation)) - 1) / 2)
    factor = 0.5 if sine < 1e-9 else angle / (2 * sine)
    return factor * skew


def inverse(position: FloatArray, start: FloatArray = HOME, iterations: int = 60) -> FloatArray:
    """Joint positions, float64 [7], that bring ``tool`` to ``position`` [3] pointing straight down.

    Damped least squares (Nakamura and Hanafusa, 1986) with a pull to :data:`HOME` in the null space; used to
    place the arm at the start of an episode, not by the command path.

    Raises:
        ValueError: The position is out of reach.
    """
    joints = np.array(start, dtype=np.float64)
    low, high = (np.array([link.limits[side] for link in CHAIN]) for side in (0, 1))
    for _ in range(iterations):
        pose, jacobian = _chain(joints)
        error = np.concatenate([position - pose[:3, 3], rotation_vector(TOOL_DOWN @ pose[:3, :3].T)])
        inverted = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + 0.01**2 * np.eye(6))
        rest = (np.eye(7) - inverted @ jacobian) @ (HOME - joints)
        joints = np.clip(joints + inverted @ error + 0.1 * rest, low, high)
    missed = float(np.linalg.norm(position - forward(joints)[:3, 3]))
    if missed > 1e-3:
        raise ValueError(f"{position} m is out of the arm's reach (missed by {missed:.3f} m)")
    return joints
