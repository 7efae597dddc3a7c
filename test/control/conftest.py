"""What the tests of control share: the demo's arm, a planar arm whose kinematics is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_ros.config import Config, build
from vla_ros.control.kinematics import Kinematics
from vla_ros.types import JointState

HOME = (0.0, 0.5, 0.0, 1.2, 0.0, 0.8, 0.0)
FINGERS = ("finger_left", "finger_right")

PLANAR = """<robot name="planar">
  <link name="world"/><link name="base"/><link name="upper"/><link name="fore"/><link name="hand"/>
  <joint name="stand" type="fixed">
    <parent link="world"/><child link="base"/><origin xyz="1 2 3" rpy="0 0 1.5707963267948966"/>
  </joint>
  <joint name="shoulder" type="continuous">
    <parent link="base"/><child link="upper"/><axis xyz="0 0 1"/><limit effort="1" velocity="0"/>
  </joint>
  <joint name="elbow" type="revolute">
    <parent link="upper"/><child link="fore"/><origin xyz="0.3 0 0"/><axis xyz="0 0 1"/>
    <limit lower="-2" upper="2" effort="1" velocity="1.5"/>
  </joint>
  <joint name="slide" type="prismatic">
    <parent link="fore"/><child link="hand"/><origin xyz="0.2 0 0"/><axis xyz="1 0 0"/>
    <limit lower="0" upper="0.1" effort="1" velocity="0.5"/>
  </joint>
</robot>
"""


@pytest.fixture(scope="session")
def arm() -> Kinematics:
    """The demo's arm with seven joints."""
    return Kinematics.from_urdf("demo")


@pytest.fixture
def planar_urdf(tmp_path: Path) -> Path:
    path = tmp_path / "planar.urdf"
    path.write_text(PLANAR)
    return path


@pytest.fixture
def configure() -> Callable[..., Config]:
    """Options of the demo's arm with changes by section: ``configure(limits={"max_joint_step": 0.1})``."""

    def make(**sections: dict[str, Any]) -> Config:
        values = {
            "robot.urdf": "demo",
            "robot.gripper_joint_names": list(FINGERS),
            "control.delta_from": "measured",
        }
        for section, fields in sections.items():
            values.update({f"{section}.{name}": value for name, value in fields.items()})
        return build(values)

    return make


@pytest.fixture
def state(arm: Kinematics) -> Callable[..., JointState]:
    """A joint state of the demo's arm: ``state()`` is at home with open fingers."""

    def make(arm_positions: Any = HOME, fingers: float = 0.04, stamp: int = 1_000) -> JointState:
        positions = np.array([*arm_positions, fingers, fingers], dtype=np.float64)
        return JointState((*arm.joint_names, *FINGERS), positions, stamp)

    return make
