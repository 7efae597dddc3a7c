"""The measured positions of an arm: whether commands may be based on them, and what a hold makes of them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.config import ArmConfig
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import did_you_mean
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, IntArray, JointState

_BELIEVABLE = 0.1  # rad or m; a measurement further outside the joint's limits is an error
# Outputs whose drivers refuse a message that lacks a joint.
_WHOLE = ("float64_multi_array", "joint_trajectory", "joint_group_command")
SAG, SAG_PRISMATIC = 0.02, 0.003
"""Rad and m; a joint that is further from the held position was moved, unless it is known to sag more.

Gears and links give way by about a degree. The belts, racks and spindles of linear axes do by up to 2 mm.
"""


def joint_speeds(arm: ArmConfig, names: Sequence[str], kinematics: Kinematics | None) -> dict[str, float]:
    """Return how fast each joint can move, rad/s or m/s: what is commanded, and what is believed of joint states.

    That is the velocity limit of the URDF, or ``limits.max_joint_velocity`` where it states none, or else
    ``limits.assumed_joint_velocity``.
    """
    limits, speeds = arm.limits, dict.fromkeys(names, math.inf)
    slides = dict.fromkeys(names, False)
    if kinematics is not None:
        speeds = dict(zip(names, kinematics.velocity_limits.tolist(), strict=True))
        slides = dict(zip(names, kinematics.is_prismatic.tolist(), strict=True))
    return {
        name: speed
        if math.isfinite(speed)
        else limits.max_joint_velocity or limits.assumed_joint_velocity[slides[name]]
        for name, speed in speeds.items()
    }


def unstated(arm: ArmConfig, names: Sequence[str], kinematics: Kinematics | None) -> str:
    """Return which limits of an arm are not stated and what is assumed instead, as a warning; or ""."""
    section, found = "robot" if arm.name == "arm" else arm.name, []
    if names and kinematics is None:
        found.append(f"{section}.urdf is not set, so that no joint has position limits")
    speeds = joint_speeds(arm, names, kinematics)
    free = [
        name
        for index, name in enumerate(names)
        if kinematics is None or kinematics.velocity_limits[index] == math.inf
    ]
    if free and not arm.limits.max_joint_velocity:
        assumed = " and ".join(f"{speed:.4g}" for speed in sorted({speeds[name] for name in free}))
        found.append(
            f"no velocity limit is stated for {', '.join(free)}: {assumed} rad/s or m/s is assumed "
            "(limits.assumed_joint_velocity), in commands and for where a joint state can be; state the robot's "
            "(limits.max_joint_velocity, or in the URDF), because a damaged joint state within it is believed"
        )
    if kinematics is not None:
        stuck = (kinematics.position_high - kinematics.position_low).tolist()
        still = [name for name, span in zip(names, stuck, strict=True) if span == 0]
        if still:
            found.append(f"{', '.join(still)} cannot move: its lowest and highest position in the URDF are equal")
    return "; ".join(found)


def sags(names: Sequence[str], kinematics: Kinematics | None) -> FloatArray:
    """Return :data:`SAG` or :data:`SAG_PRISMATIC` of each joint, [N]; without a URDF, all joints turn."""
    slides = np.zeros(len(names), bool) if kinematics is None else kinematics.is_prismatic
    return np.where(slides, SAG_PRISMATIC, SAG)


class MeasuredArm:
    """Reads the arm's positions in command order from joint states."""

    def __init__(self, names: tuple[str, ...], kinematics: Kinematics | None) -> None:
        self._names = names
        self._kinematics = kinematics
        self._columns: tuple[tuple[str, ...] | None, IntArray] = (None, np.zeros(0, np.int64))
        self._checked: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._misspelt = ""

    def positions(self, joints: JointState | None) -> FloatArray:
        """Return the arm's positions [N].

        Raises Refused if there is no joint state, or if a joint is missing, named twice or not finite.
        """
        if joints is None:
            raise Refused(Reason.JOINT_STATE_STALE, "no usable joint state within timeouts.joint_state")
        if len(joints.names) != len(joints.positions):
            found = f"{len(joints.names)} names and {len(joints.positions)} positions"
            raise Refused(Reason.JOINT_STATE_INVALID, f"found {found}, expected equal numbers")
        names, columns = self._columns
        if joints.names != names:  # a driver names its joints in the same order every time
            try:
                joints.select(self._names)
            except KeyError as error:
                raise Refused(Reason.JOINT_STATE_INVALID, str(error.args[0])) from None
            twice = [name for name in self._names if joints.names.count(name) > 1]
            if twice:
                raise Refused(Reason.JOINT_STATE_INVALID, f"found {twice} twice, expected each joint once")
            columns = np.array([joints.names.index(name) for name in self._names], np.int64)
            self._columns = joints.names, columns
        positions = joints.positions[columns]
        if not all(map(math.isfinite, positions.tolist())):
            worst = int(np.argmax(~np.isfinite(positions)))
            raise Refused(Reason.JOINT_STATE_INVALID, f"joint '{self._names[worst]}' is {positions[worst]}")
        return positions

    def check(self, positions: FloatArray) -> None:
        """Raise Refused (``joint_state_invalid``) if positions [N] are far outside the URDF's limits.

        In that case the URDF describes another robot, or an encoder is wrong.
        """
        if self._kinematics is None:
            return
        low, high = self._kinematics.position_low, self._kinematics.position_high
        outside = np.maximum(low - positions, positions - high)
        worst = int(outside.argmax())
        if outside[worst] > _BELIEVABLE:
            raise Refused(
                Reason.JOINT_STATE_INVALID,
                f"joint '{self._names[worst]}' is at {positions[worst]:.4g}, its URDF allows {low[worst]:.4g} to "
                f"{high[worst]:.4g}",
            )

    def check_fingers(self, joints: JointState, fingers: tuple[str, ...]) -> None:
        """Raise Refused (``joint_state_invalid``) if a finger joint is missing and another has nearly its name.

        Fingers that the URDF has, and drivers that do not measure fingers, are right.
        """
        if (joints.names, fingers) != self._checked:
            self._checked = joints.names, fingers
            others = [name for name in joints.names if name not in fingers and name not in self._names]
            hints = [
                f"found no finger joint '{name}'{hint}"
                for name in fingers
                if name not in joints.names
                and not (self._kinematics is not None and self._kinematics.description.has(name))
                and (hint := did_you_mean(name, others, 0.8))
            ]
            self._misspelt = hints[0] if hints else ""
        if self._misspelt:
            raise Refused(Reason.JOINT_STATE_INVALID, f"{self._misspelt} (robot.gripper_joint_names)")


def position_of(joints: JointState | None, name: str) -> float | None:
    """Return a joint's measured position, or None if it is not measured or not a number."""
    if joints is None or name not in joints.names:
        return None
    index = joints.names.index(name)
    position = float(joints.positions[index]) if index < len(joints.positions) else math.nan
    return position if math.isfinite(position) else None


def held_fingers(arm: ArmConfig, positions: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finger positions of a hold, without unknown positions (None).

    Raises:
        Refused: A position is unknown, but the driver's message must name every joint.
    """
    known = {name: position for name, position in positions.items() if position is not None}
    if len(known) < len(positions) and arm.gripper_topic:  # not commanded yet: there is nothing to hold
        return {}
    if len(known) < len(positions) and arm.output in _WHOLE:
        raise Refused(
            Reason.JOINT_STATE_INVALID,
            f"finger joints {sorted(positions.keys() - known)} are neither measured nor commanded yet, and "
            f"{arm.output} must name every joint",
        )
    return known
