"""A robot in a separate process: cameras, joint states, an arm that follows commands, a stop button.

Reads orders as JSON lines from standard input, and writes each record to standard output before the next event, so
that the records of a killed robot are complete. Messages pass through a :class:`~tools.faults.channel.Channel`.

Stamps of frames are odd and stamps of joint states even, so the stamp of a command tells a motion from a hold.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tools.faults.channel import SECOND, Channel, Fault, spoil_joints
from tools.faults.depth_camera import DepthCamera
from tools.faults.hand import Hand, Tree
from tools.faults.intruder import Intruder
from tools.faults.messages import joint_state, read_joints, stamp_of, stamp_of_frame
from tools.faults.person import Person
from tools.faults.records import Kind, Record
from tools.faults.surroundings import SCENE, Surroundings
from vla_ros.errors import VlaRosError
from vla_ros.graph import open_graph
from vla_ros.graph.node import Graph
from vla_ros.graph.origin import Origin
from vla_ros.types import FloatArray
from vla_ros.vision.messages import encode_image, with_stamp

ARM = tuple(f"joint_{number}" for number in range(1, 8))
FINGERS = ("finger_left", "finger_right")
TWIST = ("linear_x", "linear_y", "linear_z", "angular_x", "angular_y", "angular_z")
HOME = (0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0, 0.04, 0.04)
TOPICS = ("/camera/image_raw", "/camera_2/image_raw", "/camera_3/image_raw", "/camera_4/image_raw")
JOINT_RATE = 50.0  # Hz
_CLOCK_RATE = 100.0
_HEARTBEAT_RATE = 20.0
_INTRUDER_RATE = 15.0
_SCENE_RATE = 15.0
_PUSH_SPEED = 1.6  # rad/s
_ELSEWHERE = 0.13  # rad
_COMMANDS = {"command": "/arm/joint_command", "gripper": "/gripper/command"}
_ARM_SPEED = 2.0  # rad/s
_FINGER_SPEED = 0.2  # m/s
_SAG, _LAG, _STICK = 0.05, 0.15, 0.02  # rad, s, rad
_IMAGES = 16
_DRIVER_TIMEOUT = 1.0  # s; after this time the driver ends a velocity, whatever the node does


@dataclass
class _Beat:
    """A periodic action."""

    due: float
    period: Callable[[], float]
    act: Callable[[], None]


class Robot:
    """The robot; :meth:`run` returns after the order ``end``.

    Args:
        graph: The graph that the robot joins and spins.
        cameras: Number of cameras.
        size: Width and height of the images in pixels.
        rate: Frames per second of each camera.
        simulated: Publish ``/clock``.
        seed: Seed of all randomness.
        listens: ``joints``: one driver for arm and fingers; ``apart``: two drivers; ``twist`` and ``velocity``: a
            driver that takes velocities; ``action``: a gripper action; ``goals``: as ``joints``, with a client of
            ``~/run_policy``.
        arm: Prefix of the arm's topics; "" for a robot with one arm.
        person: What a person holds: ``leader`` or ``joy``; "" for nobody.
        scene: Publish the obstacles around the robot.
        depth: Publish depth images, with CameraInfo and transforms, of a camera on ``tf`` or on this link.
    """

    def __init__(
        self,
        graph: Graph,
        cameras: int,
        size: tuple[int, int],
        rate: float,
        simulated: bool,
        seed: int,
        listens: str = "joints",
        arm: str = "",
        person: str = "",
        scene: bool = False,
        at: Sequence[float] = HOME,
        depth: str = "",
    ) -> None:
        self._graph, self._simulated, self._listens = graph, simulated, listens
        self._node = graph.create_node(f"faulty_robot{arm and '_' + arm}")
        own = f"/{arm}" if arm else ""
        self._joint_topic = f"{own}/joint_states"
        self._command_topics = {what: f"{own}{topic}" for what, topic in _COMMANDS.items()}
        self._rng = random.Random(seed)
        self._frames = Channel(random.Random(seed + 1))
        self._joints = Channel(random.Random(seed + 2))
        self._content = ""
        self._which = 0  # seed of the joint that a fault affects
        self._positions = np.array(at)
        self._wanted = np.array(at)
        self._velocity, self._moves_until = np.zeros(len(HOME)), 0.0
        self._arm_fault = ""  # sags, lags, sticks or blocked
        self._push = 0.0  # rad by which somebody still turns the first joint
        self._offset = 0  # ns by which the ROS clock is ahead of the system clock
        self._slow, self._deaf, self._delay = 0.0, False, 0.0
        self._beating = True
        self._intruder: Intruder | None = None
        self._frame_period = 1 / rate
        noise = np.random.default_rng(seed).integers(60, 190, (_IMAGES, size[1], size[0], 3), dtype=np.uint8)
        self._images = itertools.cycle([encode_image(image, 0, "camera") for image in noise])
        self._writing = threading.Lock()
        self._orders: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._ended = False
        self._ends: dict[str, Any] = {}
        self._cameras = TOPICS[:cameras]
        gripper = {"apart": ("gripper",), "action": ("hand",), "goals": ("tree",)}.get(listens, ())
        told = ("status", "words") if cameras else ()
        for what in (*self._cameras, "joints", "command", *gripper, *told):
            self._join(what)
        self._person: Person | None = None
        if person:
            self._person = Person(graph, self._node, person, ARM, random.Random(seed + 3), self._emit)
        self._surroundings = Surroundings(graph, self._node, self._emit) if scene else None
        self._depth = DepthCamera(graph, self._node, depth.removeprefix("tf")) if depth else None
        if simulated:
            self._clock = self._publisher("rosgraph_msgs/msg/Clock", "/clock", "state_publisher")

    def run(self) -> None:
        receiving = threading.Thread(target=self._graph.spin, args=(lambda: self._ended, 0.02))
        receiving.start()
        threading.Thread(target=self._listen, daemon=True).start()
        now = time.monotonic()
        beats = [
            _Beat(now, lambda: self._frame_period, self._send_frames),
            _Beat(now, lambda: 1 / JOINT_RATE, self._send_joints),
            _Beat(now, lambda: 1 / _HEARTBEAT_RATE, self._beat),
            _Beat(now, lambda: 1 / _INTRUDER_RATE, self._send_intruder),
        ]
        if self._person is not None:
            beats.append(_Beat(now, lambda: 1 / JOINT_RATE, self._send_person))
        if self._surroundings is not None:
            beats.append(_Beat(now, lambda: 1 / _SCENE_RATE, self._surroundings.send))
        if self._simulated:
            beats.append(_Beat(now, lambda: 1 / _CLOCK_RATE, self._send_clock))
        try:
            while not self._ended:
                self._wait(min(beat.due for beat in beats))
                self._send_due()
                for beat in beats:
                    if time.monotonic() >= beat.due:
                        beat.due = max(beat.due + beat.period(), time.monotonic())
                        beat.act()
        finally:
            self._ended = True
            receiving.join(5)

    # Orders

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._orders.append(json.loads(line))
                self._changed.notify()
        self._ended = True

    def _wait(self, until: float) -> None:
        """Wait until the next action is due or an order arrives, and follow all orders."""
        due = min(until, self._due[0][0] if self._due else until)
        with self._changed:
            self._changed.wait_for(lambda: self._orders, max(0.0, due - time.monotonic()))
            orders, self._orders = self._orders, []
        for order in orders:
            self._follow(order)

    def _follow(self, order: dict[str, Any]) -> None:
        self._emit("mark", name=json.dumps(order))
        match order:
            case {"do": "frames"}:
                self._send_later(self._frames.set(_fault(order)), self._cameras[0], "frame")
            case {"do": "joints"}:
                self._send_later(self._joints.set(_fault(order)), "joints", "joints")
            case {"do": "content", "kind": kind}:
                self._content, self._which = kind, self._rng.randrange(2**31)
            case {"do": "stop"}:
                self._ends["stop"].publish(self._graph.message("std_msgs/msg/Bool")(data=True))
            case {"do": "instruct", "text": text}:
                self._ends["instruction"].publish(self._graph.message("std_msgs/msg/String")(data=text))
            case {"do": "hand", "answer": answer}:
                self._ends["hand"].answer = answer
            case {"do": "goal", "prompt": prompt}:
                self._ends["tree"].run(prompt)
            case {"do": "push", "by": by}:  # towards the middle of the joint's range
                self._push = -by if self._positions[0] > 0 else by
            case {"do": "arm", "kind": kind}:
                self._arm_fault = kind
            case {"do": "deaf", "on": on}:
                self._deaf = on
            case {"do": "heartbeat", "on": on}:
                self._beating = on
            case {"do": "jump", "seconds": seconds}:
                self._offset += int(seconds * SECOND)
            case {"do": "slow", "seconds": seconds}:
                self._slow = seconds
            case {"do": "leave", "what": what}:
                self._leave(what)
            case {"do": "join", "what": what}:
                self._join(what)
            case {"do": "intrude", "what": what}:
                self._intrude(what)
            case {"do": "withdraw"} if self._intruder is not None:
                self._intruder.close()
                self._intruder = None
            case {"do": "person", "fault": fault} if self._person is not None:
                self._person.become(fault)
            case {"do": "ask", "what": what} if self._person is not None:
                asks: Callable[[], None] = partial(self._person.ask, what, int(order.get("more", 0)))
                heapq.heappush(self._due, (time.monotonic() + order.get("after", 0.0), next(self._count), asks))
            case {"do": "scene", "kind": kind} if self._surroundings is not None:
                self._surroundings.become(kind, self._positions[: len(ARM)])
            case {"do": "depth", "kind": kind} if self._depth is not None:
                self._depth.become(kind)
            case {"do": "end"}:
                self._ended = True
            case _:
                raise VlaRosError(f"unknown order: {order}")

    def _intrude(self, what: str) -> None:
        topic = {"joints": "/joint_states", "camera": TOPICS[0], "claim": _COMMANDS["command"], "scene": SCENE}
        data: dict[str, Callable[[], Any]] = {
            "joints": self._other_joints,
            "camera": lambda: with_stamp(next(self._images), self._now() | 1),
        }
        if self._surroundings is not None:
            data["scene"] = self._surroundings.cleared
        self._intruder = Intruder(self._graph, what, topic.get(what, _COMMANDS.get(what, "")), data.get(what))

    def _send_intruder(self) -> None:
        if self._intruder is not None:
            self._intruder.send()

    def _other_joints(self) -> bytes:
        return joint_state([*ARM, *FINGERS], (self._positions + _ELSEWHERE).tolist(), self._now() & ~1)

    # The graph

    def _publisher(self, type_name: str, topic: str, qos: str) -> Any:
        return self._node.create_publisher(self._graph.message(type_name), topic, self._graph.qos(qos))

    def _join(self, what: str) -> None:
        make, qos = self._graph.message, self._graph.qos
        if what in TOPICS:
            self._ends[what] = self._publisher("sensor_msgs/msg/Image", what, "camera")
        elif what == "joints":
            self._ends[what] = self._publisher("sensor_msgs/msg/JointState", self._joint_topic, "state_publisher")
        elif what in ("command", "gripper"):
            topic = self._command_topics[what]
            kind, take = ("sensor_msgs/msg/JointState", self._on_command)
            if self._listens == "twist":
                kind, take = ("geometry_msgs/msg/TwistStamped", self._on_twist)
            elif self._listens == "velocity":
                kind, take = ("sensor_msgs/msg/JointState", self._on_velocity)
            made: Any = self._graph.subscribe_raw(
                self._node, make(kind), topic, partial(self._on_raw, kind, take), qos("request")
            )
            self._ends[what] = made
        elif what == "hand":
            self._ends[what] = Hand(self._graph)
        elif what == "tree":
            self._ends[what] = Tree(self._graph)
        elif what == "status":
            self._ends[what] = self._node.create_subscription(
                make("std_msgs/msg/String"), "/vla_policy/status", self._on_status, qos("instruction")
            )
        else:
            self._ends["instruction"] = self._publisher(
                "std_msgs/msg/String", "/vla_policy/instruction", "instruction"
            )
            self._ends["stop"] = self._publisher("std_msgs/msg/Bool", "/vla_policy/stop", "command")
            self._ends["heartbeat"] = self._publisher(
                "std_msgs/msg/Empty", "/vla_policy/heartbeat", "state_publisher"
            )

    def _leave(self, what: str) -> None:
        left = self._ends.pop(what)
        if what in ("command", "gripper"):
            left.destroy()
        elif what == "hand":
            left.close()
        else:
            self._node.destroy_publisher(left)

    # Out

    def _now(self) -> int:
        return time.time_ns() + self._offset

    def _send_frames(self) -> None:
        for topic in self._cameras:
            message = with_stamp(next(self._images), stamp := self._now() | 1)
            if self._depth is not None:
                self._depth.send(stamp)
            channel = self._frames if topic == self._cameras[0] else None
            self._send_later(channel.push(message) if channel else [(0.0, message)], topic, "frame")

    def _send_joints(self) -> None:
        speed = np.array([_ARM_SPEED] * len(ARM) + [_FINGER_SPEED] * len(FINGERS)) / JOINT_RATE
        if self._listens == "velocity":
            moves = time.monotonic() < self._moves_until
            self._wanted = self._positions + moves * self._velocity / JOINT_RATE
        step, arm = self._wanted - self._positions, slice(len(ARM))
        step[arm] = self._follows(step[arm])
        step[arm] /= max(1.0, float(np.max(np.abs(step[arm]) / speed[arm])))  # straight, as drivers move
        self._positions = self._positions + np.clip(step, -speed, speed)
        if self._push:
            turned = float(np.clip(self._push, -_PUSH_SPEED / JOINT_RATE, _PUSH_SPEED / JOINT_RATE))
            self._push -= turned
            self._positions[0] += turned
            self._wanted = self._positions.copy()  # the driver gives way
        names, positions = [*ARM, *FINGERS], self._positions.tolist()
        if self._content:
            names, positions = spoil_joints(self._content, names, positions, random.Random(self._which))
            self._content = "" if self._content == "zero" else self._content  # a single message
        self._send_later(self._joints.push(joint_state(names, positions, self._now() & ~1)), "joints", "joints")

    def _follows(self, step: FloatArray) -> FloatArray:
        """Return how far the arm moves on its way ``step`` [7] to its command until the next joint state."""
        match self._arm_fault:
            case "sags":
                return step - _SAG
            case "lags":
                return step * (1 - math.exp(-1 / (JOINT_RATE * _LAG)))
            case "sticks":
                return np.where(np.abs(step) > _STICK, step, 0.0)
            case "blocked":
                return np.zeros(len(ARM))
        return step

    def _send_person(self) -> None:
        assert self._person is not None
        make, (seconds, nanoseconds) = self._graph.message, divmod(self._now(), SECOND)
        stamp = make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
        self._person.send(self._positions[: len(ARM)], make("std_msgs/msg/Header")(stamp=stamp, frame_id=""))

    def _beat(self) -> None:
        if self._beating and "heartbeat" in self._ends:
            self._ends["heartbeat"].publish(self._graph.message("std_msgs/msg/Empty")())

    def _send_clock(self) -> None:
        make = self._graph.message
        seconds, nanoseconds = divmod(self._now(), SECOND)
        clock = make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
        self._clock.publish(make("rosgraph_msgs/msg/Clock")(clock=clock))

    def _send_later(self, sent: list[tuple[float, bytes]], what: str, kind: Kind) -> None:
        for seconds, message in sent:
            if seconds <= 0:
                self._send(what, kind, message)
                continue

            def act(message: bytes = message) -> None:
                self._send(what, kind, message)

            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), act))

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def _send(self, what: str, kind: Kind, message: bytes) -> None:
        if what not in self._ends:
            return
        if kind == "frame":
            self._emit(kind, stamp=stamp_of_frame(message))
        else:
            self._emit(kind, **read_joints(message, self._graph))
        with contextlib.suppress(VlaRosError):  # Cyclone refuses incomplete messages, which are lost
            self._ends[what].publish(message)

    # In

    def _on_raw(self, kind: str, take: Callable[[Any], None], cdr: Any, origin: Origin) -> None:
        """Forward a command, and store how long ago the node sent it."""
        self._delay = max(0.0, (time.time_ns() - origin.published) / SECOND)
        take(self._graph.deserialize(cdr, self._graph.message(kind)))

    def _on_command(self, message: Any) -> None:
        stamp = stamp_of(message)
        names, positions = tuple(message.name), tuple(float(value) for value in message.position)
        self._emit("command", stamp=stamp, ros=self._now(), delay=self._delay, positions=positions, names=names)
        wanted = self._wanted.copy()
        for name, position in zip(names, positions, strict=False):
            if np.isfinite(position) and name in (*ARM, *FINGERS):
                wanted[(*ARM, *FINGERS).index(name)] = position
        if not self._deaf:
            self._wanted = wanted
        if self._slow:
            time.sleep(self._slow)

    def _on_twist(self, message: Any) -> None:
        """Record a twist; the arm does not move."""
        stamp = stamp_of(message)
        parts = (message.twist.linear, message.twist.angular)
        values = tuple(float(value) for part in parts for value in (part.x, part.y, part.z))
        self._emit("command", stamp=stamp, ros=self._now(), delay=self._delay, positions=values, names=TWIST)

    def _on_velocity(self, message: Any) -> None:
        """Move the joints until the next command or the driver's timeout."""
        stamp = stamp_of(message)
        names, values = tuple(message.name), tuple(float(value) for value in message.velocity)
        self._emit("command", stamp=stamp, ros=self._now(), delay=self._delay, positions=values, names=names)
        if names == ARM and len(values) == len(ARM) and np.isfinite(values).all():
            self._velocity = np.array([*values, 0.0, 0.0])
            self._moves_until = time.monotonic() + _DRIVER_TIMEOUT

    def _on_status(self, message: Any) -> None:
        self._emit("status", text=message.data)

    def _emit(self, kind: Kind, **fields: Any) -> None:
        line = Record(kind, time.monotonic(), **fields).line() + "\n"
        with self._writing:
            try:
                os.write(1, line.encode())
            except BrokenPipeError:
                self._ended = True


def _fault(order: dict[str, Any]) -> Fault | None:
    return Fault(order["kind"], float(order.get("amount", 1.0))) if order.get("kind") else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cameras", type=int, default=1)
    parser.add_argument("--size", type=int, nargs=2, default=(64, 48), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--rate", type=float, default=30.0, help="frames per second")
    parser.add_argument("--simulated", action="store_true", help="publish /clock")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--listens", choices=("joints", "apart", "twist", "velocity", "action", "goals"), default="joints"
    )
    parser.add_argument("--arm", default="")
    parser.add_argument("--person", choices=("", "leader", "joy"), default="")
    parser.add_argument("--scene", action="store_true", help="publish obstacles")
    parser.add_argument("--depth", default="", help="publish depth images of a camera on /tf (tf) or on this link")
    parser.add_argument("--backend", choices=("dds", "rclpy"), default="dds")
    parser.add_argument("--at", type=float, nargs=len(HOME), default=HOME, help="where the joints are at the start")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the director ends it
    with open_graph(given.backend) as graph:
        size = tuple(given.size)
        what = given.listens, given.arm, given.person, given.scene, given.at, given.depth
        Robot(graph, given.cameras, size, given.rate, given.simulated, given.seed, *what).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
