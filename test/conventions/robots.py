"""Robots whose joints reach any pose: a gantry with a wrist, and the Panda of LIBERO."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Franka's modified DH parameters (Craig): a, d, alpha of each joint, from the manufacturer's documentation.
_PANDA = (
    (0.0, 0.333, 0.0),
    (0.0, 0.0, -np.pi / 2),
    (0.0, 0.316, np.pi / 2),
    (0.0825, 0.0, np.pi / 2),
    (-0.0825, 0.384, -np.pi / 2),
    (0.0, 0.0, np.pi / 2),
    (0.088, 0.0, np.pi / 2),
)
GANTRY_JOINTS = ("x", "y", "z", "yaw", "pitch", "roll")
_LIMIT = '<limit lower="-1000" upper="1000" velocity="1" effort="1"/>'

Array = np.ndarray[Any, Any]


def _joint(name: str, kind: str, parent: str, child: str, origin: Sequence[float], axis: str = "") -> str:
    x, y, z, roll, pitch, yaw = (f"{float(number):.17g}" for number in origin)
    limits = _LIMIT if axis else ""
    axis = f'<axis xyz="{axis}"/>' if axis else ""
    return (
        f'<link name="{child}"/><joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
        f'<origin xyz="{x} {y} {z}" rpy="{roll} {pitch} {yaw}"/>{axis}{limits}</joint>'
    )


def _write(path: Path, root: str, joints: Sequence[str]) -> Path:
    path.write_text(f'<robot name="r"><link name="{root}"/>{"".join(joints)}</robot>', encoding="utf-8")
    return path


def gantry(folder: Path, turn: Array | None = None) -> Path:
    """Write an arm whose tip has the pose x, y, z, Rz(yaw) Ry(pitch) Rx(roll) @ ``turn``."""
    axes = ("1 0 0", "0 1 0", "0 0 1", "0 0 1", "0 1 0", "1 0 0")
    joints = [
        _joint(name, "prismatic" if index < 3 else "revolute", f"l{index}", f"l{index + 1}", [0] * 6, axis)
        for index, (name, axis) in enumerate(zip(GANTRY_JOINTS, axes, strict=True))
    ]
    tip = _joint("tip", "fixed", "l6", "tip", [0, 0, 0, *_rpy(np.eye(3) if turn is None else turn)])
    return _write(folder / "gantry.urdf", "l0", [*joints, tip])


def panda(folder: Path, base: Array) -> Path:
    """Write a Panda that stands at ``base`` [3] in ``world``, with the link ``grip_site`` as LIBERO's robot has it.

    As in robosuite 1.4.0, the hand is 0.1065 m beyond the last joint (a real one: 0.107 m) and turned by -45
    degrees, and the grip site 0.097 m beyond the hand.
    """
    joints = [_joint("stand", "fixed", "world", "link0", [*base, 0, 0, 0])]
    joints += [
        _joint(
            f"joint{number}",
            "revolute",
            f"link{number - 1}",
            f"link{number}",
            [a, -np.sin(alpha) * d, np.cos(alpha) * d, alpha, 0, 0],
            "0 0 1",
        )
        for number, (a, d, alpha) in enumerate(_PANDA, 1)
    ]
    joints.append(_joint("wrist", "fixed", "link7", "hand", [0, 0, 0.1065, 0, 0, -2 * np.arctan2(0.383, 0.924)]))
    joints.append(_joint("grip", "fixed", "hand", "grip_site", [0, 0, 0.097, 0, 0, 0]))
    return _write(folder / "panda.urdf", "world", joints)


def gantry_joints(position: Array, matrix: Array) -> Array:
    """Return joint positions [6] of the gantry at a pose."""
    roll, pitch, yaw = _rpy(matrix)
    return np.array([*position, yaw, pitch, roll])


def _rpy(matrix: Array) -> tuple[float, float, float]:
    pitch = float(np.arctan2(-matrix[2, 0], np.hypot(matrix[0, 0], matrix[1, 0])))
    if abs(matrix[2, 0]) > 1 - 1e-12:
        return 0.0, pitch, float(np.arctan2(-matrix[0, 1], matrix[1, 1]))
    roll, yaw = np.arctan2(matrix[2, 1], matrix[2, 2]), np.arctan2(matrix[1, 0], matrix[0, 0])
    return float(roll), pitch, float(yaw)
