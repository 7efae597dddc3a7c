"""A person as a source of actions: the messages of leader arm, pad or controller, as actions for the arms."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig, Config, LiveConfig
from vla_ros.config.control import ENVIRONMENT
from vla_ros.config.takeover import PERSON_RATE_HZ, LeaderJoint
from vla_ros.contract.components import Component
from vla_ros.contract.spec import PolicySpec
from vla_ros.contract.state import Arm
from vla_ros.control.clock import Clock
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.graph.origin import Origin, stamp_of
from vla_ros.kinematics.solver import Kinematics
from vla_ros.person.devices import (
    QUATERNION,
    Buttons,
    FollowedTopic,
    Leader,
    PoseInput,
    VelocityInput,
    move_gripper,
)
from vla_ros.types import ActionChunk, FloatArray, Observation

OPENING = ".opening"
"""Suffix of the state with an arm's opening, beside the state with its positions."""

_TYPES = {
    "leader": "sensor_msgs/msg/JointState",
    "twist": "geometry_msgs/msg/Twist",
    "twist_stamped": "geometry_msgs/msg/TwistStamped",
    "pose": "geometry_msgs/msg/PoseStamped",
}


@dataclass(frozen=True, eq=False)
class _LeaderReader:
    """Reads a leader's joint states as the positions of the arm that it leads, and the opening."""

    joints: tuple[LeaderJoint, ...]  # in the order of the arm
    gripper: tuple[str, float, float] | None  # joint, closed, open

    def read(self, message: Any) -> tuple[FloatArray, str]:
        """Return positions [N] and, with a gripper, the opening; or why there are none."""
        names, positions = tuple(message.name), message.position
        wanted = [*(joint.leader for joint in self.joints), *([self.gripper[0]] if self.gripper else [])]
        lacking = [name for name in wanted if names.count(name) != 1]
        if lacking or len(names) != len(positions):
            return np.zeros(0), f"expected each of {', '.join(lacking or wanted)} once, found {', '.join(names)}"
        at = {name: float(position) for name, position in zip(names, positions, strict=True)}
        numbers = [joint.scale * at[joint.leader] + joint.zero for joint in self.joints]
        if self.gripper:
            name, closed, opened = self.gripper
            numbers.append((at[name] - closed) / (opened - closed))
        return np.array(numbers), ""

    def target(self, here: FloatArray, opening: float) -> tuple[list[str], list[float]]:
        """Return the leader's joints, and their positions when the arm is at ``here`` [N]."""
        numbers = {
            joint.leader: (position - joint.zero) / joint.scale
            for joint, position in zip(self.joints, here.tolist(), strict=True)
        }
        if self.gripper:
            name, closed, opened = self.gripper
            numbers[name] = closed + opening * (opened - closed)
        return list(numbers), list(numbers.values())


@dataclass(frozen=True, eq=False)
class _ArmInput:
    """What moves one arm: its input, or None for an arm that stays where it is."""

    name: str
    parts: tuple[Component, ...]
    device: Leader | VelocityInput | PoseInput | None = None
    reader: _LeaderReader | None = None  # of a Leader
    kinematics: Kinematics | None = None  # of a PoseInput


