"""Writes the action that moves the robot from one state to another, as a policy would.

The action has the policy's units and order. This is the inverse of :mod:`vla_ros.control`; it turns recorded
commands into training data and references.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vla_ros.config import ControlConfig
from vla_ros.contract.components import CLIPPED, Component
from vla_ros.contract.spec import StateFeature
from vla_ros.contract.state import Arm, Measured, StateError, StateReader, arm_of, bind_state
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import write_rotation
from vla_ros.types import FloatArray, JointState

Write = Callable[[JointState, JointState, float], FloatArray]
"""Maps two joint states and the seconds between them to the numbers of one component."""


class ActionWriter:
    """Writes the actions, made of ``components``, that lead from one joint state to another.

    Attributes:
        dimension: D, numbers in one action.

    Raises:
        ConfigError: A component needs something that the robot does not have.
    """

    def __init__(self, components: Sequence[Component], arms: Mapping[str, Arm], control: ControlConfig) -> None:
        self._components, self._readers = list[tuple[int, Write]](), list[StateReader]()
        for component in components:
            write = _writer(component, arms, control, self._readers)
            self._components.append(
                (component.size(len(arms[component.arm].joints) if component.arm else 0), write)
            )
        self.dimension = sum(size for size, _ in self._components)

    def begin_task(self) -> None:
        """Begin an episode, in which rotation values do not jump."""
        for reader in self._readers:
            reader.begin_task()

    def write(self, start: JointState, goal: JointState, seconds: float) -> FloatArray:
        """Return the action, float64 [D].

        Values are NaN for components whose joints are missing in ``goal`` or, for relative ones, in ``start``, and
        for a gripper without finger joints (``robot.gripper_joint_names``).
        """

        def numbers(size: int, write: Write) -> FloatArray:
            try:
                return write(start, goal, seconds)
            except (StateError, KeyError):
                return np.full(size, np.nan)

        return np.concatenate([numbers(*component) for component in self._components])


def _writer(
    component: Component, arms: Mapping[str, Arm], control: ControlConfig, readers: list[StateReader]
) -> Write:
    """Return the writer of a component; readers of absolute components are added to ``readers``."""
    if component.quantity in ("joint_delta", "joint_velocity"):
        return _difference(component, arm_of(component, arms, "the action"), control)
    if component.quantity == "tip_delta":
        return _tip_delta(component, arm_of(component, arms, "the action"), control)
    closed, span = 0.0, 1.0
    if component.quantity == "gripper":
        arm = arm_of(component, arms, "the action")
        if not arm.fingers:
            return lambda start, goal, seconds: np.full(1, np.nan)
        if not component.form:  # gripper.open_value and closed_value define the range
            component, gripper = Component(component.arm, "gripper", "0..1"), arm.config.gripper
            closed, span = gripper.closed_value, gripper.open_value - gripper.closed_value
        # Commands are positions of the commanded joints.
        own = replace(arm.config, gripper=replace(arm.config.gripper, measured_by=""))
        component, arms = replace(component, choice=CLIPPED), {component.arm: replace(arm, config=own)}
    reader = bind_state(StateFeature("action", (component,)), arms, {})
    readers.append(reader)
    return lambda start, goal, seconds: closed + span * reader.read(Measured(goal), goal.stamp, 0.0)


def velocity_scale(control: ControlConfig, limits: FloatArray) -> FloatArray:
    """Return the velocity [N] of each joint at 1 in ``joint_velocity[1]``, given the velocity limits [N]."""
    return np.full(len(limits), control.joint_velocity_scale) if control.joint_velocity_scale else limits.copy()


def _difference(component: Component, arm: Arm, control: ControlConfig) -> Write:
    """Return a writer of the change of joint positions, per step or per second, in the component's unit."""
    factor: FloatArray | float = 180 / np.pi if component.form.startswith("deg") else 1.0
    if component.form == "1":
        if arm.kinematics is None or not np.isfinite(arm.kinematics.velocity_limits).all():
            raise ConfigError(f"robot.urdf: the action has {component}, but the URDF lacks velocity limits")
        factor = 1 / velocity_scale(control, arm.kinematics.velocity_limits)

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        change = (goal.select(arm.joints) - start.select(arm.joints)) * factor
        return change / seconds if component.quantity == "joint_velocity" else change

    return write


def _tip_delta(component: Component, arm: Arm, control: ControlConfig) -> Write:
    kinematics = arm.kinematics
    if kinematics is None:
        raise ConfigError(f"robot.urdf: not set, but the action has {component}, which needs kinematics")

    def write(start: JointState, goal: JointState, seconds: float) -> FloatArray:
        a, b = kinematics.forward(start.select(arm.joints)), kinematics.forward(goal.select(arm.joints))
        moved, turned = b.position - a.position, b.rotation @ a.rotation.T
        if control.delta_frame == "tip":
            moved, turned = a.rotation.T @ moved, a.rotation.T @ b.rotation
        angles = write_rotation(turned, component.form or control.rotation)
        return np.concatenate((moved / control.translation_scale, angles / control.rotation_scale))

    return write
