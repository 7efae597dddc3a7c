"""What keeps the arm safe, under rclpy itself: a stop is a hold at the measured position, and is said.

Regression pinned: rclpy's logger raises where one line of code logs with two severities; a stop after an arming
did, and the hold that follows it was never sent.
"""

import re
import time

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from rclpy.qos import DurabilityPolicy, QoSProfile
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

pytestmark = pytest.mark.ros


def states(node) -> list[str]:
    return re.findall(r" -> (\w+)", node.output)


def test_a_stop_and_every_refusal_are_reported(robot, policy) -> None:
    node = policy()
    robot.drive()
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    words = robot.node.create_publisher(String, "/vla_policy/instruction", latched)
    button = robot.node.create_publisher(Bool, "/vla_policy/stop", 1)
    robot.wait(
        lambda: words.get_subscription_count() and button.get_subscription_count(), "the node's subscriptions"
    )
    for text, answer in (("go on", ": go on"), ("x" * 1000, "1000 characters refused"), ("go back", ": go back")):
        words.publish(String(data=text))
        node.wait_for(answer)
    for _ in range(2):
        robot.wait(lambda: robot.enable()[0], "arming")
        robot.wait(lambda: states(node)[-1] == "armed", "every input")  # until then it holds, which is a command
        robot.wait(lambda: robot.commands, "commands")
        pressed = time.monotonic()
        button.publish(Bool(data=True))
        robot.wait(lambda: states(node)[-1] == "stopped", "the stop")
        robot.wait(lambda: robot.commands[-1][0] > pressed, "the hold")  # noqa: B023
        told, sent = len(robot.commands), len(robot.stamps)
        robot.wait(lambda: len(robot.stamps) > sent + 10, "ten more frames")  # noqa: B023
        assert len(robot.commands) <= told + 1, "a motion after the stop"
        assert robot.call(Trigger, "/vla_policy/reset", Trigger.Request()).success
        robot.commands.clear()
    assert node.output.count("-> stopped (operator_stop") == 2
    assert "a listener failed" not in node.output
