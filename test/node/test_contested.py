"""Two of something: another commander, another node of the same name, another source."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from vla_ros.graph import open_graph

COMMAND = "/arm/joint_command"
GO = ("-p", "control.armed:=true", "-p", "policy.instruction:=go on")


@pytest.fixture
def other(robot: Any) -> Iterator[Any]:
    """Another program on the same graph, with a participant of its own."""
    with open_graph("dds") as graph:
        yield graph


def joint_publisher(graph: Any, topic: str, name: str = "teleop") -> Any:
    node = graph.create_node(name)
    return node.create_publisher(graph.message("sensor_msgs/msg/JointState"), topic, graph.qos("state_publisher"))


class Words:
    """What the node says on ``~/status``."""

    def __init__(self, robot: Any) -> None:
        self.heard: list[tuple[float, dict[str, Any]]] = []
        graph = robot.graph
        robot.node.create_subscription(
            graph.message("std_msgs/msg/String"), "/vla_policy/status", self._on, graph.qos("instruction")
        )

    def _on(self, message: Any) -> None:
        self.heard.append((time.monotonic(), json.loads(message.data)))

    @property
    def last(self) -> dict[str, Any]:
        return self.heard[-1][1] if self.heard else {}


@pytest.mark.causes("command_contested")
def test_another_commander_stops_an_armed_node_and_is_named(
    robot: Any, start: Callable[..., Any], other: Any
) -> None:
    words = Words(robot)
    node = start(*GO)
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    began = time.monotonic()
    publisher = joint_publisher(other, COMMAND)
    robot.until(lambda: words.last.get("stopped_by") == "command_contested", robot.send_frame)
    stopped = next(at for at, said in words.heard if said["stopped_by"] == "command_contested")
    assert stopped - began < 0.5
    assert words.last["detail"] == f"/teleop publishes on {COMMAND}, too"
    robot.until(lambda: "/teleop" in robot.diagnostics["state"]["message"], robot.send_frame)
    assert "armed -> stopped (command_contested: /teleop publishes" in node.log.read_text()
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_frame)
    node.signal(signal.SIGHUP)
    robot.until(lambda: words.last["state"] == "disarmed", robot.send_frame)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: "waiting for: command_contested (/teleop" in node.log.read_text(), robot.send_frame)
    assert "cannot be armed: command_contested (/teleop" in robot.diagnostics["state"]["message"]
    held = len(robot.commands)
    publisher.destroy()
    robot.until(lambda: not words.last["blocks"], robot.send_frame)
    assert len(robot.commands) == held, "a command while contested"
    node.signal(signal.SIGUSR1)
    robot.until(lambda: len(robot.commands) > held, robot.send_frame)


def test_whoever_may_share_the_topic_stops_nobody(robot: Any, start: Callable[..., Any], other: Any) -> None:
    joint_publisher(other, COMMAND)
    start(*GO, "-p", "topics.command_shared_with:=[/teleop]")
    robot.until(lambda: len(robot.commands) > 20, robot.send_frame)


def test_who_only_listens_is_no_contest(robot: Any, start: Callable[..., Any], other: Any) -> None:
    """A recorder, RViz or `ros2 topic echo`; arm and gripper are published apart by the node itself."""
    node = other.create_node("recorder")
    for topic in (COMMAND, "/gripper/command"):
        node.create_subscription(
            other.message("sensor_msgs/msg/JointState"), topic, lambda message: None, other.qos("command")
        )
    fingers = "robot.gripper_joint_names:=[finger_left, finger_right]"
    apart = ("topics.gripper:=/gripper/command", "gripper.output:=joint_state", fingers)
    started = start(*GO, *(word for each in apart for word in ("-p", each)))
    robot.until(lambda: len(robot.commands) > 30, robot.send_frame)
    assert "contested" not in started.log.read_text()
