"""Writes actions in a policy's own numbers: the action that would have moved the robot to a given state.

This is the inverse of what :mod:`vla_ros.control` does; it turns recorded commands into training data and
references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vla_ros.config import ControlConfig
from vla_ros.contract.parts import UNUSED, Part
from vla_ros.contract.spec import StateFeature
from vla_ros.contract.state import Arm, Measured, StateError, bind_state
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import write_rotation
from vla_ros.types import FloatArray, JointState

Write = Callable[[JointState, JointState, float], FloatArray]
"""From a joint state to another in so many seconds: the numbers of one part."""


class ActionWriter:
    """Writes the actions, made of ``parts``, that lead from one joint state to another.

    Raises ConfigError if a part needs something that the robot does not have.
    """

    def __init__(self, parts: Sequence[Part], arms: Mapping[str, Arm], control: ControlConfig) -> None:
        self._parts = [(_size(part, arms), _writer(part, arms, control)) for part in parts]

    @property
    def dimension(self) -> int:
        """D, numbers in one action."""
        return sum(size for size, _ in self._parts)

    def write(self, start: JointState, goal: JointState, seconds: float) -> FloatArray:
        """Return the action, float64 [D].

        NaN for parts whose joints are missing in ``goal`` (of relative parts, in ``start``), and for a gripper
        without finger joints (``robot.gripper_joint_names``).
        """
        return np.concatenate([_written(size, write, start, goal, seconds) for size, write in self._parts])


def _written(size: int, write: Write, start: JointState, goal: JointState, seconds: float) -> FloatArray:
    try:
        return write(start, goal, seconds)
    except (StateError, KeyError):
        return np.full(size, np.nan)


def _arm(part: Part, arms: Mapping[str, Arm]) -> Arm:
    if part.arm not in arms:
        raise ConfigError(f"robot.arms: the action has {part}, but the robot has the arms {', '.join(arms)}")
    return arms[part.arm]


def _size(part: Part, arms: Mapping[str, Arm]) -> int:
    return part.count if part.quantity == UNUSED else part.size(len(_arm(part, arms).joints))


def _writer(part: Part, arms: Mapping[str, Arm], control: ControlConfig) -> Write:
    if part.quantity == UNUSED:
        return lambda start, goal, seconds: np.zeros(part.count)
    arm = _arm(part, arms)
    if part.quantity == "gripper" and not arm.fingers:
        return lambda start, goal, seconds: np.full(1, np.nan)
    if part.quantity == "gripper" and not part.form:
        return _gripper(arm)
    if part.quantity == "joint_delta":
        return _difference(part, arm, arms, lambda seconds: 1.0)
    if part.quantity == "joint_velocity":
        return _difference(part, arm, arms, lambda seconds: 1 / seconds)
    if part.quantity == "tip_delta":
        return _tip_delta(part, arm, control)
    reader = bind_state(StateFeature("action", (part,)), arms, {})
    return lambda start, goal, seconds: reader.read(Measured(goal), goal.stamp, 0.0)


def _gripper(arm: Arm) -> Write:
    """Follow the convention of ``gripper.open_value`` and ``gripper.closed_value``."""
    gripper = arm.config.gripper
    opening = bind_state(
        StateFeature("action", (Part(arm.config.name, "gripper", "0..1"),)), {arm.config.name: arm}, {}
    )

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        share = opening.read(Measured(goal), goal.stamp, 0.0)
        return gripper.closed_value + share * (gripper.open_value - gripper.closed_value)

    return write


def _difference(part: Part, arm: Arm, arms: Mapping[str, Arm], rate: Callable[[float], float]) -> Write:
    """Return the change of joint positions, per step or per second, in the part's unit."""
    factor: FloatArray | float = 180 / np.pi if part.form.startswith("deg") else 1.0
    if part.form == "1":
        if arm.kinematics is None or not np.isfinite(arm.kinematics.velocity_limits).all():
            raise ConfigError(f"robot.urdf: the action has {part}, whose scale is the URDF's velocity limits")
        factor = 1 / arm.kinematics.velocity_limits

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        return (goal.select(arm.joints) - start.select(arm.joints)) * rate(seconds) * factor

    return write


def _tip_delta(part: Part, arm: Arm, control: ControlConfig) -> Write:
    kinematics = arm.kinematics
    if kinematics is None:
        raise ConfigError(f"robot.urdf is not set, and the action has {part}")

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        a, b = kinematics.forward(start.select(arm.joints)), kinematics.forward(goal.select(arm.joints))
        moved, turned = b.position - a.position, b.rotation @ a.rotation.T
        if control.delta_frame == "tip":
            moved, turned = a.rotation.T @ moved, a.rotation.T @ b.rotation
        angles = write_rotation(turned, part.form or control.rotation)
        return np.concatenate((moved / control.translation_scale, angles / control.rotation_scale))

    return write
