"""An environment on the ROS graph: publishes cameras, joint states and state topics; takes commands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig
from vla_ros.control.command import Command, message_type, to_message
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.graph.node import Graph
from vla_ros.types import FloatArray, JointState
from vla_ros.vision.messages import encode_image
from vla_ros_lab.sim.environment import Measurements, PolicyFailedError
from vla_ros_lab.sim.table import IMAGE_TOPIC, OBJECT_TOPIC

SECOND = 1_000_000_000
_NODE_NAME = "table_top"

EPISODE_TOPIC = "/sim/episode"
INSTRUCTION_TOPIC = "/vla_policy/instruction"
ACTION_TOPIC = "/vla_policy/action"
STATUS_TOPIC = "/vla_policy/status"

_PUBLISHED = {
    EPISODE_TOPIC: ("std_msgs/msg/Bool", "instruction"),
    INSTRUCTION_TOPIC: ("std_msgs/msg/String", "instruction"),
}

_UNNAMED = ("float64_multi_array", "joint_velocity")
_OBEYED = ("joint_state", "joint_velocity_state", "joint_trajectory", *_UNNAMED)

_PATIENCE = 5.0  # s for which the policy node may hold or be disarmed
_LONGEST_GAP = 1.5  # s; largest time between two of its status messages that counts; it publishes once a second

Tap = Callable[[str, str, Any], None]
"""Called with every message sent or received: topic, type, message or its CDR bytes."""


@dataclass(frozen=True)
class Driver:
    """Receives the commands to some joints, as a real robot's driver does."""

    topic: str
    output: str  # a value of ``control.output``
    joints: tuple[str, ...]  # order of the joints in messages without names


def drivers(arms: Sequence[ArmConfig]) -> tuple[Driver, ...]:
    """Return the drivers for the policy node's options: one per arm, and one per gripper with its own topic."""
    drivers = []
    for arm in arms:
        joints, fingers = arm.robot.joint_names, arm.robot.gripper_joint_names
        drivers.append(Driver(arm.command, arm.output, joints if arm.gripper_topic else joints + fingers))
        if arm.gripper_topic:
            drivers.append(Driver(arm.gripper_topic, arm.gripper.output, fingers))
    for driver in drivers:
        if driver.output not in _OBEYED:
            raise ConfigError(
                f"output on {driver.topic}: found {driver.output}; the simulated arm accepts {', '.join(_OBEYED)}"
            )
    return tuple(drivers)


