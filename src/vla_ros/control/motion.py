"""Converts the numbers of an action to joint positions or a pose of the tip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.config import ArmConfig, ControlConfig
from vla_ros.contract.parts import MOTIONS, Part
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import read_rotation
from vla_ros.kinematics.solver import Kinematics
from vla_ros.kinematics.transforms import Pose
from vla_ros.types import FloatArray

_UNITS = {"rad": 1.0, "rad/s": 1.0, "deg": math.pi / 180, "deg/s": math.pi / 180}
_UNBOUNDED = 1e5  # rad; a joint with a wider range has no limits


@dataclass(frozen=True, eq=False)
class JointMotion:
    """Converts numbers that are joint positions, steps or velocities."""

    quantity: str  # ``joint_position``, ``joint_delta`` or ``joint_velocity``
    scale: FloatArray  # float64 [N], radians or metres (per second) per unit
    offset: FloatArray  # float64 [N], position that the number 0 stands for

    def target(self, numbers: FloatArray, start: FloatArray, dt: float) -> FloatArray:
        """Return the joint positions [N] that ``numbers`` [N] mean, ``dt`` seconds after ``start``."""
        wanted: FloatArray = self.offset + self.scale * numbers
        if self.quantity == "joint_position":
            return wanted
        return start + (wanted * dt if self.quantity == "joint_velocity" else wanted)


@dataclass(frozen=True)
class TipMotion:
    """Converts numbers that are a pose or a step of the tip."""

    quantity: str  # ``tip_position`` or ``tip_delta``; the numbers of the rotation follow
    form: str  # form of the rotation

    def target(self, numbers: FloatArray, start: Pose, control: ControlConfig) -> Pose:
        """Return the pose that ``numbers`` [3 + rotation] mean, relative to ``start`` for a delta.

        Raises Refused (``action_invalid``) if the rotation has no direction.
        """
        translation, rotation = numbers[:3], numbers[3:]
        if self.quantity == "tip_position":
            return Pose(translation, self._rotation(rotation))
        translation = translation * control.translation_scale
        angles = rotation * control.rotation_scale
        size = math.hypot(*angles.tolist())
        turn = self._rotation(angles if size <= math.pi else angles * (math.pi / size))
        if control.delta_frame == "tip":
            return Pose(start.position + start.rotation @ translation, start.rotation @ turn)
        return Pose(start.position + translation, turn @ start.rotation)

    def _rotation(self, numbers: FloatArray) -> FloatArray:
        try:
            return read_rotation(numbers, self.form)
        except ValueError as error:
            raise Refused(Reason.ACTION_INVALID, f"tip_rotation[{self.form}]: {error}") from None


Motion = JointMotion | TipMotion


def make_motion(
    parts: Sequence[Part], arm: ArmConfig, control: ControlConfig, kinematics: Kinematics | None
) -> Motion:
    """Return the motion that ``parts``, checked by ``contract.binding.bind``, describe."""
    found = {part.quantity: part for part in parts}
    [quantity] = found.keys() & MOTIONS
    part = found[quantity]
    if kinematics is None and (quantity == "tip_position" or part.range is not None):
        raise _lacks(arm, part, "not set")
    if quantity == "tip_position":
        return TipMotion(quantity, found["tip_rotation"].form)
    if quantity == "tip_delta":
        if kinematics is None and arm.output != "twist_stamped":
            raise _lacks(arm, part, "not set", "; set it, or set control.output to twist_stamped")
        return TipMotion(quantity, part.form or control.rotation)
    names = kinematics.joint_names if kinematics else arm.robot.joint_names
    scale, offset = np.ones(len(names)), np.zeros(len(names))
    if quantity == "joint_velocity":
        limits = kinematics.velocity_limits if kinematics else np.full(len(names), math.inf)
        _all_limited(arm, part, names, limits, "velocity")
        scale = limits.copy() if part.form == "1" else scale
    if part.range is not None and kinematics is not None:
        low, high = kinematics.position_low, kinematics.position_high
        _all_limited(arm, part, names, np.where(high - low < _UNBOUNDED, 0.0, math.inf), "position")
        least, most = part.range
        scale = (high - low) / (most - least)
        offset = low - least * scale
    return JointMotion(quantity, scale * _UNITS.get(part.form, 1.0), offset)


def _all_limited(arm: ArmConfig, part: Part, names: Sequence[str], limits: FloatArray, what: str) -> None:
    free = [name for name, limit in zip(names, limits, strict=True) if not math.isfinite(limit)]
    if free:
        raise _lacks(arm, part, f"found no {what} limit for {free}")


def _lacks(arm: ArmConfig, part: Part, found: str, advice: str = "") -> ConfigError:
    section = "robot" if arm.name == "arm" else arm.name
    return ConfigError(f"{section}.urdf: {found}, but the policy returns {part}{advice}")
