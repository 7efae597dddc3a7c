"""Serialises and reads the robot's messages."""

from collections.abc import Sequence
from typing import Any

from tools.faults.channel import SECOND
from vla_ros.errors import ImageError
from vla_ros.graph.messages import message_types
from vla_ros.graph.node import Backend
from vla_ros.vision.messages import image_stamp


def joint_state(names: Sequence[str], positions: Sequence[float], stamp: int) -> bytes:
    types = message_types()
    message: Any = types.message("sensor_msgs/msg/JointState")(name=list(names), position=list(positions))
    seconds, nanoseconds = divmod(stamp, SECOND)
    message.header.stamp = types.message("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
    return bytes(types.serialize(message))


def read_joints(cdr: bytes, graph: Backend) -> dict[str, Any]:
    """Return the stamp, names and positions of a joint state, as far as they can be read.

    Names and positions are left out if their numbers differ. ``graph`` deserialises it as the node's does.
    """
    try:
        joints = graph.deserialize(cdr, graph.message("sensor_msgs/msg/JointState"))
    except Exception:  # rclpy's has a base class of its own
        return {}
    names, positions = tuple(joints.name), tuple(float(value) for value in joints.position)
    known = {"names": names, "positions": positions} if len(names) == len(positions) else {}
    return {"stamp": stamp_of(joints), **known}


def stamp_of(message: Any) -> int:
    return int(message.header.stamp.sec) * SECOND + int(message.header.stamp.nanosec)


def stamp_of_frame(cdr: bytes) -> int:
    """Return the stamp of an image's header in nanoseconds; 0 if it cannot be read."""
    try:
        return image_stamp(cdr)
    except ImageError:
        return 0
