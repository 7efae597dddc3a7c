"""What commissioning hears and does: a source of scripted actions, and the messages that come and go meanwhile."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, ArmConfig, CameraConfig, Config
from vla_ros.config.control import ENVIRONMENT
from vla_ros.config.guard import GuardConfig
from vla_ros.config.record import RecordConfig
from vla_ros.config.sections import FeaturesConfig
from vla_ros.config.takeover import TakeoverConfig
from vla_ros.contract.binding import make_arms
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.control.clock import Clock
from vla_ros.control.command import message_type
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.graph.origin import stamp_of
from vla_ros.graph.wiring import Wiring
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import ActionChunk, FloatArray, Observation
from vla_ros.vision.messages import encode_image, image_stamp
from vla_ros_lab.commission.measure import Rhythm, Track, rhythm
from vla_ros_lab.eval.graph import Driver, drivers_of

TICK = 0.02
"""Seconds between two commands."""
_TOPIC, _KEY = "/vla_policy/tick", "tick"
_NEVER = 3600.0  # s
_VELOCITY = 0.1  # s after which the node ends a velocity; the default of two periods would end it between ticks


def prepared(config: Config) -> Config:
    """Return the options with which the node commissions: limits, collisions and watchdogs stay as they are.

    Its only image is a tick of its own. Raises ConfigError if the joints of an arm cannot be moved one by one.
    """
    for arm in config.arms:
        if arm.output in ("twist_stamped", ENVIRONMENT):
            raise ConfigError(
                f"control.output: found {arm.output}, which cannot move one joint alone; commission the arm with a "
                "controller that takes joint positions or velocities"
            )
        if not arm.robot.urdf:
            raise ConfigError(
                "robot.urdf: not set; signs, units and limits are compared with the URDF (vla-ros init writes a "
                "file with it)"
            )
    named = make_arms(config)
    lacking = [name for name, arm in named.items() if not arm.config.robot.joint_names]
    robot = config.robot
    if lacking == ["arm"]:
        robot = replace(robot, joint_names=named["arm"].joints)
    elif lacking:
        raise ConfigError(
            f"{lacking[0]}.joint_names: not set; name the joints of each arm in its controller's order"
        )
    control = replace(config.control, armed=False, rate_hz=1 / TICK, command_rate_hz=0.0, schedule="sync")
    timeouts = replace(config.timeouts, camera=_NEVER, velocity=config.timeouts.velocity or _VELOCITY)
    mode = "none" if config.gripper.mode == "none" else "continuous"
    return replace(
        config,
        policy=replace(config.policy, instruction="commission"),
        robot=robot,
        camera=CameraConfig((_TOPIC,), (_KEY,), width=(1,), height=(1,)),
        control=control,
        timeouts=timeouts,
        gripper=replace(config.gripper, mode=mode),
        features=FeaturesConfig(),
        takeover=TakeoverConfig(),
        record=RecordConfig(),
        guard=GuardConfig(),
        node=replace(config.node, log_level="warn", clock="ros"),
    )


def grips(arm: ArmConfig) -> bool:
    return arm.gripper.mode != "none" and bool(arm.robot.gripper_joint_names)


def by_velocity(arm: ArmConfig) -> bool:
    return arm.output in VELOCITY_OUTPUTS


class ScriptedSource(ActionSource):
    """Proposes what :attr:`motion` returns for a time of the steady clock: per arm its joints, then its opening.

    Joints are positions, or velocities for an arm that takes velocities.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self.motion: Callable[[float], FloatArray] = lambda now: np.zeros(0)
        self._clock, self._gripper = clock, config.gripper
        parts = list[str]()
        for arm in config.arms:
            parts.append(f"{arm.name}.{'joint_velocity' if by_velocity(arm) else 'joint_position'}")
            parts += [f"{arm.name}.gripper"] if grips(arm) else []
        action = parse_components(" + ".join(parts), action=True)
        self.spec = PolicySpec((ImageFeature(_KEY),), (), action, dimension=0, rate_hz=1 / TICK)

    def load(self, progress: Progress = no_progress) -> None:
        progress(1.0, "nothing to load")  # ends the bar on a terminal

    def infer(self, observation: Observation) -> ActionChunk:
        return ActionChunk(self.motion(self._clock.steady())[None], observation.stamp)


@dataclass(frozen=True)
class Sample:
    """One position of a joint as it arrived."""

    arrived: float  # steady clock, s
    stamp: float  # s of the publisher's clock; 0 if there is none
    position: float


