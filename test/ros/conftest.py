"""The other end of the graph, and the node under test as a process of its own, on a real ROS 2.

Tests here skip where no ROS 2 is sourced. They use the RMW of the environment; run them once for each:

    RMW_IMPLEMENTATION=rmw_cyclonedds_cpp python -m pytest test/ros
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

JOINTS = [*(f"joint_{number}" for number in range(1, 8)), "finger_left", "finger_right"]
HOME = [0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0, 0.04, 0.04]

QUICK = (
    "policy.name:=hold",
    "policy.instruction:='hold still'",
    "camera.width:=64",
    "camera.height:=48",
    "robot.urdf:=demo",
    "robot.gripper_joint_names:=[finger_left, finger_right]",
    "control.rate_hz:=0.0",
)
"""Options of a node that is up in a second: a policy that moves nothing, on the simulation's arm."""


# Domains whose ports lie above Linux's ephemeral ones; `vla-ros demo` and its tests take theirs from 1 to 100.
DOMAINS = range(215, 232)


def quiet_domain(claims: contextlib.ExitStack) -> int:
    """A domain without participants on this host, which no other run of these tests takes before ``claims`` end."""
    for domain in DOMAINS:
        claim = claims.enter_context(socket.socket(socket.AF_UNIX))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            claim.bind(f"\0vla_ros_test_domain_{domain}")
            probe.bind(("", 7400 + 250 * domain + 10))  # the first participant's (DDSI-RTPS 2.5, 9.6.2.4)
            return domain
    pytest.fail(f"all domains of {DOMAINS} are in use")


@pytest.fixture(scope="module", autouse=True)
def own_domain() -> Iterator[None]:
    """A domain of this file's own, on this host only."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as claims:
        patch.setenv("ROS_DOMAIN_ID", str(quiet_domain(claims)))
        patch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
        if os.environ.get("ROS_DISTRO") == "humble":  # which does not know the range
            patch.setenv("ROS_LOCALHOST_ONLY", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


class Robot:
    """Camera, joints and driver of a robot, and a person at the command line, as one rclpy node."""

    names, home, quick = JOINTS, HOME, QUICK

    def __init__(self, node: str = "/vla_policy") -> None:
        import rclpy
        from rclpy.context import Context
        from rclpy.executors import SingleThreadedExecutor

        self.target = node
        self.context = Context()
        rclpy.init(context=self.context)
        self.node = rclpy.create_node("robot", context=self.context)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self._changed = threading.Condition()
        self._clients: dict[str, Any] = {}
        self.commands: list[tuple[float, Any]] = []
        self.actions: list[Any] = []
        self.log: list[str] = []
        self.stamps: list[int] = []
        self._subscribe()
        self._running = True
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _subscribe(self) -> None:
        from rcl_interfaces.msg import Log
        from rclpy.qos import QoSProfile
        from sensor_msgs.msg import Image, JointState
        from std_msgs.msg import Float64MultiArray

        qos = QoSProfile(depth=10)
        self._image = self.node.create_publisher(Image, "/camera/image_raw", qos)
        self._joints = self.node.create_publisher(JointState, "/joint_states", qos)
        self.node.create_subscription(JointState, "/arm/joint_command", self._on_command, qos)
        self.node.create_subscription(Float64MultiArray, f"{self.target}/action", self._on_action, qos)
        self.node.create_subscription(Log, "/rosout", self._on_log, QoSProfile(depth=100))

    def _spin(self) -> None:
        while self._running:
            self._executor.spin_once(timeout_sec=0.05)

    def _note(self, notes: list[Any], item: Any) -> None:
        with self._changed:
            notes.append(item)
            self._changed.notify_all()

    def _on_command(self, message: Any) -> None:
        self._note(self.commands, (time.monotonic(), message))

    def _on_action(self, message: Any) -> None:
        self._note(self.actions, message)

    def _on_log(self, message: Any) -> None:
        self._note(self.log, message.msg)

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 20.0) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            answer = condition()
            if answer:
                return answer
            left = deadline - time.monotonic()
            assert left > 0, f"waited {timeout:g} s for {what}; the log has {self.log[-8:]}"
            with self._changed:
                self._changed.wait(min(left, 0.05))

    def drive(self, rate: float = 20.0) -> None:
        self.node.create_timer(1 / rate, self.send)

    def send(self) -> None:
        """One joint state and one frame, each stamped when it is sent."""
        from sensor_msgs.msg import JointState

        from vla_ros.vision.messages import encode_image

        clock = self.node.get_clock()
        joints = JointState(name=JOINTS, position=HOME)
        joints.header.stamp = clock.now().to_msg()
        self._joints.publish(joints)
        image = np.full((48, 64, 3), len(self.stamps) % 255, np.uint8)
        self.stamps.append(clock.now().nanoseconds)
        self._image.publish(bytes(encode_image(image, self.stamps[-1], "camera")))

    def is_motion(self, command: Any) -> bool:
        """Whether it bears the stamp of a frame, and not that of a joint state, as a hold does."""
        return command.header.stamp.sec * 10**9 + command.header.stamp.nanosec in self.stamps

    def call(self, kind: Any, name: str, request: Any, timeout: float = 20.0) -> Any:
        return self._answered(kind, name, request, timeout, timeout)[0]

    def ask(self, kind: Any, name: str, request: Any, timeout: float = 20.0) -> Any:
        """Call a service that only reads, again each two seconds without an answer.

        A node that has just started may answer before it knows this participant, although this one already knows
        the node's services; the answer is then lost (rmw_fastrtps #842). A user's client repeats such a call, too.
        """
        return self._answered(kind, name, request, timeout, 2.0)[0]

    def _answered(self, kind: Any, name: str, request: Any, timeout: float, patience: float) -> list[Any]:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = self.node.create_client(kind, name)
        assert client.wait_for_service(timeout), f"nobody serves {name}"
        futures, asked = [client.call_async(request)], time.monotonic()

        def answers() -> list[Any]:
            nonlocal asked
            if time.monotonic() > asked + patience:
                futures.append(client.call_async(request))
                asked = time.monotonic()
            return [future.result() for future in futures if future.done()]

        return self.wait(answers, f"the answer of {name}", timeout)

    def state(self) -> str:
        from lifecycle_msgs.srv import GetState

        return self.ask(GetState, f"{self.target}/get_state", GetState.Request()).current_state.label

    def change(self, transition: int) -> bool:
        """Ask for a transition (``lifecycle_msgs.msg.Transition``), once the node answers this participant."""
        from lifecycle_msgs.srv import ChangeState

        self.state()
        request = ChangeState.Request()
        request.transition.id = transition
        return self.call(ChangeState, f"{self.target}/change_state", request).success

    def enable(self, armed: bool = True) -> tuple[bool, str]:
        from std_srvs.srv import SetBool

        answer = self.call(SetBool, f"{self.target}/enable", SetBool.Request(data=armed))
        return answer.success, answer.message

    def close(self) -> None:
        self._running = False
        self._thread.join(5)
        self.node.destroy_node()
        self._executor.shutdown()
        self.context.try_shutdown()


class Program:
    """A process with its output."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._file = log.open("wb")
        self._log = log
        self.process = subprocess.Popen(
            command, stdout=self._file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output:
            assert self.process.poll() is None, f"it ended before it said {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"it did not say {text!r}:\n{self.output}"
            time.sleep(0.02)

    def end(self, number: int = signal.SIGINT, timeout: float = 20.0) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {timeout} s of {signal.Signals(number).name}:\n{self.output}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._file.close()


@pytest.fixture
def robot() -> Iterator[Robot]:
    made = Robot()
    yield made
    made.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*command: str) -> Program:
        started.append(Program(command, tmp_path / f"program_{len(started)}.log"))
        return started[-1]

    yield start
    for one in started:
        one.close()


