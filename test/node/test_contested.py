import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_ros.control.safety import State
from vla_ros.execution.claim import Claim
from vla_ros.graph import open_graph
from vla_ros.middleware import daemons
from vla_ros.middleware.daemons import RoudiWatch
from vla_ros.node import policy_node
from vla_ros.vision.messages import encode_image

COMMAND = "/arm/joint_command"
NOTICED = 1.0  # s; half of that where the machine has nothing else to do
GO = ("-p", "control.armed:=true", "-p", "policy.instruction:=go on")


@pytest.fixture
def other(robot: Any) -> Iterator[Any]:
    """Another program on the same graph, with a participant of its own."""
    with open_graph("dds") as graph:
        yield graph


def logged(node: Any, text: str) -> float:
    """When the node logged a line with ``text``, in seconds."""
    line = next(line for line in node.log.read_text().splitlines() if text in line)
    return float(line.split("[")[2].split("]")[0])


def joint_publisher(graph: Any, topic: str, name: str = "teleop") -> Any:
    node = graph.create_node(name)
    return node.create_publisher(graph.message("sensor_msgs/msg/JointState"), topic, graph.qos("state_publisher"))


@pytest.mark.causes("command_contested")
def test_another_commander_stops_an_armed_node_and_is_named(robot, start, other) -> None:
    node = start(*GO)
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    began = time.monotonic()
    publisher = joint_publisher(other, COMMAND)
    robot.until(lambda: robot.status.get("stopped_by") == "command_contested", robot.send_frame)
    stopped = next(at for at, said in robot.statuses if said["stopped_by"] == "command_contested")
    assert stopped - began < NOTICED
    assert robot.status["detail"] == f"/teleop publishes on {COMMAND}, too"
    robot.until(lambda: robot.says("/teleop"), robot.send_frame)
    assert "armed -> stopped (command_contested: /teleop publishes" in node.log.read_text()
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_frame)
    node.signal(signal.SIGHUP)
    robot.until(lambda: robot.status["state"] == "disarmed", robot.send_frame)
    node.signal(signal.SIGUSR1)
    robot.until(lambda: "waiting for: command_contested (/teleop" in node.log.read_text(), robot.send_frame)
    assert robot.says("cannot be armed: command_contested (/teleop")
    held = len(robot.commands)
    publisher.destroy()
    robot.until(lambda: not robot.status["blocks"], robot.send_frame)
    assert len(robot.commands) == held, "a command while contested"
    node.signal(signal.SIGUSR1)
    robot.until(lambda: len(robot.commands) > held, robot.send_frame)


def another(robot: Any, start: Callable[..., Any], tmp_path: Path, *words: str) -> Any:
    """A second policy node for the same arm, in a process of its own."""
    (tmp_path / "second").mkdir()
    return start(*GO, *words, "--ros-args", "-r", "__node:=second", folder=tmp_path / "second")


def test_a_second_policy_node_is_refused_and_stops_the_first(robot, start, tmp_path) -> None:
    first = start(*GO)
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    second = another(robot, start, tmp_path)
    robot.until(lambda: robot.status.get("stopped_by") == "command_contested", robot.send_frame)
    assert robot.status["detail"] == f"/second (process {second.process.pid}) publishes on {COMMAND}, too"
    said = f"not armed: disarmed; waiting for: command_contested (/vla_policy (process {first.process.pid})"
    robot.until(lambda: said in second.log.read_text(), robot.send_frame)
    assert logged(first, "-> stopped (command_contested") - logged(second, "is ready") < NOTICED / 2
    robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_frame)
    held, seen = len(robot.commands), len(robot.actions)
    robot.until(lambda: len(robot.actions) > seen + 20, robot.send_frame)
    assert len(robot.commands) == held
    assert "disarmed -> " not in second.log.read_text()


def test_two_nodes_of_one_process_contest_each_other(robot, inside) -> None:
    """Composed into one container, say."""
    first = inside()
    robot.until(lambda: first.safety.state is State.ARMED, robot.send_frame)
    second = inside(ros_args=("--ros-args", "-r", "__node:=second"))
    robot.until(lambda: first.safety.state is State.STOPPED, robot.send_frame)
    pid = os.getpid()
    assert first.safety.status.detail == f"/second (process {pid}) publishes on {COMMAND}, too"
    assert second.safety.state is State.DISARMED
    assert f"command_contested (/vla_policy (process {pid})" in second.enable(True)[1]


def test_two_armed_nodes_that_start_simultaneously_soon_stop(robot, start, tmp_path) -> None:
    nodes = [start(*GO), another(robot, start, tmp_path)]
    robot.until(lambda: all("command_contested" in node.log.read_text() for node in nodes), robot.send_frame)
    robot.until(lambda: robot.status.get("state") in ("stopped", "disarmed"), robot.send_frame)
    held, seen = len(robot.commands), len(robot.actions)
    robot.until(lambda: len(robot.actions) > seen + 20, robot.send_frame)
    assert len(robot.commands) == held