class Heard:
    """All messages since :meth:`listen`: joint states, commands and the cameras' times.

    Attributes:
        joints: Samples by arm and joint.
        commands: By arm and joint, when (steady clock, s) and which position or velocity was sent.
        times: By topic, arrivals and stamps.
    """

    def __init__(self, config: Config, cameras: CameraConfig, clock: Clock) -> None:
        self.joints: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        self.commands: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._config, self._cameras, self._clock = config, cameras, clock
        self._tick: Any = None
        self._node: Any = None

    def listen(self, wiring: Wiring) -> None:
        """Tap what the node hears and sends, and hear the cameras; call it before the node is configured."""
        make, name = wiring.graph.message, wiring.node.resolve_topic_name
        self._node, read = wiring.node, wiring.graph.deserialize
        for topic in dict.fromkeys(arm.joint_states for arm in self._config.arms):
            arms = [arm for arm in self._config.arms if arm.joint_states == topic]

            def hear(data: Any, _: int, topic: str = topic, arms: list[ArmConfig] = arms) -> None:
                self._on_joints(topic, arms, read(data, make("sensor_msgs/msg/JointState")))

            wiring.taps[name(topic)] = hear
        for arm in self._config.arms:
            for driver in drivers_of([arm]):

                def sent(data: Any, _: int, arm: str = arm.name, driver: Driver = driver) -> None:
                    self._on_command(arm, driver, read(data, make(message_type(driver.output))))

                wiring.taps[name(driver.topic)] = sent
        kind = f"sensor_msgs/msg/{'Image' if self._cameras.transport == 'raw' else 'CompressedImage'}"
        for topic in self._cameras.topics:

            def seen(data: Any, _: Any, topic: str = topic) -> None:
                self.times[topic].append((self._clock.steady(), image_stamp(data) / 1e9))

            wiring.subscribe_raw(kind, topic, seen, "camera")
        self._tick = wiring.publisher("sensor_msgs/msg/Image", _TOPIC, "camera")

    def tick(self) -> None:
        """Ask the source for its next action."""
        stamp = int(self._node.get_clock().now().nanoseconds)
        self._tick.publish(encode_image(np.zeros((1, 1, 3), np.uint8), stamp, _KEY))

    def _on_joints(self, topic: str, arms: list[ArmConfig], message: Any) -> None:
        now, stamp = self._clock.steady(), stamp_of(message) / 1e9
        if any(set(arm.robot.joint_names) & set(message.name) for arm in arms):  # not another driver's fingers
            self.times[topic].append((now, stamp))
        for arm in arms:
            for name, position in zip(message.name, message.position, strict=False):
                self.joints[arm.name, name].append(Sample(now, stamp, float(position)))

    def _on_command(self, arm: str, driver: Driver, message: Any) -> None:
        now, command = self._clock.steady(), driver.read(message, 0)
        named: Mapping[str, float] = command.velocities or dict(
            zip(command.names, command.positions.tolist(), strict=True)
        )
        for name, value in named.items():
            self.commands[arm, name].append((now, value))

    def rhythm(self, topic: str, since: float) -> Rhythm:
        """Return the rhythm of a topic's messages since a time; ages are on the system's clock."""
        rows = np.array([row for row in self.times[topic] if row[0] >= since]).reshape(-1, 2)
        found, ahead = rhythm(rows[:, 0], rows[:, 1]), self._clock.ros() / 1e9 - self._clock.steady()
        return replace(found, age=found.age + ahead)

    def measured(self, arm: str, joint: str, since: float) -> Track:
        """Return a joint's track since a time; stamps remove the jitter of the transport, not its mean."""
        heard = self.joints[arm, joint]
        samples = heard[bisect_left(heard, since, key=attrgetter("arrived")) :]
        times = np.array([each.arrived for each in samples])
        stamps = np.array([each.stamp for each in samples])
        if len(samples) and stamps.all() and np.all(np.diff(stamps) > 0):
            times = stamps + float(np.median(times - stamps))
        return Track(times, np.array([each.position for each in samples]))

    def commanded(self, arm: str, joint: str, since: float) -> Track:
        """Return what was sent to a joint since a time; velocities as the positions that they lead to."""
        rows = np.array([row for row in self.commands[arm, joint] if row[0] >= since]).reshape(-1, 2)
        times, values = rows[:, 0], rows[:, 1]
        if len(rows) and by_velocity(next(each for each in self._config.arms if each.name == arm)):
            # With what is in force until the next command; a finer grid, so that the steps are as small as ticks.
            fine = np.arange(times[0], times[-1] + TICK, TICK)
            held = values[np.maximum(np.searchsorted(times, fine, side="right") - 1, 0)]
            return Track(fine, np.concatenate([[0.0], np.cumsum(held[:-1] * TICK)]))
        return Track(times, values)

    def now(self, arm: str, joint: str) -> float:
        """Return the newest position of a joint; NaN before the first."""
        samples = self.joints[arm, joint]
        return samples[-1].position if samples else math.nan
