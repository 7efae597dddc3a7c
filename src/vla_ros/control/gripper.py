"""Converts the gripper value of an action to a finger position."""

import math

from vla_ros.config import ArmConfig, GripperConfig
from vla_ros.config.sections import GRIPPER_ACTIONS
from vla_ros.contract.components import Component
from vla_ros.contract.fingers import finger_speed
from vla_ros.contract.gripper import GripperValues
from vla_ros.kinematics.solver import Kinematics


class Gripper(GripperValues):
    """Interprets gripper values, and stores the last finger position sent.

    Attributes:
        target: Last finger position sent, or None.
        fastest: Velocity limit of the fingers if ``gripper.max_speed`` is 0, rad/s or m/s; infinite for none.
    """

    def __init__(self, config: GripperConfig, part: Component | None = None) -> None:
        super().__init__(config, part)
        self.target: float | None = None
        self.fastest = math.inf

    def reset(self) -> None:
        """Forget the binary state and the last position sent."""
        super().reset()
        self.target = None

    def position(self, opening: float) -> float:
        """Return the finger joint position in metres or radians for an opening in [0, 1]."""
        config = self.config
        return config.closed_position + opening * (config.open_position - config.closed_position)

    def share(self, position: float) -> float:
        """Return the opening in [0, 1] of a finger position; the inverse of :meth:`position`."""
        closed, opened = self.config.closed_position, self.config.open_position
        return min(max((position - closed) / (opened - closed), 0.0), 1.0)

    def command(self, value: float, measured: float | None, dt: float) -> tuple[float, bool]:
        """Return the finger position to send, and True if ``max_speed``, or ``fastest``, shortened the step.

        The step starts at the last *sent* position (the first step at ``measured``, if known), because fingers that
        grip an object never reach their target; the difference makes them press. Assign the position to
        :attr:`target` once it has been sent.
        """
        wanted = self.position(self.opening(value))
        before = self.target if self.target is not None else measured
        speed = self.config.max_speed or self.fastest
        if math.isinf(speed) or before is None:
            return wanted, False
        reach = speed * dt
        return min(max(wanted, before - reach), before + reach), abs(wanted - before) > reach * (1 + 1e-9)


def fastest(arm: ArmConfig, kinematics: Kinematics | None) -> float:
    """Return how fast finger positions are commanded if ``gripper.max_speed`` is 0, rad/s or m/s.

    That is the URDF's velocity limit, or ``limits.assumed_joint_velocity`` where it states none. Goals of an action
    are final positions, which are sent at once.
    """
    if arm.gripper.output in GRIPPER_ACTIONS and arm.gripper_topic:
        return math.inf
    speed = finger_speed(arm.robot.gripper_joint_names, kinematics)
    return speed if math.isfinite(speed) else max(arm.limits.assumed_joint_velocity)
