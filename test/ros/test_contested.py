"""Two of something, under rclpy: other commanders, sources and namesakes.

Regressions pinned: rmw_cyclonedds' gid of a publisher is not the one that discovery knows, so that a node took
itself for another commander.
"""

import importlib.util
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

from rclpy.qos import DurabilityPolicy, QoSProfile
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import SetBool, Trigger

pytestmark = pytest.mark.ros

NOTICED = 5.0  # s, with discovery, which takes Fast DDS up to 2.5 s on a busy machine; half a second else
COMMAND = "/arm/joint_command"
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)

# A program beside the node, as `ros2 topic pub --rate 20` is: says when it is there.
OTHER = """
import sys, time, rclpy
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import SetBool
from vla_ros.vision.messages import encode_image
import numpy as np
what, names, home = sys.argv[1], sys.argv[2].split(","), [float(each) for each in sys.argv[3].split(",")]
rclpy.init()
node = rclpy.create_node("vla_policy" if what == "name" else "leftover")
publisher = None
if what in ("command", "joints"):
    topic = "/arm/joint_command" if what == "command" else "/joint_states"
    publisher = node.create_publisher(JointState, topic, QoSProfile(depth=10))
elif what == "camera":
    publisher = node.create_publisher(Image, "/camera/image_raw", QoSProfile(depth=10))
elif what == "service":
    node.create_service(SetBool, "/vla_policy/enable", lambda request, response: response)
print("there", flush=True)
while True:
    now = node.get_clock().now()
    if what == "joints":
        message = JointState(name=names, position=[each + 0.13 for each in home])
        message.header.stamp = now.to_msg()
        publisher.publish(message)
    elif what == "camera":
        publisher.publish(bytes(encode_image(np.full((48, 64, 3), 7, np.uint8), now.nanoseconds, "camera")))
    rclpy.spin_once(node, timeout_sec=0.05)
"""


class Words:
    """What the node says on ``~/status``, with when, and on ``/diagnostics``."""

    def __init__(self, robot: Any) -> None:
        from diagnostic_msgs.msg import DiagnosticArray

        self.heard: list[tuple[float, dict[str, Any]]] = []
        self.diagnostics = ""
        robot.node.create_subscription(String, "/vla_policy/status", self._on_status, LATCHED)
        robot.node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QoSProfile(depth=10))

    def _on_status(self, message: Any) -> None:
        self.heard.append((time.monotonic(), json.loads(message.data)))

    def _on_diagnostics(self, message: Any) -> None:
        for status in message.status:
            if status.name == "vla_policy: state":
                self.diagnostics = status.message

    def named(self, reason: str) -> float | None:
        """When the reason was first said."""
        said = (at for at, each in self.heard if reason in (*each["holds"], *each["blocks"], each["stopped_by"]))
        return next(said, None)

    def first_hold(self) -> str:
        """The reason for which the arm first held or stopped; "" for none."""
        held = ([*each["holds"], each["stopped_by"]] for _, each in self.heard if each["state"] != "armed")
        return next((reasons[0] for reasons in held if reasons[0]), "")

    @property
    def last(self) -> dict[str, Any]:
        return self.heard[-1][1] if self.heard else {}


def other(robot: Any, program: Callable[..., Any], what: str) -> Any:
    words = (what, ",".join(robot.names), ",".join(map(str, robot.home)))
    return program(sys.executable, "-c", OTHER, *words)


def moving(robot: Any, policy: Callable[..., Any], *options: str) -> tuple[Any, Words]:
    words = Words(robot)
    node = policy(*options)
    robot.drive()
    node.wait_for("is ready")
    robot.wait(lambda: robot.enable()[0], "arming")
    robot.wait(lambda: len(robot.commands) > 5, "commands")
    robot.wait(lambda: words.last.get("state") == "armed", "the state armed")
    return node, words


def logged(node: Any, text: str) -> float:
    """When the node logged a line with ``text``, in seconds."""
    line = next(line for line in node.output.splitlines() if text in line)
    return float(line.split("[")[2].split("]")[0])


CASES = {
    "command": ("command_contested", "/leftover publishes on /arm/joint_command, too"),
    "joints": ("joint_state_contested", "/leftover and /robot publish joint_"),
    "camera": ("camera_contested", "/leftover and /robot publish on /camera/image_raw in turn"),
    "name": ("name_contested", "another node is called /vla_policy, too"),
}


def publishers(robot: Any, what: str) -> list[str]:
    topic = {"command": COMMAND, "joints": "/joint_states", "camera": "/camera/image_raw"}[what]
    return [each.node_name for each in robot.node.get_publishers_info_by_topic(topic)]


