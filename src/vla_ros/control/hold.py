"""Makes the commands that keep one arm where it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, ArmConfig
from vla_ros.control.command import Command
from vla_ros.control.gripper import Gripper
from vla_ros.control.measured import MeasuredArm, position_of
from vla_ros.control.reasons import Reason, Refused
from vla_ros.types import FloatArray, JointState

# Their drivers refuse a message that lacks a joint.
_WHOLE = ("float64_multi_array", "joint_trajectory", "joint_group_command")
_SAG = 0.02  # rad or m; an arm that sags by less is held where it was


class Holder:
    """Holds one arm; see :meth:`vla_ros.control.arm.ArmController.hold`."""

    def __init__(self, name: str, names: tuple[str, ...], measured: MeasuredArm, gripper: Gripper) -> None:
        self._name, self._names, self._measured, self._gripper = name, names, measured, gripper
        self._held: FloatArray | None = None

    def configure(self, arm: ArmConfig, fingers: tuple[str, ...], velocity: FloatArray, frame: str) -> None:
        """Take options: names of the finger joints, velocity limits [N], and the frame of a twist."""
        self._arm, self._fingers, self._velocity, self._frame = arm, fingers, velocity, frame

    def release(self) -> None:
        """Let the next hold use the arm's position at that time."""
        self._held = None

    def command(self, joints: JointState | None, before: FloatArray | None) -> Command:
        """Return the command that holds; the way back from ``before`` [N], last commanded, gets its time."""
        if self._arm.output in VELOCITY_OUTPUTS:
            names, positions = self._held_fingers(joints)
            stamp = joints.stamp if joints else 0
            held = Command(names, np.array(positions), stamp, arm=self._name, hold=True, frame_id=self._frame)
            if self._arm.output != "twist_stamped":
                return replace(held, velocities=dict.fromkeys(self._names, 0.0))
            return replace(held, twist=(np.zeros(3), np.zeros(3)))
        measured = self._measured.positions(joints)
        assert joints is not None
        if self._held is None or np.any(np.abs(measured - self._held) > _SAG):
            self._held = measured
        names, positions = self._held_fingers(joints)
        return Command(
            self._names + names,
            np.array(self._held.tolist() + positions),
            joints.stamp,
            arm=self._name,
            hold=True,
            duration=0.0 if before is None else self._shortest(np.abs(self._held - before)),
        )

    def _held_fingers(self, joints: JointState | None) -> tuple[tuple[str, ...], list[float]]:
        """Return the names and positions of the fingers in a hold; without those neither commanded nor measured.

        Refused if a joint that the driver requires would be missing.
        """
        target = self._gripper.target
        found = {name: target if target is not None else position_of(joints, name) for name in self._fingers}
        known = {name: position for name, position in found.items() if position is not None}
        if len(known) == len(found):
            return tuple(known), list(known.values())
        if self._arm.gripper_topic:  # not commanded yet: there is nothing to end
            return (), []
        if self._arm.output in _WHOLE:
            raise Refused(
                Reason.JOINT_STATE_INVALID,
                f"finger joints {sorted(found.keys() - known)} are neither measured nor commanded yet, and "
                f"{self._arm.output} must name every joint",
            )
        return tuple(known), list(known.values())

    def _shortest(self, distance: FloatArray) -> float:
        """Return the seconds that a motion of ``distance`` [N] takes at the velocity limits."""
        limited = self._velocity > 0
        return float((distance[limited] / self._velocity[limited]).max(initial=0.0))
