"""Publishes commands to the drivers: the arm's topic and, for a gripper with its own driver, the gripper's.

Everything is sent within :meth:`vla_ros.control.safety.Safety.motion`, so that no two threads send at once and a
motion never follows a stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from vla_ros.control.command import Command, message_type, split, to_message
from vla_ros.control.reasons import Reason
from vla_ros.graph.wiring import Wiring
from vla_ros.node.context import Context

_TWIST_PERIODS = 2
"""Control periods for which a twist stays in force by default (``timeouts.twist``: 0)."""


class Outputs:
    """Publishers of commands.

    Args:
        context: What the node's parts share; ``control.output``, ``gripper.output``, ``topics`` and
            ``timeouts.twist`` are read.

    Attributes:
        gids: Topic (resolved) to the id by which discovery knows the publisher.
    """

    def __init__(self, context: Context, wiring: Wiring) -> None:
        self._context = context
        self._make = wiring.graph.message
        config, topics = context.options.current, context.options.current.topics
        self._arm, gid = wiring.publisher_and_gid(message_type(config.control.output), topics.command, "command")
        self._publishers = {topics.command: self._arm}
        self.gids = {self._arm.topic_name: gid}
        if topics.gripper:
            kind = message_type(config.gripper.output)
            gripper, gid = wiring.publisher_and_gid(kind, topics.gripper, "command")
            self._publishers[topics.gripper] = gripper
            self.gids[gripper.topic_name] = gid
        # The twist in force, and when it expires (steady clock, s).
        self._twist: tuple[Command, float] | None = None

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
        config, now = self._context.options.current, self._context.clock.ros()
        arm, fingers = split(command, config.robot.gripper_joint_names if config.topics.gripper else ())
        sends = [partial(self._arm.publish, to_message(arm, config.control.output, self._make, now))]
        if fingers is not None:
            message = to_message(fingers, config.gripper.output, self._make, now)
            sends.append(partial(self._publishers[config.topics.gripper].publish, message))

        def send() -> None:
            for each in sends:
                each()
            if command.twist is not None:
                self._twist = None if command.hold else (arm, self._context.clock.steady() + self._expiry)

        return send

    @property
    def _expiry(self) -> float:
        """Seconds for which a twist stays in force."""
        config = self._context.options.current
        return config.timeouts.twist or _TWIST_PERIODS / config.control.rate_hz

    def expire(self) -> None:
        """Send a zero twist where none has come for ``timeouts.twist``; ask some fifty times a second.

        A velocity moves the arm until another is sent: during a long inference the last one would carry it
        far beyond the step that was meant. Positions need no such thing.
        """
        standing = self._twist
        if standing is None or self._context.clock.steady() < standing[1]:
            return
        with self._context.safety.motion():
            if self._twist is not standing:  # another command came meanwhile
                return
            self.prepare(replace(standing[0], hold=True, twist=(np.zeros(3), np.zeros(3))))()
        self._context.safety.report(Reason.TWIST_EXPIRED, f"no twist for {self._expiry:.3g} s")
