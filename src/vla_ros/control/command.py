"""A command to arm and fingers, and the four ROS messages that it can become."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.types import FloatArray

_LEAST_DURATION = 0.1
"""Seconds that a trajectory has left when it is sent: one that has ended when it arrives is refused."""

_TYPES = {
    "joint_state": "sensor_msgs/msg/JointState",
    "float64_multi_array": "std_msgs/msg/Float64MultiArray",
    "joint_trajectory": "trajectory_msgs/msg/JointTrajectory",
    "twist_stamped": "geometry_msgs/msg/TwistStamped",
}


@dataclass(frozen=True)
class Command:
    """What the driver is told.

    Attributes:
        names: Joints, the arm's first and then the fingers, N of them; of a twist without kinematics the fingers
            alone.
        positions: Float64 [N], radians or metres.
        stamp: Nanoseconds; stamp of the frame from which it came (of the joint state for a hold).
        hold: True where the arm is to keep its last measured position.
        duration: Seconds in which the positions are to be reached; of a hold, what the way back takes at least.
        frame_id: Frame in which the twist is given.
        twist: Linear [3] m/s and angular [3] rad/s of the tip, or None.
        velocities: Float64 [N], or None.
    """

    names: tuple[str, ...]
    positions: FloatArray
    stamp: int
    hold: bool = False
    duration: float = 0.0
    frame_id: str = ""
    twist: tuple[FloatArray, FloatArray] | None = None
    velocities: FloatArray | None = None


def split(command: Command, fingers: Collection[str]) -> tuple[Command, Command | None]:
    """The part of the arm and that of ``fingers``, for a gripper whose driver listens elsewhere; None for none."""
    is_finger = [name in fingers for name in command.names]
    if not any(is_finger):
        return command, None

    def part(wanted: bool) -> Command:
        chosen = [index for index, finger in enumerate(is_finger) if finger is wanted]
        names = tuple(command.names[index] for index in chosen)
        velocities = None if command.velocities is None else command.velocities[chosen]
        return replace(command, names=names, positions=command.positions[chosen], velocities=velocities)

    return part(False), replace(part(True), twist=None)


def message_type(output: str) -> str:
    """ROS type for a value of ``control.output`` or ``gripper.output``, as ``pkg/msg/Type``."""
    return _TYPES[output]


def to_message(command: Command, output: str, make: Callable[[str], Any], now: int | None = None) -> Any:
    """The command as a ROS message; its header has the command's stamp.

    A ``JointTrajectory`` starts at its header's stamp, and ros2_control's joint_trajectory_controller refuses
    one that ended in the past. The frame's stamp is in the past, so the point's ``time_from_start`` is the
    frame's age plus the command's duration. A hold gets 0.1 s at least, or it would have ended on arrival. A stamp
    of 0 says "now" to that controller.

    A twist that holds is stamped with ``now``: to stand still is right whenever it is heard, and MoveIt Servo
    ignores what is older than its ``incoming_command_timeout``.

    ``make`` gives the class of ``pkg/msg/Type``; ``now`` is in nanoseconds of the ROS clock, None takes the stamp.

    Raises:
        ValueError: ``twist_stamped`` for a command without a twist.
    """
    if output == "float64_multi_array":
        layout = _fill(make("std_msgs/msg/MultiArrayLayout"), dim=[], data_offset=0)
        return _fill(make(message_type(output)), layout=layout, data=command.positions)
    is_twist = output == "twist_stamped"
    stamp = now if is_twist and command.hold and now is not None else command.stamp
    header = _header(stamp, make, command.frame_id if is_twist else "")
    if output == "joint_state":
        return _fill(
            make(message_type(output)),
            header=header,
            name=list(command.names),
            position=command.positions,
            velocity=_or_empty(command.velocities),
            effort=_or_empty(None),
        )
    if output == "joint_trajectory":
        age = max(0, now - command.stamp) if now is not None and command.stamp else 0
        duration = max(command.duration, _LEAST_DURATION) if command.hold else command.duration
        point = _fill(
            make("trajectory_msgs/msg/JointTrajectoryPoint"),
            positions=command.positions,
            velocities=_or_empty(command.velocities),
            accelerations=_or_empty(None),
            effort=_or_empty(None),
            time_from_start=_time(make("builtin_interfaces/msg/Duration"), age + round(duration * 1e9)),
        )
        return _fill(make(message_type(output)), header=header, joint_names=list(command.names), points=[point])
    if command.twist is None:
        raise ValueError("a command without a twist cannot be sent as geometry_msgs/TwistStamped")
    linear, angular = (_vector(make, part) for part in command.twist)
    twist = _fill(make("geometry_msgs/msg/Twist"), linear=linear, angular=angular)
    return _fill(make(message_type(output)), header=header, twist=twist)


def _or_empty(values: FloatArray | None) -> FloatArray:
    return np.zeros(0) if values is None else values


def _header(stamp: int, make: Callable[[str], Any], frame_id: str) -> Any:
    time = _time(make("builtin_interfaces/msg/Time"), stamp)
    return _fill(make("std_msgs/msg/Header"), stamp=time, frame_id=frame_id)


def _time(cls: Any, nanoseconds: int) -> Any:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return _fill(cls, sec=seconds, nanosec=rest)


def _vector(make: Callable[[str], Any], values: Sequence[float] | FloatArray) -> Any:
    x, y, z = (float(value) for value in values)
    return _fill(make("geometry_msgs/msg/Vector3"), x=x, y=y, z=z)


def _fill(cls: Any, **fields: Any) -> Any:
    """A message. Arrays are lists for rclpy, whose setters refuse numpy's, and numpy arrays for rosbags."""
    if hasattr(cls, "get_fields_and_field_types"):
        fields = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in fields.items()}
    return cls(**fields)
