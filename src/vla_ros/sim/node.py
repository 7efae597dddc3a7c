"""The simulated robot on the ROS graph: publishes camera, joint states and object poses; takes joint commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.errors import VlaRosError
from vla_ros.graph.node import Graph
from vla_ros.sim.status import PolicyFailedError, PolicyStatus
from vla_ros.sim.world import TableTop
from vla_ros.types import FloatArray, JointState, UInt8Array
from vla_ros.vision.messages import encode_image

SECOND = 1_000_000_000
NODE_NAME = "table_top"

IMAGE_TOPIC = "/camera/image_raw"
WRIST_TOPIC = "/wrist_camera/image_raw"
JOINT_TOPIC = "/joint_states"
OBJECT_TOPIC = "/sim/objects"
COMMAND_TOPIC = "/arm/joint_command"
INSTRUCTION_TOPIC = "/vla_policy/instruction"
ACTION_TOPIC = "/vla_policy/action"
STATUS_TOPIC = "/vla_policy/status"

_PUBLISHED = {
    IMAGE_TOPIC: ("sensor_msgs/msg/Image", "camera"),
    WRIST_TOPIC: ("sensor_msgs/msg/Image", "camera"),
    JOINT_TOPIC: ("sensor_msgs/msg/JointState", "state_publisher"),
    OBJECT_TOPIC: ("sensor_msgs/msg/JointState", "state_publisher"),
    INSTRUCTION_TOPIC: ("std_msgs/msg/String", "instruction"),
}

Tap = Callable[[str, int, Any], None]
"""Called with every message sent or received: topic, stamp in nanoseconds, message or its CDR bytes."""


@dataclass(frozen=True)
class ReceivedCommand:
    """A command of the policy node: joints, positions in radians and metres, stamp of the frame in nanoseconds."""

    names: tuple[str, ...]
    positions: tuple[float, ...]
    stamp: int


class SimNode:
    """Publishes a :class:`TableTop` and receives the commands to its arm.

    Everything, callbacks included, runs on the thread that calls the methods here; they spin the graph.

    Args:
        graph: The joined graph.
        wrist: Publish the wrist camera too.
        tap: Called with every message, to record it.

    Attributes:
        actions: The policy's actions since :meth:`forget_actions`, float64 [D] each.
        policy: Status of the policy node.
    """

    def __init__(self, graph: Graph, *, wrist: bool = False, tap: Tap | None = None) -> None:
        self._graph = graph
        self._tap = tap
        self._node = graph.create_node(NODE_NAME)
        self._publishers = {
            topic: self._node.create_publisher(graph.message(kind), topic, graph.qos(qos))
            for topic, (kind, qos) in _PUBLISHED.items()
            if wrist or topic != WRIST_TOPIC
        }
        self._node.create_subscription(
            graph.message("sensor_msgs/msg/JointState"), COMMAND_TOPIC, self._on_command, graph.qos("command")
        )
        # A queue, unlike commands: every action is to be received and recorded.
        self._node.create_subscription(
            graph.message("std_msgs/msg/Float64MultiArray"), ACTION_TOPIC, self._on_action, graph.qos("default")
        )
        self.policy = PolicyStatus()
        self._node.create_subscription(
            graph.message("std_msgs/msg/String"),
            STATUS_TOPIC,
            lambda message: self.policy.update(message.data),
            graph.qos("instruction"),
        )
        self._command: ReceivedCommand | None = None
        self._stamp = 0
        self.actions: list[FloatArray] = []

    # --- out ---

    def next_stamp(self) -> int:
        """The ROS time in nanoseconds, always later than the previous result."""
        self._stamp = max(int(self._node.get_clock().now().nanoseconds), self._stamp + 1)
        return self._stamp

    def publish_instruction(self, text: str) -> None:
        """Publish the instruction; late subscribers get it too."""
        self._send(INSTRUCTION_TOPIC, self.next_stamp(), self._graph.message("std_msgs/msg/String")(data=text))

    def publish_joints(self, world: TableTop, stamp: int) -> None:
        """Publish positions and velocities of all nine joints."""
        message = self._joint_state(world.joint_state(stamp), world.joint_velocities())
        self._send(JOINT_TOPIC, stamp, message)

    def publish_state(self, world: TableTop, stamp: int) -> None:
        """Publish joint states and object poses for the frame with the same stamp."""
        self.publish_joints(world, stamp)
        self._send(OBJECT_TOPIC, stamp, self._joint_state(world.object_state(stamp)))

    def publish_image(self, image: UInt8Array, stamp: int, topic: str = IMAGE_TOPIC) -> None:
        """Publish an upright image uint8 [H, W, 3] upside down, as LIBERO's renderer delivers it."""
        frame = "wrist_camera" if topic == WRIST_TOPIC else "front_camera"
        self._send(topic, stamp, encode_image(image[::-1, ::-1], stamp, frame))

    def _joint_state(self, state: JointState, velocities: FloatArray | None = None) -> Any:
        make = self._graph.message
        seconds, nanoseconds = divmod(state.stamp, SECOND)
        time_message = make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
        return make("sensor_msgs/msg/JointState")(
            header=make("std_msgs/msg/Header")(stamp=time_message, frame_id="base_link"),
            name=list(state.names),
            position=state.positions.tolist(),
            velocity=[] if velocities is None else velocities.tolist(),
        )

    def _send(self, topic: str, stamp: int, message: Any) -> None:
        self._publishers[topic].publish(message)
        if self._tap is not None:
            self._tap(topic, stamp, message)

    # --- in ---

    def take_command(self) -> ReceivedCommand | None:
        """The newest command, or None if it was already taken."""
        command, self._command = self._command, None
        return command

    def forget_actions(self) -> None:
        """Clear :attr:`actions`."""
        self.actions = []

    def _on_command(self, message: Any) -> None:
        stamp = int(message.header.stamp.sec) * SECOND + int(message.header.stamp.nanosec)
        self._command = ReceivedCommand(tuple(message.name), tuple(float(x) for x in message.position), stamp)
        if self._tap is not None:
            self._tap(COMMAND_TOPIC, stamp, message)

    def _on_action(self, message: Any) -> None:
        self.actions.append(np.array(message.data, dtype=np.float64))
        if self._tap is not None:
            self._tap(ACTION_TOPIC, self._node.get_clock().now().nanoseconds, message)

    # --- waiting ---

    def spin(self, until: Callable[[], bool], timeout: float) -> bool:
        """Run callbacks until ``until()`` is true, for at most ``timeout`` seconds; returns whether it was."""
        deadline = time.monotonic() + timeout
        done = until()
        if done:
            return True

        def ended() -> bool:
            nonlocal done
            done = until()
            return done or time.monotonic() >= deadline

        self._graph.spin(ended, min(0.05, max(0.001, timeout)))
        return done

    def wait_for_policy(self, timeout: float, alive: Callable[[], bool]) -> None:
        """Wait until all topics of the policy node are connected.

        Args:
            timeout: Seconds; loading a large model takes minutes.
            alive: False once the policy node has ended.

        Raises:
            VlaRosError: It ended, or was not ready in time; the message names the missing topics.
        """
        needed = [IMAGE_TOPIC, JOINT_TOPIC, INSTRUCTION_TOPIC]

        def missing() -> list[str]:
            topics = [topic for topic in needed if self._publishers[topic].get_subscription_count() == 0]
            return topics + [
                topic for topic in (COMMAND_TOPIC, ACTION_TOPIC) if self._node.count_publishers(topic) == 0
            ]

        self.spin(lambda: not missing() or not alive(), timeout)
        if not alive():
            raise PolicyFailedError("the policy node ended before it was ready; its last lines are above")
        if missing():
            raise VlaRosError(
                f"the policy node was not ready within {timeout:g} s: no connection on {missing()}. "
                "Are both processes on the same ROS_DOMAIN_ID and middleware? --start-timeout waits longer"
            )