def test_a_killed_policy_node_frees_its_claim_and_one_that_may_share_is_no_contest(robot, start, tmp_path) -> None:
    first = start(*GO, "-p", "topics.command_shared_with:=[/second]")
    second = another(robot, start, tmp_path, "-p", "topics.command_shared_with:=[/vla_policy]")
    robot.until(lambda: "-> armed" in second.log.read_text(), robot.send_frame)
    assert "contested" not in first.log.read_text() + second.log.read_text()
    first.signal(signal.SIGKILL)
    first.process.wait(10)
    with contextlib.closing(Claim(f"command {COMMAND}", "/third")) as third:
        robot.until(lambda: [each.pid for each in third.update()] == [second.process.pid])


def test_a_publisher_that_may_share_the_topic_does_not_stop_the_node(robot, inside, other) -> None:
    joint_publisher(other, COMMAND)
    inside("topics.command_shared_with:=[/teleop]")
    robot.until(lambda: len(robot.commands) > 20, robot.send_frame)


def test_subscribers_are_no_contest(robot, inside, other, caplog) -> None:
    """A recorder, RViz or `ros2 topic echo`; arm and gripper are published apart by the node itself."""
    node = other.create_node("recorder")
    for topic in (COMMAND, "/gripper/command"):
        node.create_subscription(
            other.message("sensor_msgs/msg/JointState"), topic, lambda message: None, other.qos("command")
        )
    fingers = "robot.gripper_joint_names:=[finger_left, finger_right]"
    inside("topics.gripper:=/gripper/command", "gripper.output:=joint_state", fingers)
    robot.until(lambda: len(robot.commands) > 30, robot.send_frame)
    assert "contested" not in caplog.text


@pytest.mark.causes("name_contested")
def test_a_namesake_holds_the_arm_and_calls_to_arm_are_refused(robot, inside, other, caplog) -> None:
    """Some program of that name, which does not care who else has it."""
    inside()
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    began = time.monotonic()
    namesake = other.create_node("vla_policy")
    robot.until(lambda: "name_contested" in robot.status["holds"], robot.send_frame)
    held = next(at for at, said in robot.statuses if "name_contested" in said["holds"])
    assert held - began < NOTICED
    assert robot.status["holds"]["name_contested"] == "another node is called /vla_policy, too"
    robot.until(lambda: robot.says("name_contested"), robot.send_frame)
    before = len(robot.commands)
    namesake.destroy_node()
    robot.until(lambda: len(robot.commands) > before + 2, robot.send_frame)
    assert "armed -> holding (name_contested" in caplog.text


def test_a_second_node_of_the_same_name_refuses_at_once(robot, start, tmp_path) -> None:
    first = start("-p", "policy.instruction:=go on")
    robot.until(lambda: robot.actions, robot.send_frame)
    (tmp_path / "second").mkdir()
    second = type(first)(tmp_path / "second", "-p", "policy.instruction:=go on")
    assert second.process.wait(20) != 0
    said = second.log.read_text()
    assert f"/vla_policy is already running on this host (process {first.process.pid})" in said
    robot.actions.clear()
    robot.until(lambda: robot.actions, robot.send_frame)


def test_one_of_two_nodes_that_start_simultaneously_refuses(robot, start, tmp_path) -> None:
    nodes = [start("-p", "policy.instruction:=go on")]
    (tmp_path / "second").mkdir()
    nodes.append(type(nodes[0])(tmp_path / "second", "-p", "policy.instruction:=go on"))
    try:
        robot.until(lambda: any(node.process.poll() is not None for node in nodes), robot.send_frame)
        robot.until(lambda: robot.actions, robot.send_frame)
        assert sorted(node.process.poll() is None for node in nodes) == [False, True]
    finally:
        nodes[1].end()


def test_a_killed_node_can_be_replaced_at_once(robot, start) -> None:
    """Others know the dead one until its lease ends; a newcomer never hears of it."""
    first = start(*GO)
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    first.signal(signal.SIGKILL)
    first.process.wait(10)
    assert len(robot.node.get_publishers_info_by_topic(COMMAND)) == 1
    robot.commands.clear()
    second = start(*GO)
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    assert "contested" not in second.log.read_text()
    assert "another node" not in second.log.read_text()


