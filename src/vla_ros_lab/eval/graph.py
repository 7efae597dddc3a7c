"""A port on the ROS graph: measurements go out; commands and the status of the node come in."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig
from vla_ros.config.sections import GRIPPER_ACTIONS
from vla_ros.control.clock import Clock
from vla_ros.control.command import Command, message_type, to_message
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.graph.node import Graph
from vla_ros.graph.origin import stamp_of
from vla_ros.graph.wiring import Wiring
from vla_ros.types import JointState
from vla_ros_lab.eval.port import LOCKSTEP, Measure, PolicyFailedError, Port, camera_message
from vla_ros_lab.eval.record import BagRecorder
from vla_ros_lab.sim.environment import Measurements
from vla_ros_lab.sim.table import IMAGE_TOPIC, OBJECT_TOPIC

EPISODE_TOPIC = "/sim/episode"
INSTRUCTION_TOPIC = "/vla_policy/instruction"
ACTION_TOPIC = "/vla_policy/action"
STATUS_TOPIC = "/vla_policy/status"

_NODE_NAME = "table_top"
_SECOND = 1_000_000_000
_NEVER = 1 << 63  # ns
_TEXT = "std_msgs/msg/String"
_UNNAMED = ("float64_multi_array", "joint_velocity")
_OBEYED = ("joint_state", "joint_velocity_state", "joint_trajectory", *_UNNAMED)

_PATIENCE = 5.0  # s for which the policy node may hold or be disarmed
_LONGEST_GAP = 1.5  # s; largest time between two of its status messages that counts; it publishes once a second
_RESEND = 3.0  # s of wall clock after which a frame that may be lost is sent again
_SPARE = 2  # status messages after a frame by which a node that has received it has a command, too
_RESET = 3.0  # s of simulated time between two episodes, so that the arm may be elsewhere
_ACTION_WAIT = 0.2  # s to wait for the action of a command
_TICK = 0.02  # s: joint states at 50 Hz
_RETURN_SPEED = 1.5  # rad/s, and m/s of the fingers
_MIN_SPIN = 0.002  # s to receive messages even if the simulation is late


@dataclass(frozen=True)
class Driver:
    """Receives the commands to some joints, as a real robot's driver does."""

    topic: str
    output: str  # a value of ``control.output``
    joints: tuple[str, ...]  # order of the joints in messages without names

    def read(self, message: Any, now: int) -> Command:
        """Read a command from a message; ``now``, nanoseconds, replaces a missing stamp."""
        is_velocity, stamp = self.output.startswith("joint_velocity"), now
        if self.output in _UNNAMED:
            names, values = self.joints, message.data
        elif self.output == "joint_group_command":
            names, values = self.joints, message.cmd
        elif self.output == "joint_single_command":
            names, values = (message.name,), (message.cmd,)
        elif self.output == "twist_stamped":
            parts = (message.twist.linear, message.twist.angular)
            linear, angular = (np.array([part.x, part.y, part.z]) for part in parts)
            return Command((), np.zeros(0), stamp_of(message), twist=(linear, angular))
        else:
            stamp = int(message.header.stamp.sec) * _SECOND + int(message.header.stamp.nanosec)
            if self.output == "joint_trajectory":
                names, values = message.joint_names, message.points[-1].positions
            else:
                names, values = message.name, message.velocity if is_velocity else message.position
        numbers = np.array(values, dtype=np.float64)
        if is_velocity:
            return Command((), np.zeros(0), stamp, velocities=dict(zip(names, numbers.tolist(), strict=True)))
        return Command(tuple(names), numbers, stamp)


def drivers_of(arms: Sequence[ArmConfig]) -> tuple[Driver, ...]:
    """Return one driver per arm, and one per gripper with its own topic; a gripper's action has none."""
    found = []
    for arm in arms:
        joints, fingers = arm.robot.joint_names, arm.robot.gripper_joint_names
        found.append(Driver(arm.command, arm.output, joints if arm.gripper_topic else joints + fingers))
        if arm.gripper_topic and arm.gripper.output not in GRIPPER_ACTIONS:
            found.append(Driver(arm.gripper_topic, arm.gripper.output, fingers))
    return tuple(found)