@pytest.mark.parametrize("what", CASES)
def test_duplicates_are_detected_and_named(robot, policy, program, what: str) -> None:
    reason, text = CASES[what]
    node, words = moving(robot, policy)
    second = other(robot, program, what)
    second.wait_for("there")
    # Discovery takes its own time: Fast DDS now and then two seconds on a busy machine.
    name, count = ("vla_policy", 2) if what == "name" else ("leftover", 1)
    seen = robot.node.get_node_names if what == "name" else lambda: publishers(robot, what)
    robot.wait(lambda: seen().count(name) == count, what)
    began = time.monotonic()
    robot.wait(lambda: words.named(reason), reason)
    assert words.named(reason) - began < NOTICED
    robot.wait(lambda: f"{reason} ({text}" in words.diagnostics, "the diagnostics")
    # Fast DDS may tell of a publisher before its node. A second commander stops the arm at once and is named on the
    # next line; a second source is named on the first.
    if what == "command":
        node.wait_for(f"{reason}: {text}")
    elif (
        words.first_hold() == reason
    ):  # a busy machine may have made the arm hold before; then no line begins with it
        node.wait_for(f"({reason}: {text}")
    told = robot.commands[-1][0]
    robot.wait(lambda: time.monotonic() > told + 1.0, "a second")
    assert all(abs(p - h) < 0.02 for _, m in robot.commands for p, h in zip(m.position, robot.home, strict=False))
    if what == "command":
        assert words.last["state"] == "stopped"
        answer = robot.enable()
        assert not answer[0]
        assert robot.call(Trigger, "/vla_policy/reset", Trigger.Request()).success
        answer = robot.enable()
        assert not answer[0]
        assert "/leftover" in answer[1]
    second.end(signal.SIGTERM)  # a killed one counts until its lease ends
    if what == "command":
        robot.wait(lambda: robot.enable()[0], "arming without the other", 40)
    else:
        robot.wait(lambda: words.last["state"] == "armed", "motion without the other", 40)


def test_calls_that_reach_two_servers_disarm_but_never_arm(robot, policy, program) -> None:
    node, words = moving(robot, policy)
    other(robot, program, "service").wait_for("there")

    def call(armed: bool) -> None:
        robot.call(SetBool, "/vla_policy/enable", SetBool.Request(data=armed))

    def refused() -> bool:
        call(True)
        return "refused: /leftover serves ~/enable as well" in node.output

    robot.wait(refused, "the refusal")  # discovery tells the node when it does
    call(False)
    robot.wait(lambda: words.last["state"] == "disarmed", "the state disarmed")
    heard = len(words.heard)
    call(True)
    robot.wait(lambda: len(words.heard) > heard + 1, "the state a second later")
    assert all(each["state"] == "disarmed" for _, each in words.heard[heard:])


def test_a_second_node_of_the_name_refuses_to_configure(robot, policy) -> None:
    first, words = moving(robot, policy)
    second = policy()
    assert second.process.wait(30) == 1
    assert f"/vla_policy is already running on this host (process {first.process.pid})" in second.output
    robot.wait(lambda: words.last["state"] == "armed", "motion")


def test_the_second_of_two_armed_nodes_never_moves_and_stops_the_first(robot, policy, program) -> None:
    """A claim says so at once; discovery of Fast DDS takes up to 3 s."""
    first, words = moving(robot, policy)
    options = (word for option in (*robot.quick, "control.armed:=true") for word in ("-p", option))
    command = (sys.executable, "-m", "vla_ros.node.lifecycle_main", "--ros-args", "-r", "__node:=second", *options)
    second = program(*command)
    robot.wait(lambda: words.last["stopped_by"] == "command_contested", "the stop", 40)
    assert words.last["detail"] == f"/second (process {second.process.pid}) publishes on {COMMAND}, too"
    second.wait_for(
        f"not armed: disarmed; waiting for: command_contested (/vla_policy (process {first.process.pid})"
    )
    assert logged(first, "armed -> stopped (command_contested") - logged(second, "is ready") < 0.5
    assert "disarmed ->" not in second.output


def test_listeners_and_a_gripper_apart_are_no_contest(robot, policy, program, tmp_path) -> None:
    from sensor_msgs.msg import Image, JointState

    fingers: list[Any] = []
    robot.node.create_subscription(Float64MultiArray, "/gripper/command", fingers.append, 10)
    for topic, kind in ((COMMAND, JointState), ("/joint_states", JointState), ("/camera/image_raw", Image)):
        robot.node.create_subscription(kind, topic, lambda message: None, 10)
    node, words = moving(robot, policy, "topics.gripper:=/gripper/command")
    if importlib.util.find_spec("ros2bag"):
        record = program("ros2", "bag", "record", "-o", str(tmp_path / "bag"), "-e", f"^({COMMAND}|/joint_states)$")
        record.wait_for(f"Subscribed to topic '{COMMAND}'", 60)
    if shutil.which("ros2"):
        echo = program("ros2", "topic", "echo", COMMAND, "sensor_msgs/msg/JointState")
        echo.wait_for("joint_1", 60)
    sent, moved = len(robot.commands), len(fingers)
    robot.wait(lambda: min(len(robot.commands) - sent, len(fingers) - moved) > 40, "commands", 60)
    assert "contested" not in node.output
    assert not any("contested" in reason for _, said in words.heard for reason in said["counters"])


@pytest.mark.skipif(not shutil.which("ros2"), reason="ros2 is not installed")
def test_ros2_topic_pub_on_the_command_topic_stops_the_arm(robot, policy, program) -> None:
    node, words = moving(robot, policy)
    program("ros2", "topic", "pub", "--rate", "20", COMMAND, "sensor_msgs/msg/JointState", "{}")
    robot.wait(lambda: words.last["stopped_by"] == "command_contested", "the stop", 40)
    name = re.compile(rf"command_contested: /_ros2cli_\d+ publishes on {COMMAND}, too")
    robot.wait(lambda: name.search(node.output) is not None, "the other's name, which discovery has later", 10)
