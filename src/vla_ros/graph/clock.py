"""Time of a node of the embedded participant: the system clock, or ``/clock`` when ``use_sim_time`` is set."""

from __future__ import annotations

import time
from typing import Any

from vla_ros.graph.messages import MessageTypes

_SECOND = 1_000_000_000


class Time:
    """A point in time, with the members of ``rclpy.time.Time`` that this package uses."""

    def __init__(self, nanoseconds: int, types: MessageTypes) -> None:
        self._nanoseconds = nanoseconds
        self._types = types

    @property
    def nanoseconds(self) -> int:
        """Nanoseconds since the clock's epoch (1970, or the beginning of the simulation)."""
        return self._nanoseconds

    def seconds_nanoseconds(self) -> tuple[int, int]:
        """Whole seconds, and the nanoseconds beyond them."""
        return divmod(self._nanoseconds, _SECOND)

    def to_msg(self) -> Any:
        """As ``builtin_interfaces/msg/Time``."""
        sec, nanosec = self.seconds_nanoseconds()
        return self._types.message("builtin_interfaces/msg/Time")(sec=sec, nanosec=nanosec)


class Clock:
    """The ROS clock: system time, or with simulated time the newest time of ``/clock`` (0 before the first)."""

    def __init__(self, types: MessageTypes, *, simulated: bool = False) -> None:
        self._types = types
        self._simulated: int | None = 0 if simulated else None

    def now(self) -> Time:
        """Current time."""
        nanoseconds = time.time_ns() if self._simulated is None else self._simulated
        return Time(nanoseconds, self._types)

    @property
    def ros_time_is_active(self) -> bool:
        """True if time comes from ``/clock``; the name is that of ``rclpy.clock.ROSClock``."""
        return self._simulated is not None

    def on_clock(self, message: Any) -> None:
        """Set the time from a ``rosgraph_msgs/msg/Clock``."""
        self._simulated = message.clock.sec * _SECOND + message.clock.nanosec
