"""Converts messages of ``robot.state_topics`` to numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_ros.config.sections import STATE_TOPIC_TYPES
from vla_ros.types import JointState

_POSE = ("x", "y", "z", "qx", "qy", "qz", "qw")
_WRENCH = ("fx", "fy", "fz", "tx", "ty", "tz")


def state_message_type(name: str) -> str:
    """Return the full name of a message type of :data:`~vla_ros.config.sections.STATE_TOPIC_TYPES`."""
    return f"{STATE_TOPIC_TYPES[name]}/msg/{name}"


def read_state_message(message: Any, now: int = 0) -> JointState:
    """Convert a message of one of :data:`~vla_ros.config.sections.STATE_TOPIC_TYPES` to named numbers.

    A ``JointState`` yields its positions, a ``PoseStamped`` its position and quaternion x, y, z, w, and a
    ``WrenchStamped`` its force and torque. A message without a stamp gets the stamp ``now``, in nanoseconds.
    """
    if not hasattr(message, "header"):
        values = np.asarray(message.data, dtype=np.float64)
        return JointState(tuple(f"[{index}]" for index in range(len(values))), values, now)
    stamp = int(message.header.stamp.sec) * 1_000_000_000 + int(message.header.stamp.nanosec)
    if hasattr(message, "pose"):
        at, turned = message.pose.position, message.pose.orientation
        return JointState(_POSE, np.array([at.x, at.y, at.z, turned.x, turned.y, turned.z, turned.w]), stamp or now)
    if hasattr(message, "wrench"):
        force, torque = message.wrench.force, message.wrench.torque
        values = np.array([force.x, force.y, force.z, torque.x, torque.y, torque.z])
        return JointState(_WRENCH, values, stamp or now)
    return JointState(tuple(message.name), np.asarray(message.position, dtype=np.float64), stamp or now)
