"""The clock of the embedded participant's nodes: the system clock, or ``/clock`` with ``use_sim_time``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Time:
    """A point in time: nanoseconds since the clock's epoch (1970, or the start of the simulation)."""

    nanoseconds: int


class Clock:
    """The ROS clock: system time, or with simulated time the newest time of ``/clock`` (0 before the first)."""

    def __init__(self, *, simulated: bool = False) -> None:
        self._simulated: int | None = 0 if simulated else None

    def now(self) -> Time:
        return Time(time.time_ns() if self._simulated is None else self._simulated)

    @property
    def ros_time_is_active(self) -> bool:
        """True if time comes from ``/clock``; named as in ``rclpy.clock.ROSClock``."""
        return self._simulated is not None

    def on_clock(self, message: Any) -> None:
        self._simulated = message.clock.sec * 1_000_000_000 + message.clock.nanosec
