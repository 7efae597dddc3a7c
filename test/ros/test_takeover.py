"""A person takes the arm over with a gamepad, whose driver is an rclpy node."""

import json
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import Joy
from std_msgs.msg import String
from std_srvs.srv import SetBool

pytestmark = pytest.mark.ros

PAD = (
    "control.armed:=true",
    "robot.tip_frame:=tool",
    "takeover.input:=joy",
    "takeover.joy:=/joy",
    "takeover.axes:=['x = 0']",
    "takeover.buttons:=['deadman = 0']",
)


def test_a_gamepad_moves_the_arm_while_its_dead_man_button_is_pressed(robot, policy) -> None:
    told: list[dict[str, Any]] = [{}]
    pressed = [0]
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    robot.node.create_subscription(
        String, "/vla_policy/status", lambda message: told.append(json.loads(message.data)), latched
    )
    pad = robot.node.create_publisher(Joy, "/joy", QoSProfile(depth=10))

    def send() -> None:
        joy = Joy(axes=[-1.0 + 0.001 * (len(robot.stamps) % 2)], buttons=pressed)
        joy.header.stamp = robot.node.get_clock().now().to_msg()
        pad.publish(joy)

    def away() -> float:
        at = dict(zip(robot.commands[-1][1].name, robot.commands[-1][1].position, strict=True))
        return max(abs(at[name] - home) for name, home in zip(robot.names[:7], robot.home, strict=False))

    policy(*PAD)
    robot.drive()
    robot.node.create_timer(0.05, send)
    robot.wait(lambda: robot.commands, "commands")
    assert away() < 1e-3
    assert robot.call(SetBool, "/vla_policy/takeover", SetBool.Request(data=True)).success
    robot.wait(lambda: "person_released" in told[-1].get("holds", {}), "the hold until the button is pressed")
    assert away() < 1e-3
    pressed[:] = [1]
    robot.wait(lambda: told[-1].get("source") == "person", "the person")
    robot.wait(lambda: away() > 5e-3, "motion")
    pressed[:] = [0]
    robot.wait(lambda: "person_released" in told[-1].get("holds", {}), "the hold after its release")
    assert robot.call(SetBool, "/vla_policy/takeover", SetBool.Request(data=False)).success
    robot.wait(lambda: told[-1].get("source") == "policy", "the policy")
