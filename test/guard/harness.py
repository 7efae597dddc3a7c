"""A guard without a process: its arms, drivers that keep what is sent, and a clock that the test advances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vla_ros.config import Config, LiveConfig
from vla_ros.control.command import Command
from vla_ros.errors import VlaRosError
from vla_ros.guard.frames import GuardFrame, Kind
from vla_ros.guard.guard import Guard
from vla_ros.node.guard_client import frame_of, options_text
from vla_ros.types import JointState

MILLISECOND = 1_000_000


class Harness:
    """A guard of ``config``.

    Attributes:
        now: Nanoseconds of the clock.
        sent: What the drivers got, and when.
        events: What the node was told.
    """

    def __init__(self, config: Config) -> None:
        self.now = 1_000_000_000_000
        self.sent: list[tuple[int, Command]] = []
        self.events: list[tuple[str, str]] = []
        self.writes_fail = False
        self.guard = Guard(LiveConfig(config), self._prepare, self._tell, lambda: None)

    def _prepare(self, command: Command) -> list[Callable[[], None]]:
        return [lambda: self._send(command)]

    def _send(self, command: Command) -> None:
        if self.writes_fail:
            raise VlaRosError("the middleware does not take it")
        self.sent.append((self.now, command))

    def _tell(self, event: str, text: str) -> None:
        self.events.append((event, text))

    @property
    def commands(self) -> list[Command]:
        return [command for _, command in self.sent]

    def happened(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)

    def joints(self, state: JointState, publisher: bytes = b"driver", topic: str = "/joint_states") -> None:
        self.guard.joints(topic, state, publisher, self.now, stamped=True)
        self.guard.look(self.now)

    def configure(self, config: Config) -> None:
        """Let the packet of changed options arrive."""
        self.guard.take([GuardFrame(Kind.OPTIONS, text=options_text(config, str))], self.now)

    def propose(self, command: Command, fingers: tuple[str, ...] = (), **fields: Any) -> None:
        self.take(frame_of(command, 0, fingers), **fields)

    def take(self, *frames: GuardFrame, **fields: Any) -> None:
        """Let frames arrive together that were sent now."""
        stamped = [each._replace(**{"time": self.now, "armings": 1, **fields}) for each in frames]
        self.guard.take(stamped, self.now)

    def say(self, kind: Kind, **fields: Any) -> None:
        self.take(GuardFrame(kind), **fields)

    def wait(self, seconds: float) -> None:
        """Let time pass; the guard looks as often as its loop does."""
        until = self.now + round(seconds * 1e9)
        while self.now < until:
            due = self.guard.due(self.now)
            self.now = min(until, max(due, self.now + MILLISECOND // 10))
            self.guard.look(self.now)


def state(names: tuple[str, ...], positions: Any, stamp: int) -> JointState:
    return JointState(names, np.asarray(positions, dtype=np.float64), stamp)
