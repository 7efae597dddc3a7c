"""What commissioning proposes and hears: a source of scripted actions, and the messages that come and go."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from vla_ros.control.measured import joint_speeds
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.graph.origin import stamp_of
from vla_ros.graph.wiring import Wiring
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import ActionChunk, FloatArray, Observation
from vla_ros.vision.messages import IMAGE_TYPES, encode_image, image_stamp
from vla_ros_lab.commission.measure import Rhythm, Track, rhythm
from vla_ros_lab.eval.graph import Driver, drivers_of

TICK = 0.02
"""Seconds between two commands."""
_TOPIC, _KEY = "/vla_policy/tick", "tick"
_NEVER, _VELOCITY = 3600.0, 0.1  # s; no image is stale; a velocity ends, and not between two ticks
_SLIDES = 0.2  # m per rad: way, speed and tolerance of a sliding joint, compared with one that turns


@dataclass(frozen=True)
class MovedJoint:
    """A joint of an arm, with what the URDF says of it."""

    arm: str
    name: str
    low: float  # rad or m
    high: float
    fastest: float  # rad/s or m/s
    slides: bool
    axis: str
    by_velocity: bool  # its commands are velocities

    def __str__(self) -> str:
        return self.name if self.arm == "arm" else f"{self.arm} {self.name}"

    @property
    def scale(self) -> float:
        return _SLIDES if self.slides else 1.0

    @property
    def key(self) -> tuple[str, str]:
        return self.arm, self.name


def prepared(config: Config) -> Config:
    """Return the options with which the node commissions: limits, collisions and watchdogs stay as they are.

    Its only image is a tick of its own. Raises ConfigError if the joints of an arm cannot be moved one by one.
    """
    for arm in config.arms:
        if arm.output in ("twist_stamped", ENVIRONMENT):
            raise ConfigError(f"control.output: found {arm.output}, which cannot move one joint alone")
        if not arm.robot.urdf or (config.robot.arms and not arm.robot.joint_names):
            raise ConfigError("robot.urdf, robot.joint_names: expected both (`vla-ros init` writes them)")
    chain = None if config.robot.arms else make_arms(config)["arm"].joints
    velocity = config.timeouts.velocity or _VELOCITY
    mode = "none" if config.gripper.mode == "none" else "continuous"
    return replace(
        config,
        policy=replace(config.policy, instruction="commission"),
        robot=replace(config.robot, joint_names=chain) if chain else config.robot,
        camera=CameraConfig((_TOPIC,), (_KEY,), width=(1,), height=(1,)),
        control=replace(config.control, armed=False, rate_hz=1 / TICK, command_rate_hz=0.0, schedule="sync"),
        timeouts=replace(config.timeouts, camera=_NEVER, velocity=velocity),
        gripper=replace(config.gripper, mode=mode),
        features=FeaturesConfig(),
        takeover=TakeoverConfig(),
        record=RecordConfig(),
        guard=GuardConfig(),
        node=replace(config.node, log_level="warn", clock="ros"),
    )


def joints_of(config: Config) -> list[MovedJoint]:
    """Return the joints of all arms in command order."""
    found = []
    for name, arm in make_arms(config).items():
        assert arm.kinematics is not None
        for index, joint in enumerate(arm.joints):
            axis = arm.kinematics.description.elements[joint].find("axis")
            low, high = float(arm.kinematics.position_low[index]), float(arm.kinematics.position_high[index])
            slides, by_velocity = bool(arm.kinematics.is_prismatic[index]), arm.config.output in VELOCITY_OUTPUTS
            named = "1 0 0" if axis is None else axis.get("xyz", "")
            fastest = joint_speeds(arm.config, arm.joints, arm.kinematics)[joint]
            found.append(MovedJoint(name, joint, low, high, fastest, slides, named, by_velocity))
    return found


def grips(arm: ArmConfig) -> bool:
    return arm.gripper.mode != "none" and bool(arm.robot.gripper_joint_names)


class ScriptedSource(ActionSource):
    """Proposes what ``motion`` returns for a time of the steady clock: per arm its joints, then its opening.

    Joints are positions, or velocities for an arm that takes velocities.
    """

    def __init__(self, config: Config, clock: Clock, motion: Callable[[float], FloatArray]) -> None:
        self._clock, self._motion = clock, motion
        parts = list[str]()
        for arm in config.arms:
            parts.append(f"{arm.name}.joint_{'velocity' if arm.output in VELOCITY_OUTPUTS else 'position'}")
            parts += [f"{arm.name}.gripper"] if grips(arm) else []
        action = parse_components(" + ".join(parts), action=True)
        self.spec = PolicySpec((ImageFeature(_KEY),), (), action, dimension=0, rate_hz=1 / TICK)

    def load(self, progress: Progress = no_progress) -> None:
        progress(1.0, "nothing to load")  # ends the bar on a terminal

    def infer(self, observation: Observation) -> ActionChunk:
        return ActionChunk(self._motion(self._clock.steady())[None], observation.stamp)


class Heard:
    """All messages since :meth:`listen`, with the steady clock's time.

    Attributes:
        joints: By arm and joint: arrival, stamp (s of the publisher's clock, 0 if none) and position.
        commands: By arm and joint: when which position or velocity was sent.
        times: By topic: arrivals and stamps.
    """

    def __init__(self, config: Config, cameras: CameraConfig, clock: Clock) -> None:
        self.joints: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
        self.commands: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._config, self._cameras, self._clock = config, cameras, clock
        self.tick: Callable[[], None] = lambda: None  # asks the source for its next action

    def listen(self, wiring: Wiring) -> None:
        """Tap what the node hears and sends, and hear the cameras; call it before the node is configured."""
        name, arms = wiring.node.resolve_topic_name, self._config.arms

        def tap(topic: str, kind: str, hear: Callable[[Any], None]) -> None:
            cls = wiring.graph.message(kind)
            wiring.taps[name(topic)] = lambda data, _: hear(wiring.graph.deserialize(data, cls))

        for topic in dict.fromkeys(arm.joint_states for arm in arms):
            own = [arm for arm in arms if arm.joint_states == topic]
            tap(topic, "sensor_msgs/msg/JointState", partial(self._on_joints, topic, own))
        for arm in arms:
            for driver in drivers_of([arm]):
                tap(driver.topic, message_type(driver.output), partial(self._on_command, arm.name, driver))
        for topic in self._cameras.topics:
            wiring.subscribe_raw(
                IMAGE_TYPES[self._cameras.transport], topic, partial(self._on_image, topic), "camera"
            )
        tick = wiring.publisher(IMAGE_TYPES["raw"], _TOPIC, "camera")
        black = np.zeros((1, 1, 3), np.uint8)
        self.tick = lambda: tick.publish(encode_image(black, self._clock.ros(), _KEY))

    def _on_image(self, topic: str, data: Any, _: Any) -> None:
        self.times[topic].append((self._clock.steady(), image_stamp(data) / 1e9))

    def _on_joints(self, topic: str, arms: Sequence[ArmConfig], message: Any) -> None:
        now, stamp = self._clock.steady(), stamp_of(message) / 1e9
        if any(set(arm.robot.joint_names) & set(message.name) for arm in arms):  # not another driver's fingers
            self.times[topic].append((now, stamp))
        for arm in arms:
            for name, position in zip(message.name, message.position, strict=False):
                self.joints[arm.name, name].append((now, stamp, float(position)))

    def _on_command(self, arm: str, driver: Driver, message: Any) -> None:
        now, command = self._clock.steady(), driver.read(message, 0)
        named = command.velocities or dict(zip(command.names, command.positions.tolist(), strict=True))
        for name, value in named.items():
            self.commands[arm, name].append((now, value))

    def rhythm(self, topic: str, since: float) -> Rhythm:
        """Return the rhythm of a topic's messages since a time; ages are on the system's clock."""
        rows = np.array([row for row in self.times[topic] if row[0] >= since]).reshape(-1, 2)
        found, ahead = rhythm(rows[:, 0], rows[:, 1]), self._clock.ros() / 1e9 - self._clock.steady()
        return replace(found, age=found.age + ahead)

    def measured(self, key: tuple[str, str], since: float) -> Track:
        """Return a joint's track since a time; stamps remove the jitter of the transport, not its mean."""
        rows = np.array(self.joints[key][bisect_left(self.joints[key], (since,)) :]).reshape(-1, 3)
        times, stamps, positions = rows.T
        if len(rows) and stamps.all() and np.all(np.diff(stamps) > 0):
            times = stamps + np.median(times - stamps)
        return Track(times, positions)

    def commanded(self, joint: MovedJoint, since: float) -> Track:
        """Return what was sent to a joint since a time; velocities as the way that they lead to."""
        rows = np.array([row for row in self.commands[joint.key] if row[0] >= since]).reshape(-1, 2)
        times, values = rows[:, 0], rows[:, 1]
        if not joint.by_velocity or not len(rows):
            return Track(times, values)
        fine = np.arange(times[0], times[-1] + TICK, TICK)
        held = values[np.maximum(np.searchsorted(times, fine, side="right") - 1, 0)]
        return Track(fine, np.concatenate([[0.0], np.cumsum(held[:-1] * TICK)]))

    def now(self, key: tuple[str, str]) -> float:
        """Return the newest position of a joint; NaN before the first."""
        return self.joints[key][-1][2] if self.joints[key] else math.nan
