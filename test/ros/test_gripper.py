"""Gripper actions of ros2_control's own controllers, on mock hardware."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")
pytest.importorskip("control_msgs", reason="control_msgs is not installed")

pytestmark = pytest.mark.ros

SCRIPTED = Path(__file__).parents[1] / "node" / "scripted_node.py"

URDF = """<robot name="hand"><link name="base"/><link name="finger"/>
<joint name="finger_left" type="prismatic"><parent link="base"/><child link="finger"/><axis xyz="0 1 0"/>
<limit lower="0" upper="0.04" velocity="1" effort="10"/></joint>
<ros2_control name="hand" type="system"><hardware><plugin>mock_components/GenericSystem</plugin></hardware>
<joint name="finger_left"><command_interface name="position"/>
<state_interface name="position"><param name="initial_value">0.02</param></state_interface>
<state_interface name="velocity"/><state_interface name="effort"/></joint></ros2_control></robot>"""

CONTROLLERS = {
    "gripper_command": "position_controllers/GripperActionController",
    "parallel_gripper_command": "parallel_gripper_action_controller/GripperActionController",
}

PARAMETERS = """
controller_manager:
  ros__parameters:
    update_rate: 50
    hand: {type: KIND}
    broadcaster: {type: joint_state_broadcaster/JointStateBroadcaster}
hand:
  ros__parameters: {joint: finger_left, allow_stalling: true}
broadcaster:
  ros__parameters: {use_local_topics: true}
"""


def prefix(package: str) -> Path | None:
    """Where a ROS package is installed."""
    from ament_index_python.packages import PackageNotFoundError, get_package_prefix

    try:
        return Path(get_package_prefix(package))
    except PackageNotFoundError:
        return None


@pytest.fixture(params=CONTROLLERS)
def hand(request: pytest.FixtureRequest, program: Callable[..., Any], tmp_path: Path, robot: Any) -> str:
    """A running controller; its value of ``gripper.output``."""
    output = str(request.param)
    manager = prefix("controller_manager")
    package = "gripper_controllers" if output == "gripper_command" else "parallel_gripper_controller"
    if manager is None or prefix(package) is None:
        pytest.skip(f"controller_manager or {package} is not installed")
    (tmp_path / "hand.yaml").write_text(PARAMETERS.replace("KIND", CONTROLLERS[output]))
    (tmp_path / "hand.urdf").write_text(URDF)
    path = "lib/robot_state_publisher/robot_state_publisher"
    publish = [str(prefix("robot_state_publisher") / path)]  # type: ignore[operator]
    program(
        *publish,
        str(tmp_path / "hand.urdf"),
        "--ros-args",
        "-r",
        "__node:=hand_description",
        "-r",
        "joint_states:=/hand/none",
    )
    node = program(
        str(manager / "lib/controller_manager/ros2_control_node"),
        "--ros-args",
        "--params-file",
        str(tmp_path / "hand.yaml"),
    )
    spawner = program(
        str(manager / "lib/controller_manager/spawner"), "hand", "broadcaster", "-p", str(tmp_path / "hand.yaml")
    )
    robot.wait(lambda: spawner.process.poll() is not None, node.output, 60)
    assert spawner.process.returncode == 0, spawner.output + node.output
    return output


@pytest.mark.parametrize("backend", ["rclpy", "dds"])
def test_a_controller_moves_the_fingers_to_where_the_policy_wants_them(
    hand: str, robot: Any, program: Callable[..., Any], backend: str
) -> None:
    if backend == "dds" and os.environ.get("RMW_IMPLEMENTATION") != "rmw_cyclonedds_cpp":
        pytest.skip("services of the embedded participant are those of rmw_cyclonedds_cpp")
    from rclpy.qos import DurabilityPolicy, QoSProfile
    from sensor_msgs.msg import JointState
    from std_msgs.msg import String

    positions: list[float] = []
    robot.node.create_subscription(
        JointState, "/broadcaster/joint_states", lambda message: positions.append(message.position[0]), 10
    )
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    words = robot.node.create_publisher(String, "/vla_policy/instruction", latched)
    robot.wait(lambda: positions, "the fingers' position")
    options = (*robot.quick, "topics.gripper:=/hand/gripper_cmd", f"gripper.output:={hand}", "control.armed:=true")
    options += (f"node.backend:={backend}",)
    node = program(sys.executable, str(SCRIPTED), *(word for option in options for word in ("-p", option)))
    robot.drive()
    robot.wait(lambda: abs(positions[-1] - 0.04) < 1e-3, "open fingers")
    words.publish(String(data="close it"))
    robot.wait(lambda: abs(positions[-1]) < 1e-3, "closed fingers")
    robot.wait(lambda: len(robot.commands) > 5, "commands")
    assert all("finger" not in name for _, command in robot.commands for name in command.name)
    assert "gripper_failed" not in node.output
