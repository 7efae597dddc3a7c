"""Compares the finger joints and positions in the options with the URDF."""

import math

from vla_ros.config.control import ENVIRONMENT
from vla_ros.contract.state import Arm
from vla_ros.errors import ConfigError, did_you_mean
from vla_ros.kinematics.solver import Kinematics

_SAME = 1e-6  # rad or m


def check_fingers(arm: Arm) -> None:
    """Raise ConfigError if the URDF describes the gripper and contradicts the options.

    A URDF that ends at the arm says nothing about fingers; one with movable joints beyond the arm describes the
    gripper, and must have each finger joint.
    """
    config, kinematics = arm.config, arm.kinematics
    if kinematics is None or not arm.fingers or config.output == ENVIRONMENT:
        return
    section = "robot" if config.name == "arm" else config.name
    described = set(kinematics.gripper_joints)
    unknown = [name for name in arm.fingers if not kinematics.description.has(name)]
    if unknown and (described or len(unknown) < len(arm.fingers)):
        hint, path = did_you_mean(unknown[0], described), kinematics.description.path
        raise ConfigError(
            f"{section}.gripper_joint_names: found '{unknown[0]}', which {path} does not have{hint}; its joints "
            f"beyond the arm are {', '.join(sorted(described)) or 'none'}"
        )
    if config.gripper.mode == "none":
        return
    named = "gripper" if config.name == "arm" else config.name
    for name in arm.fingers:
        joint = kinematics.description.joint(name)
        if joint is None or (joint.mimic is not None and joint.mimic.leader in arm.fingers):
            continue  # a finger that mimics another gets what its driver makes of the other's position
        low, high, _ = kinematics.description.limits(name)
        for leaf in ("open_position", "closed_position"):
            position = getattr(config.gripper, leaf)
            if low < high and not low - _SAME <= position <= high + _SAME:
                raise ConfigError(
                    f"{named}.{leaf}: found {position:g}, outside the limits of '{name}' in "
                    f"{kinematics.description.path}, {low:g} to {high:g}"
                )


def finger_speed(fingers: tuple[str, ...], kinematics: Kinematics | None) -> float:
    """Return the lowest velocity limit of the fingers in the URDF, rad/s or m/s; infinity if it states none."""
    if kinematics is None:
        return math.inf
    known = [kinematics.description.limits(name)[2] for name in fingers if kinematics.description.has(name)]
    return min((speed for speed in known if speed > 0), default=math.inf)
