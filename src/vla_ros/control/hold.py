"""Computes the positions of a hold: measured arm positions, last commanded finger positions."""

from collections.abc import Mapping

import numpy as np

from vla_ros.config import ArmConfig
from vla_ros.control.reasons import Reason, Refused
from vla_ros.types import FloatArray

# Outputs whose drivers refuse a message that lacks a joint.
_WHOLE = ("float64_multi_array", "joint_trajectory", "joint_group_command")
_SAG = 0.02  # rad or m; an arm that is further from the held position was moved


def held_position(before: FloatArray | None, measured: FloatArray) -> FloatArray:
    """Return the position held ``before``, or ``measured`` if the arm is too far from it."""
    return measured if before is None or np.any(np.abs(measured - before) > _SAG) else before


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