class PersonSource(ActionSource):
    """A person's input as actions of one step each. An arm without an input stays where it is.

    Any thread may call the methods of :attr:`buttons`, and the callbacks of :meth:`followed_topics`.

    Args:
        options: The node's options.
        clock: Measures for how long an input has been silent.
        arms: The robot's arms.
        policy: The policy's controller; a person commands the same fingers.

    Raises:
        ConfigError: The input does not fit the robot.
    """

    def __init__(self, options: LiveConfig, clock: Clock, arms: Mapping[str, Arm], policy: RobotController) -> None:
        self._options, self._clock = options, clock
        config = options.current
        self.input, self.buttons = config.takeover.input, Buttons(options)
        led = config.takeover.arm or config.arms[0].name
        fingers = {arm.name: len(arm.names) > len(arm.joint_names) for arm in policy.arms}
        self._arms = [self._input_of(arms[arm.name], arm, led, fingers[arm.name]) for arm in config.arms]
        counts = {name: len(arm.joints) for name, arm in arms.items()}
        action = tuple(part for arm in self._arms for part in arm.parts)
        dimension = sum(part.size(counts[part.arm]) for part in action)
        self.spec = PolicySpec(images=(), action=action, dimension=dimension)
        self.reset()

    def _input_of(self, arm: Arm, config: ArmConfig, led: str, fingers: bool) -> _ArmInput:
        takeover, name, kind = self._options.current.takeover, config.name, self.input
        if config.output == ENVIRONMENT:
            raise ConfigError("takeover.input: nobody takes over an environment; set it to none")
        grip = (Component(name, "gripper", "0..1"),) if fingers else ()
        still = (
            Component(name, "joint_position", "rad") if arm.joints else Component(name, "tip_delta", "euler_xyz")
        )
        if kind == "leader" and config.leader:
            reader = _LeaderReader(
                _leader_joints(takeover.parsed_joints, arm.joints, name), _gripper(takeover.gauge, fingers)
            )
            leader = Leader(
                FollowedTopic(config.leader, len(arm.joints)),
                arm.joints,
                self.buttons,
                has_gripper=reader.gripper is not None,
            )
            return _ArmInput(name, (still, *grip), leader, reader)
        if kind in ("none", "leader") or name != led:
            return _ArmInput(name, (still, *grip))
        if kind == "pose":
            if arm.kinematics is None:
                raise ConfigError(f"takeover.input: found pose, which needs the URDF of '{name}'")
            parts = Component(name, "tip_position", "m"), Component(name, "tip_rotation", QUATERNION)
            pose = PoseInput(FollowedTopic(takeover.topic), self.buttons)
            return _ArmInput(name, (*parts, *grip), pose, None, arm.kinematics)
        if arm.kinematics is None and config.output != "twist_stamped":
            raise ConfigError(f"takeover.input: found {kind}, which needs the URDF of '{name}'")
        velocity = VelocityInput(None if kind == "joy" else FollowedTopic(takeover.topic), self.buttons)
        return _ArmInput(name, (Component(name, "tip_delta", "rotation_vector"), *grip), velocity)

    # Any thread

    def followed_topics(self) -> Iterator[tuple[str, str, FollowedTopic, _LeaderReader | None]]:
        """Yield message type, topic name and followed topic of each input besides the Joy."""
        for arm in self._arms:
            if arm.device is not None and arm.device.followed is not None:
                yield _TYPES[self.input], arm.device.followed.topic, arm.device.followed, arm.reader

    def describe(self) -> str:
        """Return what a person moves with which topics, joints, axes and buttons, one line each."""
        takeover, lines = self._options.current.takeover, []
        for arm in self._arms:
            if arm.device is None:
                continue
            topic, what = takeover.joy, f"the tip of '{arm.name}', at most {takeover.linear_speed:g} m/s"
            if arm.device.followed is not None:
                topic = arm.device.followed.topic
            if arm.reader is not None:
                mapped = [f"{one.name} = {one.scale:g} * {one.leader} {one.zero:+g}" for one in arm.reader.joints]
                if arm.reader.gripper:
                    mapped.append("gripper by {}, closed at {:g}, open at {:g}".format(*arm.reader.gripper))
                what = f"'{arm.name}': {', '.join(mapped)}"
            lines.append(f"takeover: {topic} ({self.input}) moves {what}")
        more = {"axes": takeover.axes, "buttons": takeover.buttons}
        lines += [
            f"takeover: {leaf} of {takeover.joy}: {', '.join(found)}" for leaf, found in more.items() if found
        ]
        return "\n".join(lines) or "takeover: nothing to take over with (takeover.input is none)"

    def begin(self) -> None:
        """Follow the publishers of the next messages, and no others."""
        self.buttons.followed.begin()
        for _, _, followed, _ in self.followed_topics():
            followed.begin()

    def hear(self, message: Any, followed: FollowedTopic, reader: _LeaderReader | None, origin: Origin) -> None:
        """Take a message of one of :meth:`followed_topics`."""
        numbers, wrong = reader.read(message) if reader else self._read(message)
        stamp = stamp_of(message) if hasattr(message, "header") else 0
        followed.hear(numbers, self._clock.steady(), origin.publisher, stamp, wrong, origin.published)

    def _read(self, message: Any) -> tuple[FloatArray, str]:
        """Return the numbers of a twist [6] or a pose [7], or why there are none."""
        config = self._options.current
        if hasattr(message, "header"):
            own = next(arm for arm in config.arms if arm.name == (config.takeover.arm or config.arms[0].name))
            frame, expected = message.header.frame_id, own.robot.base_frame
            if self.input == "twist_stamped" and frame and expected and frame != expected:
                return np.zeros(0), f"its frame is {frame}, expected {expected} (robot.base_frame)"
        if self.input == "pose":
            at, turned = message.pose.position, message.pose.orientation
            return np.array([at.x, at.y, at.z, turned.x, turned.y, turned.z, turned.w]), ""
        twist = message.twist if hasattr(message, "twist") else message
        linear, angular = twist.linear, twist.angular
        return np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z]), ""

    # The control thread

    def reset(self) -> None:
        """A leader must be brought to the arm again, a pose is relative to the next one."""
        self._still: dict[str, FloatArray] = {}
        for arm in self._arms:
            if arm.device is not None:
                arm.device.reset()

    def infer(self, observation: Observation) -> ActionChunk:
        """Return the person's step; ``observation.state`` has where each arm's next command starts.

        Raises Refused with a reason of :data:`~vla_ros.control.reasons.OF_PERSON`.
        """
        if self.input == "none":
            raise Refused(Reason.PERSON_STALE, "takeover.input is none: nothing is there to correct with")
        numbers = [self._numbers(arm, observation.state) for arm in self._arms]
        return ActionChunk(np.concatenate(numbers)[np.newaxis], observation.stamp)

    def _numbers(self, arm: _ArmInput, state: Mapping[str, FloatArray]) -> FloatArray:
        takeover, now = self._options.current.takeover, self._clock.steady()
        here, opening = state[arm.name], float(state[arm.name + OPENING][0])
        device = arm.device
        if device is None:
            motion = self._still.setdefault(arm.name, here) if len(here) else np.zeros(6)
        elif isinstance(device, Leader):
            motion, opening = device.action(now, here, opening, takeover)
        elif isinstance(device, VelocityInput):
            motion = device.action(now, takeover)
        else:
            assert arm.kinematics is not None
            motion = device.action(now, arm.kinematics.forward(here), takeover)
        if device is not None:
            opening = move_gripper(opening, self.buttons, now, takeover)
        grip = [opening] if any(part.quantity == "gripper" for part in arm.parts) else []
        return np.concatenate([motion, grip])

    def targets(self, state: Mapping[str, FloatArray]) -> Iterator[tuple[list[str], list[float]]]:
        """Yield the joints of each leader arm, and the positions at which it matches the arm."""
        for arm in self._arms:
            if arm.reader is not None:
                yield arm.reader.target(state[arm.name], float(state[arm.name + OPENING][0]))