class Leftover:
    """A second publisher of something, which sends at its own rate until it is told to end."""

    def __init__(self, graph: Any, send: Callable[[], None], rate: float = 20.0) -> None:
        self._ended, self._send, self._period = threading.Event(), send, 1 / rate
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            self._send()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def contested(robot: Any, inside: Callable[..., Any], leftover: Callable[[], Leftover], reason: str) -> str:
    """Start ``leftover`` beside an armed node, see it hold and go on afterwards; what it said."""
    inside("timeouts.joint_state:=1.0", "timeouts.camera:=1.0")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    began = time.monotonic()
    second = leftover()
    try:
        robot.until(lambda: reason in robot.status["holds"], robot.send_frame)
        held = next(at for at, said in robot.statuses if reason in said["holds"])
        assert held - began < NOTICED
        robot.until(lambda: robot.says(reason), robot.send_frame)
        robot.until(lambda: np.allclose(robot.command_positions(), robot.positions, atol=1e-9), robot.send_frame)
        positions = [np.asarray(each.position)[:7] for each in robot.commands]
        # The arm does not follow, so that commands lead it; a hold goes back to where it is.
        steps = [
            np.abs(after - before).max()
            for before, after in itertools.pairwise(positions)
            if not np.allclose(after, robot.positions, atol=1e-9)
        ]
        assert max(steps) < 0.1, "a command on the other's word"
    finally:
        second.end()
    before = len(robot.commands)
    robot.until(lambda: len(robot.commands) > before + 3, robot.send_frame)
    return str(next(said["holds"][reason] for _, said in robot.statuses if reason in said["holds"]))


@pytest.mark.causes("joint_state_contested")
def test_a_second_source_of_joint_states_holds_and_both_are_named(robot, inside, other) -> None:
    """A joint_state_publisher that was left running: all joints, somewhere else."""
    publisher = joint_publisher(other, "/joint_states", "joint_state_publisher")

    def send() -> None:
        publisher.publish(robot.joint_state(robot.names, [position + 0.13 for position in robot.positions]))

    said = contested(robot, inside, lambda: Leftover(other, send), "joint_state_contested")
    assert said == f"/driver and /joint_state_publisher publish {said.split()[4]} on /joint_states in turn"


@pytest.mark.causes("camera_contested")
def test_a_second_camera_holds_and_both_are_named(robot, inside, other) -> None:
    node = other.create_node("webcam")
    publisher = node.create_publisher(
        other.message("sensor_msgs/msg/Image"), "/camera/image_raw", other.qos("camera")
    )
    image = np.full((48, 64, 3), 7, np.uint8)

    def send() -> None:
        publisher.publish(encode_image(image, time.time_ns(), "camera"))

    said = contested(robot, inside, lambda: Leftover(other, send), "camera_contested")
    assert said == "/driver and /webcam publish on /camera/image_raw in turn"


def test_a_relay_of_two_cameras_is_named_by_what_alternates(robot, inside, caplog) -> None:
    inside("camera.width:=640", "camera.height:=480")
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    turn = itertools.count()

    def send() -> None:
        index = next(turn)
        shape = ((48, 64, 3), (24, 32, 3))[index % 2]
        robot.send_frame(encode_image(np.full(shape, index % 255, np.uint8), robot.now(), "camera"))

    robot.until(lambda: "camera_contested" in robot.status["holds"], send)
    both = next(
        said["holds"]["camera_contested"] for _, said in robot.statuses if "camera_contested" in said["holds"]
    )
    assert both.startswith("/driver publishes ")
    assert both.endswith("in turn on /camera/image_raw")
    assert {"64x48 'rgb8' (frame_id 'camera')", "32x24 'rgb8' (frame_id 'camera')"} <= set(
        both.removeprefix("/driver publishes ").removesuffix(" in turn on /camera/image_raw").split(" and ")
    )
    log = caplog.text
    assert log.count("camera.width and camera.height expect 640x480") == 1
    assert log.count("its frames were 64x48") == 1


def test_a_camera_that_changes_its_size_and_a_driver_that_is_started_again_are_no_contest(
    robot, inside, other, caplog
) -> None:
    inside()
    robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
    before = len(robot.commands)

    def smaller() -> None:
        robot.send_frame(robot.noise(robot.now(), 24, 32))

    robot.until(lambda: len(robot.commands) > before + 10, smaller)
    successor = other.create_node("driver")
    images = successor.create_publisher(
        other.message("sensor_msgs/msg/Image"), "/camera/image_raw", other.qos("camera")
    )
    robot.until(images.get_subscription_count)
    before = len(robot.commands)

    def on() -> None:
        robot.send_joints()
        images.publish(robot.noise(robot.now(), 24, 32))

    robot.until(lambda: len(robot.commands) > before + 10, on)
    assert "contested" not in caplog.text


@pytest.mark.causes("middleware_gone")
def test_a_node_that_no_new_process_can_reach_stops(robot, inside, tmp_path, monkeypatch) -> None:
    """RouDi's part of it; test/ros kills a real one."""
    monkeypatch.setattr(daemons, "ROUDI_SOCKET", tmp_path / "roudi")
    monkeypatch.setattr(policy_node, "middleware_watch", lambda backend: RoudiWatch().check)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as roudi:
        roudi.bind(str(tmp_path / "roudi"))
        node = inside()
        robot.until(lambda: len(robot.commands) > 5, robot.send_frame)
        assert not node.lost
    robot.until(lambda: node.lost, robot.send_frame)
    robot.until(lambda: node.safety.state is State.STOPPED, robot.send_frame)
    node.reset()
    assert not node.enable(True)[0]
    assert "RouDi has ended or was restarted" in node.safety.explain()
