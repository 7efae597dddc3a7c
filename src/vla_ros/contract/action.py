"""Writes the action that moves the robot from one state to another, as a policy would.

The action has the policy's units and order. This is the inverse of :mod:`vla_ros.control`; it turns recorded
commands into training data and references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vla_ros.config import ControlConfig
from vla_ros.contract.parts import CLIPPED, Part
from vla_ros.contract.spec import StateFeature
from vla_ros.contract.state import Arm, Measured, StateError, StateReader, arm_of, bind_state
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import write_rotation
from vla_ros.types import FloatArray, JointState

Write = Callable[[JointState, JointState, float], FloatArray]
"""Maps two joint states and the seconds between them to the numbers of one part."""


class ActionWriter:
    """Writes the actions, made of ``parts``, that lead from one joint state to another.

    Attributes:
        dimension: D, numbers in one action.

    Raises:
        ConfigError: A part needs something that the robot does not have.
    """

    def __init__(self, parts: Sequence[Part], arms: Mapping[str, Arm], control: ControlConfig) -> None:
        self._parts, self._readers = list[tuple[int, Write]](), list[StateReader]()
        for part in parts:
            write = _writer(part, arms, control, self._readers)
            self._parts.append((part.size(len(arms[part.arm].joints) if part.arm else 0), write))
        self.dimension = sum(size for size, _ in self._parts)

    def begin(self) -> None:
        """Begin an episode, in which rotations are continuous."""
        for reader in self._readers:
            reader.begin()

    def write(self, start: JointState, goal: JointState, seconds: float) -> FloatArray:
        """Return the action, float64 [D].

        Values are NaN for parts whose joints are missing in ``goal`` or, for relative parts, in ``start``, and for
        a gripper without finger joints (``robot.gripper_joint_names``).
        """

        def numbers(size: int, write: Write) -> FloatArray:
            try:
                return write(start, goal, seconds)
            except (StateError, KeyError):
                return np.full(size, np.nan)

        return np.concatenate([numbers(*part) for part in self._parts])


def _writer(part: Part, arms: Mapping[str, Arm], control: ControlConfig, readers: list[StateReader]) -> Write:
    """Return the writer of a part; readers of absolute parts are added to ``readers``."""
    if part.quantity in ("joint_delta", "joint_velocity"):
        return _difference(part, arm_of(part, arms, "the action"), control)
    if part.quantity == "tip_delta":
        return _tip_delta(part, arm_of(part, arms, "the action"), control)
    closed, span = 0.0, 1.0
    if part.quantity == "gripper":
        arm = arm_of(part, arms, "the action")
        if not arm.fingers:
            return lambda start, goal, seconds: np.full(1, np.nan)
        if not part.form:  # gripper.open_value and closed_value define the range
            part, gripper = Part(part.arm, "gripper", "0..1"), arm.config.gripper
            closed, span = gripper.closed_value, gripper.open_value - gripper.closed_value
        # Commands are positions of the commanded joints.
        own = replace(arm.config, gripper=replace(arm.config.gripper, measured_by=""))
        part, arms = replace(part, choice=CLIPPED), {part.arm: replace(arm, config=own)}
    reader = bind_state(StateFeature("action", (part,)), arms, {})
    readers.append(reader)
    return lambda start, goal, seconds: closed + span * reader.read(Measured(goal), goal.stamp, 0.0)


def velocity_scale(control: ControlConfig, limits: FloatArray) -> FloatArray:
    """Return the velocity [N] of each joint at 1 in ``joint_velocity[1]``, given the velocity limits [N]."""
    return np.full(len(limits), control.joint_velocity_scale) if control.joint_velocity_scale else limits.copy()


def _difference(part: Part, arm: Arm, control: ControlConfig) -> Write:
    """Return a writer of the change of joint positions, per step or per second, in the part's unit."""
    factor: FloatArray | float = 180 / np.pi if part.form.startswith("deg") else 1.0
    if part.form == "1":
        if arm.kinematics is None or not np.isfinite(arm.kinematics.velocity_limits).all():
            raise ConfigError(f"robot.urdf: the action has {part}, but the URDF lacks velocity limits")
        factor = 1 / velocity_scale(control, arm.kinematics.velocity_limits)

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        change = (goal.select(arm.joints) - start.select(arm.joints)) * factor
        return change / seconds if part.quantity == "joint_velocity" else change

    return write


def _tip_delta(part: Part, arm: Arm, control: ControlConfig) -> Write:
    kinematics = arm.kinematics
    if kinematics is None:
        raise ConfigError(f"robot.urdf: not set, but the action has {part}, which needs kinematics")

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        a, b = kinematics.forward(start.select(arm.joints)), kinematics.forward(goal.select(arm.joints))
        moved, turned = b.position - a.position, b.rotation @ a.rotation.T
        if control.delta_frame == "tip":
            moved, turned = a.rotation.T @ moved, a.rotation.T @ b.rotation
        angles = write_rotation(turned, part.form or control.rotation)
        return np.concatenate((moved / control.translation_scale, angles / control.rotation_scale))

    return write