def person_config(config: Config) -> Config:
    """Return the options with which a person's actions are executed, within the limits of the policy's.

    Limits of a step of the tip hold for the policy's step; a person's, which is shorter, gets its share.
    """
    control, limits, takeover = config.control, config.limits, config.takeover
    share = min(1.0, max(control.rate_hz, 1.0) / PERSON_RATE_HZ)
    speeds = (limits.max_joint_velocity or math.inf, takeover.max_joint_speed)
    return replace(
        config,
        control=replace(
            control, rate_hz=PERSON_RATE_HZ, delta_from="commanded", delta_form="step", clip="none",
            rotation="rotation_vector", translation_scale=1.0, rotation_scale=1.0,
            delta_frame=takeover.frame if takeover.input == "joy" else "base", schedule="sync", execute_steps=0,
        ),
        gripper=replace(config.gripper, mode="none" if config.gripper.mode == "none" else "continuous"),
        limits=replace(
            limits, max_joint_velocity=min(speeds), max_translation_step=share * limits.max_translation_step,
            max_rotation_step=share * limits.max_rotation_step,
        ),
    )  # fmt: skip


def _leader_joints(mapped: Sequence[LeaderJoint], joints: Sequence[str], arm: str) -> tuple[LeaderJoint, ...]:
    """Return the leader's joint of each of the arm's, in its order."""
    known = {joint.name: joint for joint in mapped} or {name: LeaderJoint(name, name, 1.0, 0.0) for name in joints}
    lacking, unknown = [name for name in joints if name not in known], sorted(known.keys() - set(joints))
    if lacking or unknown or not joints:
        raise ConfigError(
            f"takeover.joints: found {', '.join(known) or 'none'}, expected each joint of '{arm}' once: "
            f"{', '.join(joints) or 'robot.joint_names is not set'}"
        )
    return tuple(known[name] for name in joints)


def _gripper(gauge: Any, fingers: bool) -> tuple[str, float, float] | None:
    return (gauge.joint, gauge.closed, gauge.open) if gauge and fingers else None