def parameters(*options: str) -> list[str]:
    return ["--ros-args", *(word for option in options for word in ("-p", option))]


@pytest.fixture
def quick() -> Callable[..., list[str]]:
    return lambda *options: parameters(*QUICK, *options)


@pytest.fixture
def policy(program: Callable[..., Program]) -> Callable[..., Program]:
    def start(*options: str, quick: Sequence[str] = QUICK) -> Program:
        return program(sys.executable, "-m", "vla_ros.node.lifecycle_main", *parameters(*quick, *options))

    return start


ROBOT_PROCESS = """
import sys, time
sys.path.append(sys.argv[1])
from conftest import Robot
robot = Robot()
robot.drive()
while True:
    print("commands:", len(robot.commands), flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def robot_process(program: Callable[..., Program]) -> Callable[[], Program]:
    """Start a :class:`Robot` as a process of its own, which can be killed."""
    return lambda: program(sys.executable, "-c", ROBOT_PROCESS, str(Path(__file__).parent))


def write_bag(folder: Path, frames: int, rate: float) -> None:
    """A camera and joint states, as `ros2 bag record` leaves them, a year ago."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    from vla_ros.vision.messages import encode_image

    store = get_typestore(Stores.ROS2_JAZZY)
    began = 1_730_000_000_000_000_000
    header, stamp, joints = (
        store.types[name]
        for name in ("std_msgs/msg/Header", "builtin_interfaces/msg/Time", "sensor_msgs/msg/JointState")
    )
    names = [f"joint_{number}" for number in range(1, 8)]
    home = np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0])
    empty = np.zeros(0)
    with Writer(folder, version=9, storage_plugin=StoragePlugin.SQLITE3) as writer:
        camera = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
        arm = writer.add_connection("/joint_states", "sensor_msgs/msg/JointState", typestore=store)
        for index in range(frames):
            at = began + int(index * 1e9 / rate)
            when = stamp(sec=at // 10**9, nanosec=at % 10**9)
            state = joints(
                header=header(stamp=when, frame_id=""), name=names, position=home, velocity=empty, effort=empty
            )
            writer.write(arm, at, store.serialize_cdr(state, joints.__msgtype__))
            image = np.full((48, 64, 3), index, np.uint8)
            writer.write(camera, at, bytes(encode_image(image, at, "camera")))


@pytest.fixture
def ros2_bag() -> None:
    pytest.importorskip("ros2bag", reason="the command `ros2 bag` is not installed")


@pytest.fixture
def recorded_bag(tmp_path: Path) -> Path:
    """Two seconds of camera and joint states: 40 frames."""
    folder = tmp_path / "recorded"
    write_bag(folder, frames=40, rate=20.0)
    return folder
