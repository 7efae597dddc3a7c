"""Drivers for the robots in ``config/robots`` without ROS; like mock hardware, joints follow commands at once."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig, Config
from vla_ros.config.sections import GRIPPER_ACTIONS
from vla_ros.control.command import message_type
from vla_ros.execution.gripper_goals import ACTION_TYPES
from vla_ros.graph import open_graph
from vla_ros.vision.messages import encode_image

RATE = 50.0  # rate of joint states, Hz
_FRAMES = 20.0  # rate of frames, Hz
_SUCCEEDED = 4  # action_msgs/msg/GoalStatus
_FASTEST = 8.0  # maximum joint speed, rad/s
_VELOCITY_STANDS = 0.5  # s after which a velocity expires without a new command


@dataclass
class Joint:
    """Position of a joint, and its commanded target or velocity."""

    position: float
    target: float
    velocity: float = 0.0
    until: float = 0.0


@dataclass
class Log:
    """Record of joint states (steady clock, positions by name), and of commands and goals by topic."""

    states: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    commands: list[tuple[float, str, Any]] = field(default_factory=list)
    goals: list[tuple[float, str, float]] = field(default_factory=list)


class Drivers:
    """The drivers of a configuration's arms, grippers and cameras; they run on a separate thread.

    Args:
        config: The robot's options.
        homes: Initial joint positions of each arm by name, in the order of the arm's driver; fingers last.
    """

    def __init__(self, config: Config, homes: Mapping[str, Mapping[str, float]]) -> None:
        self.log = Log()
        self._graph = open_graph("dds")
        self._node = self._graph.create_node("drivers")
        self._lock = threading.Lock()
        self._joints = {arm: {name: Joint(at, at) for name, at in own.items()} for arm, own in homes.items()}
        self._topics = {arm.name: arm.joint_states for arm in config.arms}
        self._gauges = {arm.name: (arm, arm.gripper.gauge) for arm in config.arms if arm.gripper.gauge}
        self._states: dict[str, Any] = {}
        make, qos = self._graph.message, self._graph.qos
        self._cameras = [
            self._node.create_publisher(make("sensor_msgs/msg/Image"), topic, qos("camera"))
            for topic in config.camera.topics
        ]
        self._stop = self._node.create_publisher(make("std_msgs/msg/Bool"), "/vla_policy/stop", qos("command"))
        for arm in config.arms:
            self._join(arm)
        self._noise = np.random.default_rng(0)
        self._node.create_timer(1 / RATE, self._send_states)
        self._node.create_timer(1 / _FRAMES, self._send_frames)
        self._ended = False
        self._thread = threading.Thread(target=self._graph.spin, args=(lambda: self._ended, 0.01))
        self._thread.start()

    def _join(self, arm: ArmConfig) -> None:
        make, qos = self._graph.message, self._graph.qos
        if arm.joint_states not in self._states:
            cls = make("sensor_msgs/msg/JointState")
            self._states[arm.joint_states] = self._node.create_publisher(
                cls, arm.joint_states, qos("state_publisher")
            )
        for topic, output in ((arm.command, arm.output), (arm.gripper_topic, arm.gripper.output)):
            if topic and output in GRIPPER_ACTIONS:
                for end, kind in ACTION_TYPES[output].items():
                    self._serve(arm, topic + end, self._graph.action(kind))
            elif topic:
                fingers = topic == arm.gripper_topic
                take = partial(self._on_command, arm, topic, fingers)
                self._node.create_subscription(make(message_type(output)), topic, take, qos("command"))

    def _serve(self, arm: ArmConfig, name: str, kind: Any) -> None:
        def on_goal(request: Any, response: Any) -> Any:
            goal = request.goal
            command = getattr(goal, "command", goal)
            width = getattr(command, "width", None)
            found = width / 2 if width is not None else np.atleast_1d(command.position)[0]
            with self._lock:
                self.log.goals.append((time.monotonic(), name, float(found)))
                for finger in arm.robot.gripper_joint_names:
                    self._joints[arm.name][finger].target = float(found)
            response.accepted = True
            return response

        def on_result(_: Any, response: Any) -> Any:
            response.status = _SUCCEEDED
            for field_name in ("success", "reached_goal"):
                if hasattr(response.result, field_name):
                    setattr(response.result, field_name, True)
            return response

        self._node.create_service(kind.SendGoal, f"{name}/_action/send_goal", on_goal)
        self._node.create_service(kind.GetResult, f"{name}/_action/get_result", on_result)

    def _on_command(self, arm: ArmConfig, topic: str, fingers: bool, message: Any) -> None:
        joints = self._joints[arm.name]
        names = list(arm.robot.gripper_joint_names if fingers else joints)
        with self._lock:
            self.log.commands.append((time.monotonic(), topic, message))
            velocity = not fingers and "velocity" in arm.output
            if hasattr(message, "points"):
                names, values = list(message.joint_names), message.points[0].positions
            elif hasattr(message, "cmd"):
                names = [message.name] if fingers else names
                values = np.atleast_1d(message.cmd)
            elif hasattr(message, "data"):
                values = message.data
            else:
                names, values = list(message.name), message.velocity if velocity else message.position
            for name, value in zip(names, values, strict=False):
                if velocity:
                    joints[name].velocity, joints[name].until = float(value), time.monotonic() + _VELOCITY_STANDS
                else:
                    joints[name].target = float(value)

    def _send_states(self) -> None:
        now, make = time.monotonic(), self._graph.message
        seconds, nanoseconds = divmod(self._now(), 1_000_000_000)
        by_topic: dict[str, dict[str, float]] = {}
        with self._lock:
            for arm, topic in self._topics.items():
                for name, joint in self._joints[arm].items():
                    way = joint.target - joint.position
                    if joint.until:
                        way = joint.velocity / RATE if now < joint.until else 0.0
                    joint.position += float(np.clip(way, -_FASTEST / RATE, _FASTEST / RATE))
                    by_topic.setdefault(topic, {})[name] = joint.position
            for name, (options, gauge) in self._gauges.items():  # published next to the motor's joint
                gripper, finger = options.gripper, options.robot.gripper_joint_names[0]
                stroke = gripper.open_position - gripper.closed_position
                opening = (self._joints[name][finger].position - gripper.closed_position) / stroke
                shown = gauge.closed + opening * (gauge.open - gauge.closed)
                by_topic[self._topics[name]][gauge.joint] = shown
            arms = {f"{arm}/{n}": j.position for arm, own in self._joints.items() for n, j in own.items()}
            self.log.states.append((now, arms))
        stamp = make("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
        header = make("std_msgs/msg/Header")(stamp=stamp)
        for topic, states in by_topic.items():
            message = make("sensor_msgs/msg/JointState")(
                header=header, name=list(states), position=list(states.values())
            )
            self._states[topic].publish(message)

    def _send_frames(self) -> None:
        for camera in self._cameras:
            image = self._noise.integers(90, 160, (48, 64, 3), dtype=np.uint8)
            camera.publish(encode_image(image, self._now(), "camera"))

    def _now(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)

    def stop(self) -> None:
        self._stop.publish(self._graph.message("std_msgs/msg/Bool")(data=True))

    def close(self) -> None:
        self._ended = True
        self._thread.join(10)
        self._graph.close()