def drivers(arms: Sequence[ArmConfig]) -> tuple[Driver, ...]:
    """Return the drivers for the policy node's options; raises ConfigError if the simulated arm is none of them."""
    found = drivers_of(arms)
    goals = [Driver(arm.gripper_topic, arm.gripper.output, ()) for arm in arms if arm.gripper_topic]
    for driver in (*found, *goals):
        if driver.output not in _OBEYED:
            expected = f"the simulated arm accepts {', '.join(_OBEYED)}"
            raise ConfigError(f"output on {driver.topic}: found {driver.output}; {expected}")
    return found


class PolicyStatus:
    """State of the policy node by its ``~/status``; ``clock`` returns monotonic seconds.

    With ``patient``, somebody may reset and arm the node, and no state is hopeless.

    Attributes:
        instruction: The instruction that the node has received.
        dropped: Number of frames that led to no command.
        heard: Number of messages.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, patient: bool = False) -> None:
        self._clock, self._patient = clock, patient
        self._state = self._explanation = self.instruction = ""
        self.dropped = self.heard = 0
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
        self.instruction, self.dropped, self.heard = instruction, dropped, self.heard + 1

    @property
    def stopped(self) -> str:
        """Reason for the stop, which only a person can reset; "" if the node is not stopped."""
        return self._explanation if self._state == "stopped" and not self._patient else ""

    @property
    def hopeless(self) -> str:
        """Why no command can be expected (stopped, or holding or disarmed for 5 s); otherwise ""."""
        return self._explanation if self.stopped or (self._idle >= _PATIENCE and not self._patient) else ""


class GraphPort(Port):
    """Reaches a node over the graph, in lockstep (``node.clock`` is ``inputs``) or on the wall clock.

    In lockstep, stamps are simulated time, so that results do not depend on the machine's speed. Callbacks run only
    while this port waits, on the caller's thread.

    Args:
        graph: The graph, already joined.
        arms: Options of the arms, including the topics for joint states and commands.
        clock: ``lockstep`` or ``wall``.
        cameras: Topics of the images to publish.
        timeout: Longest wait for a command, seconds.
        alive: Is False once the policy node has exited.
        patient: Wait for a person who resets or arms the node.
        tap: Records every message that is sent or received.

    Attributes:
        policy: Status of the policy node.
        last: The newest stamp, nanoseconds; 0 before the first.
    """

    def __init__(
        self,
        graph: Graph,
        arms: Sequence[ArmConfig],
        clock: str = LOCKSTEP,
        *,
        cameras: Sequence[str] = (IMAGE_TOPIC,),
        timeout: float = 30.0,
        alive: Callable[[], bool] = lambda: True,
        patient: bool = False,
        tap: BagRecorder | None = None,
    ) -> None:
        super().__init__(clock, Clock(), cameras, arms[0].robot.joint_names)
        self._arm = arms[0]
        self._graph, self._timeout, self._alive = graph, timeout, alive
        self._node, self._drivers = graph.create_node(_NODE_NAME), drivers(arms)
        self.policy = PolicyStatus(patient=patient)
        self._joint_topics = [arm.joint_states for arm in arms]
        published = {
            EPISODE_TOPIC: ("std_msgs/msg/Bool", "instruction"),
            INSTRUCTION_TOPIC: (_TEXT, "instruction"),
            **dict.fromkeys(cameras, ("sensor_msgs/msg/Image", "camera")),
            **dict.fromkeys([*self._joint_topics, OBJECT_TOPIC], ("sensor_msgs/msg/JointState", "state_publisher")),
        }
        # Of the commands only the newest matters, but every action must be received.
        received = {one.topic: (message_type(one.output), "command") for one in self._drivers}
        received[ACTION_TOPIC] = ("std_msgs/msg/Float64MultiArray", "default")
        wiring = Wiring(graph, self._node)
        if tap is not None:
            kinds = {topic: kind for topic, (kind, _) in (published | received).items()}
            wiring.taps |= {topic: partial(tap.hear, topic, kind) for topic, kind in kinds.items()}
        self._publishers = {topic: wiring.publisher(kind, topic, qos) for topic, (kind, qos) in published.items()}
        hear = {driver.topic: partial(self._on_command, driver) for driver in self._drivers}
        for topic, (kind, qos) in received.items():
            wiring.subscribe(kind, topic, hear.get(topic, self._on_action), qos)
        wiring.subscribe(_TEXT, STATUS_TOPIC, lambda message: self.policy.update(message.data), "instruction")
        self.last, self._since = 0, _NEVER
        self._answers: dict[str, Command] = {}  # newest command of each driver
        self._joints: Sequence[JointState] = ()  # published last
        self._runs = False

    # The episode

    def begin(self, instruction: str, measure: Measure) -> None:
        if self.clock != LOCKSTEP:
            self._return(measure((), 0).joints)
        self.instruct(instruction)
        self._since = self.stamp(_RESET if self.clock == LOCKSTEP else 0.0)
        self.forget()
        if self.clock == LOCKSTEP:
            self._announce(runs=True)

    def _return(self, after: Sequence[JointState]) -> None:
        """Publish the arms' motion back to the start; the node would mistake a jump for a second driver."""
        ways = [end.positions - start.positions for start, end in zip(self._joints, after, strict=False)]
        ticks = int(np.ceil(max((np.abs(way).max() for way in ways), default=0.0) / (_RETURN_SPEED * _TICK)))
        for tick in range(1, ticks):
            stamp, left = self.stamp(), 1 - tick / ticks
            moving = zip(after, ways, strict=True)
            places = [(end, end.positions - left * way) for end, way in moving]
            self._publish_joints([replace(end, positions=place, stamp=stamp) for end, place in places])
            self._spin(lambda: False, _TICK)

    def instruct(self, text: str) -> None:
        """Publish the instruction; in lockstep, wait for the node to report it: a frame could overtake it."""
        self._send(INSTRUCTION_TOPIC, self._graph.message(_TEXT)(data=text))
        if self.clock == LOCKSTEP:
            self._spin(lambda: self.policy.instruction == text or self._hopeless(), self._timeout)

    def exchange(self, measure: Measure, seconds: float) -> bool:
        """Publish a frame, and wait until every driver has a command for it."""
        deadline, dropped, heard = time.monotonic() + self._timeout, self.policy.dropped, self.policy.heard
        self._answers, count = {}, len(self.actions)
        self.publish(measure(self.cameras, self.stamp(seconds)), self.last)

        def complete() -> bool:
            return len(self._answers) == len(self._drivers)

        while not self._spin(lambda: complete() or self._hopeless(), min(_RESEND, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                return False
            if self.policy.heard < heard + _SPARE:
                continue  # the node is busy: it says nothing during a step
            # The frame may be lost. If the node has dropped it, it needs another one.
            heard = self.policy.heard
            if self.policy.dropped > dropped:
                dropped = self.policy.dropped
                self.stamp(seconds)
            self.publish(measure(self.cameras, self.last), self.last)
        if not complete():
            self._check(self.policy.hopeless)
            return False
        self._spin(lambda: len(self.actions) > count, _ACTION_WAIT)
        self.actions[count:] = self.actions[count:][-1:]
        return True

    def wait(self, seconds: float) -> None:
        self._spin(lambda: False, max(_MIN_SPIN, seconds))

    def check(self, *, waited: bool) -> None:
        self._check(self.policy.stopped if self.received else self.policy.hopeless)

    def _check(self, why: str) -> None:
        if not self._alive():
            raise PolicyFailedError("the policy node exited during an episode")
        if why:
            raise PolicyFailedError(f"the policy node does not move the arm: {why}")

    def end(self) -> None:
        self._since = _NEVER
        if self._runs:
            self._announce(runs=False)

    def _hopeless(self) -> bool:
        """Return True if waiting for a command is pointless."""
        return not self._alive() or bool(self.policy.hopeless)

    # What goes out

    def stamp(self, after: float = 0.0) -> int:
        """Return the next stamp, nanoseconds: the ROS time, or the last stamp ``after`` so many seconds."""
        if self.last and after:
            self.last += round(after * _SECOND)
        else:
            self.last = max(int(self._node.get_clock().now().nanoseconds), self.last + 1)
        return self.last

    def _announce(self, *, runs: bool) -> None:
        """Publish whether an episode is running; ``vla-ros export`` can split a bag by this topic."""
        self._runs = runs
        self._send(EPISODE_TOPIC, self._graph.message("std_msgs/msg/Bool")(data=runs))

    def publish(self, measured: Measurements, stamp: int) -> None:
        """Publish all measurements, the first camera's image last: receivers infer on it and need the others.

        Without images, only the joint states are published.
        """
        self._publish_joints(measured.joints)
        if measured.images:
            for topic, state in measured.state.items():
                self._send(topic, self._joint_state(state))
        for topic, image in reversed([*measured.images.items()]):
            self._send(topic, camera_message(image, stamp, topic, self._arm))

    def _publish_joints(self, joints: Sequence[JointState]) -> None:
        self._joints = joints
        for topic, state in zip(self._joint_topics, joints, strict=True):
            self._send(topic, self._joint_state(state))

    def _joint_state(self, state: JointState) -> Any:
        positions = Command(state.names, state.positions, state.stamp)
        message = to_message(positions, "joint_state", self._graph.message)
        message.velocity = state.velocities.tolist()
        return message

    def _send(self, topic: str, message: Any) -> None:
        self._publishers[topic].publish(message)

    # What comes in

    def _on_command(self, driver: Driver, message: Any) -> None:
        command = driver.read(message, self.last)
        if command.stamp <= self._since:
            return  # of the episode before, or of none
        if not self._runs:
            self._announce(runs=True)
        self._answers[driver.topic] = command
        self.commands.append(command)
        if driver is self._drivers[0]:
            self.received.append((time.monotonic(), command))

    def _on_action(self, message: Any) -> None:
        self.actions.append(np.array(message.data, dtype=np.float64))

    def _spin(self, until: Callable[[], bool], timeout: float) -> bool:
        """Run callbacks until ``until()`` is true, for at most ``timeout`` seconds; return its result."""
        deadline, done = time.monotonic() + timeout, until()

        def ended() -> bool:
            nonlocal done
            done = until()
            return done or time.monotonic() >= deadline

        if not done:
            self._graph.spin(ended, min(0.05, max(0.001, timeout)))
        return done

    def wait_for_policy(self, timeout: float) -> None:
        """Wait until all topics of the policy node are connected; loading a large model takes minutes.

        Raises VlaRosError with the names of missing topics.
        """
        needed = [*self.cameras[:1], *self._joint_topics, INSTRUCTION_TOPIC]
        sent = (*(driver.topic for driver in self._drivers), ACTION_TOPIC)

        def missing() -> list[str]:
            unheard = [topic for topic in needed if self._publishers[topic].get_subscription_count() == 0]
            return [*unheard, *(topic for topic in sent if self._node.count_publishers(topic) == 0)]

        self._spin(lambda: not missing() or not self._alive(), timeout)
        if not self._alive():
            raise PolicyFailedError("the policy node exited before it was ready")
        if missing():
            found = f"the policy node was not ready within {timeout:g} s: no connection on {', '.join(missing())}"
            advice = "Is it running, with the same ROS_DOMAIN_ID and middleware? --start-timeout waits longer"
            raise VlaRosError(f"{found}. {advice}")
