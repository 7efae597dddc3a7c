"""Arms whose kinematics is tested: the demo's, and a planar one that is known by hand."""

from pathlib import Path

import pytest

from vla_ros.kinematics.solver import Kinematics

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
