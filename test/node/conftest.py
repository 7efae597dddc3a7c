"""A robot as the node sees one: a driver in this process, the node in another, DDS between them."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.forks import Fork
from vla_ros.config import load
from vla_ros.execution.source import PolicySource
from vla_ros.graph import open_graph
from vla_ros.node.policy_node import PolicyNode
from vla_ros.policies import Policy
from vla_ros.vision.messages import encode_image

sys.path.append(str(Path(__file__).parent))  # test modules are imported by path: live_loop would not be found

from scripted_node import ScriptedPolicy, main

PATIENCE = 20.0
JOINTS = tuple(f"joint_{number}" for number in range(1, 8))
HOME = (0.0, 0.3, 0.0, 1.6, 0.0, 1.2, 0.0)
DOMAINS = itertools.count(101 + os.getpid() % 100)


class Robot:
    """Publishes frames and joint states, hears commands, actions and diagnostics."""

    def __init__(self) -> None:
        self.graph = open_graph("dds")
        self.node = self.graph.create_node("driver")
        make, qos = self.graph.message, self.graph.qos
        self.commands: list[Any] = []
        self.actions: list[Any] = []
        self.diagnostics: dict[str, Any] = {}
        self.statuses: list[tuple[float, dict[str, Any]]] = []
        """When (steady clock) and what the node has said on ``~/status``."""
        self._heard = threading.Condition()
        self._frames = self.node.create_publisher(make("sensor_msgs/msg/Image"), "/camera/image_raw", qos("camera"))
        self.joint_publisher = self.node.create_publisher(
            make("sensor_msgs/msg/JointState"), "/joint_states", qos("state_publisher")
        )
        text = make("std_msgs/msg/String")
        self._instruction = self.node.create_publisher(text, "/vla_policy/instruction", qos("instruction"))
        self.stop_publisher = self.node.create_publisher(
            make("std_msgs/msg/Bool"), "/vla_policy/stop", qos("command")
        )
        array = make("std_msgs/msg/Float64MultiArray")
        self.driver = self.node.create_subscription(
            make("sensor_msgs/msg/JointState"), "/arm/joint_command", self.hears(self.commands), qos("command")
        )
        self.node.create_subscription(array, "/vla_policy/action", self.hears(self.actions), qos("command"))
        self.node.create_subscription(
            make("diagnostic_msgs/msg/DiagnosticArray"), "/diagnostics", self._on_diagnostics, qos("diagnostics")
        )
        self.node.create_subscription(text, "/vla_policy/status", self._on_status, qos("instruction"))
        self.names: Sequence[str] = JOINTS
        self.positions = list(HOME)
        self.sent: set[int] = set()
        self._ended = False
        self._thread = threading.Thread(target=lambda: self.graph.spin(lambda: self._ended, 0.02))
        self._thread.start()

    def hears(self, heard: list[Any]) -> Callable[[Any], None]:
        def callback(message: Any) -> None:
            with self._heard:
                heard.append(message)
                self._heard.notify_all()

        return callback

    def _on_diagnostics(self, message: Any) -> None:
        with self._heard:
            for status in message.status:
                part = status.name.rpartition(": ")[2]
                self.diagnostics[part] = {pair.key: pair.value for pair in status.values} | {
                    "message": status.message,
                    "level": status.level[0],
                }
            self._heard.notify_all()

    def _on_status(self, message: Any) -> None:
        with self._heard:
            self.statuses.append((time.monotonic(), json.loads(message.data)))
            self._heard.notify_all()

    @property
    def status(self) -> dict[str, Any]:
        """The newest ``~/status``."""
        return self.statuses[-1][1] if self.statuses else {}

    @property
    def reported(self) -> set[str]:
        """Every reason that the node has named on ``~/status``."""
        return {reason for _, said in list(self.statuses) for reason in said["counters"]}

    def says(self, text: str, part: str = "state") -> bool:
        """Whether ``text`` is in the message of a part of ``/diagnostics``."""
        return text in self.diagnostics.get(part, {}).get("message", "")

    def now(self) -> int:
        return int(self.node.get_clock().now().nanoseconds)

    def joint_state(self, names: Sequence[str], positions: Sequence[float], stamp: int | None = None) -> Any:
        make = self.graph.message
        seconds, nanoseconds = divmod(self.now() if stamp is None else stamp, 1_000_000_000)
        time = make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
        header = make("std_msgs/msg/Header")(stamp=time, frame_id="")
        fields = {"name": list(names), "position": list(positions), "velocity": [], "effort": []}
        return make("sensor_msgs/msg/JointState")(header=header, **fields)

    def noise(self, stamp: int, height: int = 48, width: int = 64) -> bytes:
        """A noisy grey frame, another one for each time of sending."""
        shape = height, width, 3
        image = np.random.default_rng(self.now() % 2**32).integers(90, 160, shape, dtype=np.uint8)
        return encode_image(image, stamp, "camera")

    def send_joints(self, positions: list[float] | None = None, names: Sequence[str] = ()) -> None:
        measured = self.positions if positions is None else positions
        self.joint_publisher.publish(self.joint_state(names or self.names, measured))

    def send_frame(self, cdr: bytes | None = None, *, joints: bool = True) -> int:
        """Send joint state and a frame (a noisy grey one); returns the frame's stamp."""
        if joints:
            self.send_joints()
        stamp = self.now()
        self.sent.add(stamp)
        self._frames.publish(self.noise(stamp) if cdr is None else cdr)
        return stamp

    def instruct(self, text: str) -> None:
        self._instruction.publish(self.graph.message("std_msgs/msg/String")(data=text))

    def stop(self) -> None:
        self.stop_publisher.publish(self.graph.message("std_msgs/msg/Bool")(data=True))

    def until(
        self, ready: Callable[[], Any], each: Callable[[], Any] | None = None, patience: float = PATIENCE
    ) -> Any:
        """Wait until ``ready()`` is true, doing ``each`` thirty times a second."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if each is not None:
                each()
            with self._heard:
                if self._heard.wait_for(ready, timeout=1 / 30):
                    return True
        raise AssertionError(f"not within {patience} s; diagnostics: {self.diagnostics}")

    def command_positions(self, index: int = -1) -> np.ndarray:
        return np.asarray(self.commands[index].position)[:7]

    def command_stamp(self, index: int = -1) -> int:
        stamp = self.commands[index].header.stamp
        return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)

    def close(self) -> None:
        self._ended = True
        self._thread.join(10)
        self.graph.close()


class Node:
    """A node in a process of its own: that of ``main``, or of the command ``script``."""

    def __init__(
        self,
        tmp_path: Path,
        *words: str,
        main: Callable[[Sequence[str]], int] = main,
        script: tuple[str, ...] | None = None,
        bare: bool = False,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.stats = tmp_path / "stats.json"
        self.log = tmp_path / "log.txt"
        # With rclpy it would be on another middleware, which does not know the robot's domain tag.
        embedded = ["-p", "node.backend:=dds"]
        fixed = [] if bare else ["-p", "robot.urdf:=demo", "-p", "control.rate_hz:=0", "--stats", str(self.stats)]
        words = (*embedded, *fixed, *words)
        if script is None and stdin == subprocess.DEVNULL:
            self.process: subprocess.Popen[bytes] | Fork = Fork(main, words, self.log)
            return
        command = script or (sys.executable, str(Path(__file__).with_name("scripted_node.py")))
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *words], stdin=stdin, stdout=log, stderr=subprocess.STDOUT)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Ctrl-C; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()


@pytest.hookimpl(trylast=True)  # after the test, if it did not fail
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a test with ``@pytest.mark.causes("reason")`` during which the node has not named that reason."""
    claimed = {reason for marker in item.iter_markers("causes") for reason in marker.args}
    if claimed:
        robot: Robot = item.funcargs["robot"]  # type: ignore[attr-defined]
        last = len(robot.statuses) + 1  # what only counts is on the next status, a second later
        robot.until(lambda: claimed <= robot.reported or len(robot.statuses) > last)
        assert claimed <= robot.reported, f"the node never named {sorted(claimed - robot.reported)}"


