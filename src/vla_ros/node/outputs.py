"""What goes out to the drivers: the arm's command topic and, where the gripper has a driver of its own, its topic.

Everything is sent within :meth:`vla_ros.control.safety.Safety.motion`, so that no two threads send at once and a
motion never follows a stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.control.command import Command, message_type, split, to_message
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import Safety
from vla_ros.graph.wiring import Wiring

_TWIST_PERIODS = 2
"""Control periods for which a twist stands where ``timeouts.twist`` leaves it open."""


class Outputs:
    """Publishers of commands.

    Args:
        wiring: Where they are made and undone.
        config: The whole tree; ``control.output``, ``gripper.output``, ``topics``, ``timeouts.twist``.
        safety: Says whether a motion may be sent; counts twists that expired.
        now: Nanoseconds of the ROS clock.
    """

    def __init__(self, wiring: Wiring, config: Config, safety: Safety, now: Callable[[], int]) -> None:
        self._make = wiring.graph.message
        self._safety = safety
        self._now = now
        topics = config.topics
        self._arm = wiring.publisher(message_type(config.control.output), topics.command, "command")
        self._publishers = {topics.command: self._arm}
        if topics.gripper:
            gripper = wiring.publisher(message_type(config.gripper.output), topics.gripper, "command")
            self._publishers[topics.gripper] = gripper
        self._twist: tuple[Command, float] | None = None  # what stands, and until when (steady clock, s)
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take options that may change while running."""
        self._config = config

    @property
    def publishers(self) -> tuple[Any, ...]:
        """Those of commands, one per topic."""
        return tuple(self._publishers.values())

    @property
    def subscribers(self) -> tuple[str, int]:
        """The command topic with the fewest matched subscriptions, and how many those are."""
        counts = {topic: publisher.get_subscription_count() for topic, publisher in self._publishers.items()}
        worst = min(counts, key=lambda topic: counts[topic])
        return worst, counts[worst]

    def prepare(self, command: Command) -> Callable[[], None]:
        """Make the messages of a command; what this returns sends them.

        Call that within ``safety.motion()``; a hold is sent where motion is *not* allowed, a motion where it is.
        """
        config, now = self._config, self._now()
        arm, fingers = split(command, config.robot.gripper_joint_names if config.topics.gripper else ())
        sends = [partial(self._arm.publish, to_message(arm, config.control.output, self._make, now))]
        if fingers is not None:
            message = to_message(fingers, config.gripper.output, self._make, now)
            sends.append(partial(self._publishers[config.topics.gripper].publish, message))

        def send() -> None:
            for each in sends:
                each()
            if command.twist is not None:
                self._twist = None if command.hold else (arm, time.monotonic() + self._expiry)

        return send

    @property
    def _expiry(self) -> float:
        """Seconds for which a twist stands."""
        return self._config.timeouts.twist or _TWIST_PERIODS / self._config.control.rate_hz

    def expire(self) -> None:
        """Send a zero twist where none has come for ``timeouts.twist``; ask some fifty times a second.

        A velocity moves the arm until something else is said: while the policy thinks for too long, the last one
        would carry it on far beyond the step that was meant. Positions need no such thing.
        """
        standing = self._twist
        if standing is None or time.monotonic() < standing[1]:
            return
        with self._safety.motion():
            if self._twist is not standing:  # another command came meanwhile
                return
            self.prepare(replace(standing[0], hold=True, twist=(np.zeros(3), np.zeros(3))))()
        self._safety.report(Reason.TWIST_EXPIRED, f"no twist for {self._expiry:.3g} s")
