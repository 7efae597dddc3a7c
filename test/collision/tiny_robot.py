"""URDFs of primitives and small meshes, written by the tests."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.collision.world import World, make_world
from vla_ros.config import Config, build
from vla_ros.kinematics.solver import Kinematics

BOX = [f'<geometry><box size="{size}"/></geometry>' for size in ("0.1 0.1 0.1", "0.06 0.06 0.3", "0.02 0.02 0.02")]
ARM = f"""<robot name="tiny">
  <link name="base"><collision>{BOX[0]}</collision></link>
  <link name="upper"><collision><origin xyz="0 0 0.25"/>{BOX[1]}</collision></link>
  <link name="lower"><collision><origin xyz="0 0 0.25"/>{BOX[1]}</collision></link>
  <link name="hand"><collision><origin xyz="0 0 0.05"/>{BOX[2]}</collision></link>
  <link name="finger"><collision><origin xyz="0.02 0 0.1"/>{BOX[2]}</collision></link>
  <link name="thumb"><collision><origin xyz="-0.02 0 0.1"/>{BOX[2]}</collision></link>
  <link name="tip"/>
  <joint name="a" type="revolute"><parent link="base"/><child link="upper"/><origin xyz="0 0 0.1"/>
    <axis xyz="0 1 0"/><limit lower="-3" upper="3" velocity="2" effort="1"/></joint>
  <joint name="b" type="continuous"><parent link="upper"/><child link="lower"/>
    <origin xyz="0 0 0.5" rpy="0.1 0 0.2"/><axis xyz="0 1 0"/><limit velocity="2" effort="1"/></joint>
  <joint name="c" type="prismatic"><parent link="lower"/><child link="hand"/><origin xyz="0 0 0.4"/>
    <axis xyz="0 0 1"/><limit lower="0" upper="0.1" velocity="1" effort="1"/></joint>
  <joint name="f" type="prismatic"><parent link="hand"/><child link="finger"/>
    <axis xyz="1 0 0"/><limit lower="0" upper="0.04" velocity="1" effort="1"/></joint>
  <joint name="g" type="prismatic"><parent link="hand"/><child link="thumb"/>
    <axis xyz="-1 0 0"/><limit lower="0" upper="0.04" velocity="1" effort="1"/>
    <mimic joint="f" multiplier="2"/></joint>
  <joint name="t" type="fixed"><parent link="hand"/><child link="tip"/><origin xyz="0 0 0.12"/></joint>
</robot>"""
JOINTS = ("a", "b", "c")


def options(urdf: Path, **collision: Any) -> Config:
    values: dict[str, Any] = {"check": True, "deceleration": 10.0} | collision
    robot = {"urdf": str(urdf), "joint_names": list(JOINTS), "tip_frame": "tip", "gripper_joint_names": ["f"]}
    return build(
        {f"robot.{name}": value for name, value in robot.items()}
        | {f"collision.{name}": value for name, value in values.items()}
        | {"gripper.open_position": 0.04, "topics.gripper": "/gripper"}
    )


def write(folder: Path, text: str = ARM, name: str = "tiny.urdf") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def world_of(folder: Path, text: str = ARM, **collision: Any) -> World:
    config = options(write(folder, text), **collision)
    robot = config.robot
    world = make_world(config, {"arm": Kinematics.from_urdf(robot.urdf, robot.joint_names, "", robot.tip_frame)})
    assert world is not None
    return world


def write_stl(path: Path, triangles: np.ndarray) -> None:
    """Write triangles [N, 3, 3] as a binary STL."""
    rows = [struct.pack("<12fH", 0, 0, 0, *triangle.ravel(), 0) for triangle in triangles]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0" * 80 + struct.pack("<I", len(rows)) + b"".join(rows))


def box(low: Any, high: Any) -> np.ndarray:
    """Triangles [12, 3, 3] of a box."""
    corners = np.array(np.meshgrid(*zip(low, high, strict=True), indexing="ij")).reshape(3, 8).T
    faces = [(0, 1, 3), (0, 3, 2), (4, 6, 7), (4, 7, 5), (0, 4, 5), (0, 5, 1)]
    faces += [(2, 3, 7), (2, 7, 6), (0, 2, 6), (0, 6, 4), (1, 5, 7), (1, 7, 3)]
    return corners[np.array(faces)]