class PolicyStatus:
    """State of the policy node by its ``~/status``; ``clock`` returns monotonic seconds.

    Attributes:
        instruction: The instruction that the node has received.
        dropped: Number of frames that led to no command.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = self._explanation = self.instruction = ""
        self.dropped = 0
        self._received, self._idle = clock(), 0.0

    def update(self, text: str) -> None:
        """Process a message of ``~/status``; ignore anything else."""
        try:
            status = json.loads(text)
            state, explanation = str(status["state"]), str(status["explanation"])
            instruction, dropped = str(status["instruction"]), sum(status["frames"]["dropped"].values())
        except (ValueError, TypeError, KeyError):
            return
        if state == "disarmed":
            explanation += " (control.armed:=true or ~/enable arms it)"
        now = self._clock()
        idles = "armed" not in (state, self._state or "armed")  # in this message and the previous one
        self._idle = self._idle + min(_LONGEST_GAP, now - self._received) if idles else 0.0
        self._state, self._explanation, self._received = state, explanation, now
        self.instruction, self.dropped = instruction, dropped

    @property
    def stopped(self) -> str:
        """Reason for the stop, which only a person can reset; "" if the node is not stopped."""
        return self._explanation if self._state == "stopped" else ""

    @property
    def hopeless(self) -> str:
        """Why no command can be expected (stopped, or holding or disarmed for 5 s); otherwise ""."""
        return self._explanation if self.stopped or self._idle >= _PATIENCE else ""


class SimNode:
    """Publishes the measurements of an environment and receives the commands to its arms.

    Callbacks run only in :meth:`spin` and :meth:`wait_for_policy`, on the caller's thread.

    Args:
        graph: The graph, already joined.
        arms: Options of the arms, including the topics for joint states and commands.
        cameras: Topics of the images to publish.
        state: Further topics to publish (``robot.state_topics``).
        tap: Called with every message, to record it.

    Attributes:
        actions: The policy's actions since the list was last cleared, float64 [D] each.
        received: (Arrival time in seconds, command) of the first arm's commands since :meth:`forget_commands`.
        joints: Joints of the first arm.
        policy: Status of the policy node.
        stamp: The newest stamp, nanoseconds; 0 before the first.
        command_topics: Topics of the commands.
    """

    def __init__(
        self,
        graph: Graph,
        arms: Sequence[ArmConfig],
        *,
        cameras: Sequence[str] = (IMAGE_TOPIC,),
        state: Sequence[str] = (OBJECT_TOPIC,),
        tap: Tap | None = None,
    ) -> None:
        self._graph = graph
        self._tap = tap
        self._node = graph.create_node(_NODE_NAME)
        self.cameras, self.joints = tuple(cameras), arms[0].robot.joint_names
        self._joint_topics = [arm.joint_states for arm in arms]
        published = {
            **_PUBLISHED,
            **dict.fromkeys(cameras, ("sensor_msgs/msg/Image", "camera")),
            **dict.fromkeys([*self._joint_topics, *state], ("sensor_msgs/msg/JointState", "state_publisher")),
        }
        self._publishers = {
            topic: self._node.create_publisher(graph.message(kind), topic, graph.qos(qos))
            for topic, (kind, qos) in published.items()
        }
        self._types = {topic: kind for topic, (kind, _) in published.items()}
        self._drivers = drivers(arms)
        self.command_topics = tuple(driver.topic for driver in self._drivers)
        for driver in self._drivers:
            self._subscribe(driver.topic, message_type(driver.output), partial(self._on_command, driver), "command")
        # Of the commands only the newest matters, but every action must be received.
        self._subscribe(ACTION_TOPIC, "std_msgs/msg/Float64MultiArray", self._on_action, "default")
        self.policy = PolicyStatus()
        text = graph.message("std_msgs/msg/String")
        self._node.create_subscription(text, STATUS_TOPIC, self._on_status, graph.qos("instruction"))
        self._commands: dict[str, Command] = {}
        self.stamp = 0
        self.actions: list[FloatArray] = []
        self.received: list[tuple[float, Command]] = []

    def _subscribe(self, topic: str, kind: str, heard: Callable[[Any], None], qos: str) -> None:
        def callback(message: Any) -> None:
            heard(message)
            self._record(topic, message)

        self._types[topic] = kind
        self._node.create_subscription(self._graph.message(kind), topic, callback, self._graph.qos(qos))

    # --- out ---

    def next_stamp(self, after: float = 0.0) -> int:
        """Return the next stamp, nanoseconds: the ROS time, or the last stamp ``after`` so many seconds."""
        if self.stamp and after:
            self.stamp += round(after * SECOND)
        else:
            self.stamp = max(int(self._node.get_clock().now().nanoseconds), self.stamp + 1)
        return self.stamp

    def publish_instruction(self, text: str) -> None:
        """Publish the instruction; late subscribers receive it, too."""
        self._send(INSTRUCTION_TOPIC, self._graph.message("std_msgs/msg/String")(data=text))

    def publish_episode(self, *, runs: bool) -> None:
        """Publish whether an episode is running; ``vla-ros export`` can split a bag by this topic."""
        self._send(EPISODE_TOPIC, self._graph.message("std_msgs/msg/Bool")(data=runs))

    def publish(self, measured: Measurements, stamp: int) -> None:
        """Publish all measurements, the first camera's image last: receivers infer on it and need the others."""
        self.publish_joints(measured.joints)
        for topic, state in measured.state.items():
            self._send(topic, self._joint_state(state))
        for topic, image in reversed([*measured.images.items()]):
            self._send(topic, encode_image(image, stamp, topic.split("/")[1]))

    def publish_joints(self, joints: Sequence[JointState]) -> None:
        """Publish one joint state per arm, as their drivers would."""
        for topic, state in zip(self._joint_topics, joints, strict=True):
            self._send(topic, self._joint_state(state))

    def _joint_state(self, state: JointState) -> Any:
        positions = Command(state.names, state.positions, state.stamp)
        message = to_message(positions, "joint_state", self._graph.message)
        message.velocity = state.velocities.tolist()
        return message

    def _send(self, topic: str, message: Any) -> None:
        self._publishers[topic].publish(message)
        self._record(topic, message)

    def _record(self, topic: str, message: Any) -> None:
        if self._tap is not None:
            self._tap(topic, self._types[topic], message)

    # --- in ---

    def take_commands(self) -> dict[str, Command]:
        """Return the newest untaken command of each driver's topic."""
        commands, self._commands = self._commands, {}
        return commands

    def forget_commands(self) -> None:
        self.received, self._commands = [], {}

    def _on_command(self, driver: Driver, message: Any) -> None:
        command = read_command(driver, message, self.stamp)
        self._commands[driver.topic] = command
        if driver is self._drivers[0]:
            self.received.append((time.monotonic(), command))

    def _on_action(self, message: Any) -> None:
        self.actions.append(np.array(message.data, dtype=np.float64))

    def _on_status(self, message: Any) -> None:
        self.policy.update(message.data)

    # --- waiting ---

    def spin(self, until: Callable[[], bool], timeout: float) -> bool:
        """Run callbacks until ``until()`` is true, for at most ``timeout`` seconds; return its result."""
        deadline, done = time.monotonic() + timeout, until()

        def ended() -> bool:
            nonlocal done
            done = until()
            return done or time.monotonic() >= deadline

        if not done:
            self._graph.spin(ended, min(0.05, max(0.001, timeout)))
        return done

    def wait_for_policy(self, timeout: float, alive: Callable[[], bool]) -> None:
        """Wait until all topics of the policy node are connected; loading a large model takes minutes.

        ``alive()`` is False once the policy node has exited. Raises VlaRosError with the names of missing topics.
        """
        needed = [*self.cameras[:1], *self._joint_topics, INSTRUCTION_TOPIC]

        def missing() -> list[str]:
            sent = (*self.command_topics, ACTION_TOPIC)
            return [
                *(topic for topic in needed if self._publishers[topic].get_subscription_count() == 0),
                *(topic for topic in sent if self._node.count_publishers(topic) == 0),
            ]

        self.spin(lambda: not missing() or not alive(), timeout)
        if not alive():
            raise PolicyFailedError("the policy node exited before it was ready")
        if missing():
            raise VlaRosError(
                f"the policy node was not ready within {timeout:g} s: no connection on {', '.join(missing())}. "
                "Is it running, with the same ROS_DOMAIN_ID and middleware? To wait longer, raise --start-timeout"
            )


def read_command(driver: Driver, message: Any, now: int) -> Command:
    """Read a driver's command from a message; ``now``, nanoseconds, replaces a missing stamp."""
    is_velocity, stamp = driver.output.startswith("joint_velocity"), now
    if driver.output in _UNNAMED:
        names, values = driver.joints, message.data
    else:
        stamp = int(message.header.stamp.sec) * SECOND + int(message.header.stamp.nanosec)
        if driver.output == "joint_trajectory":
            names, values = message.joint_names, message.points[-1].positions
        else:
            names, values = message.name, message.velocity if is_velocity else message.position
    numbers = np.array(values, dtype=np.float64)
    if is_velocity:
        return Command((), np.zeros(0), stamp, velocities=dict(zip(names, numbers.tolist(), strict=True)))
    return Command(tuple(names), numbers, stamp)