@pytest.fixture
def robot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Robot]:
    number = next(DOMAINS)
    monkeypatch.setenv("ROS_DOMAIN_ID", str(101 + (number - 101) % 120))
    # Another run of these tests on the same host may have the same domain: a tag keeps the two apart.
    tag = f"<Tag>vla_ros_test_{os.getpid()}_{number}</Tag>"
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>")
    robot = Robot()
    yield robot
    robot.close()


@pytest.fixture
def start(tmp_path: Path, robot: Robot) -> Iterator[Callable[..., Node]]:
    """Start the node with further arguments, on the robot's domain."""
    nodes: list[Node] = []

    def begin(*words: str, folder: Path = tmp_path, **options: Any) -> Node:
        nodes.append(Node(folder, *words, **options))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.end()


@pytest.fixture
def inside(robot: Robot) -> Iterator[Callable[..., PolicyNode]]:
    """Start the node in this process, on a participant and a thread of its own; armed and with an instruction."""
    with ExitStack() as stack:

        def begin(*assignments: str, policy: Policy | None = None, ros_args: tuple[str, ...] = ()) -> PolicyNode:
            usual = ("robot.urdf:=demo", "control.rate_hz:=0", "control.armed:=true", "policy.instruction:=go on")
            graph = stack.enter_context(open_graph("dds", ros_args))
            node = PolicyNode(graph, graph.create_node("vla_policy"), load([], [*usual, *assignments]))
            ended = threading.Event()
            spinning = threading.Thread(target=graph.spin, args=(ended.is_set, 0.02), name="graph")
            stack.callback(node.cleanup)
            stack.callback(spinning.join, 10)
            stack.callback(ended.set)
            node.configure(source=PolicySource(policy or ScriptedPolicy()))
            node.activate()
            spinning.start()
            return node

        yield begin
