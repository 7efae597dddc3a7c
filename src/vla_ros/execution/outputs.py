"""Sends commands to the drivers, from this process or through a guard.

Everything is sent through a :class:`~vla_ros.execution.gate.CommandGate`, so that no two threads send at once and
no motion follows a stop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vla_ros.config import Config
from vla_ros.control.command import Command, StandingVelocities
from vla_ros.control.reasons import Reason
from vla_ros.errors import WriteError
from vla_ros.execution.context import Context
from vla_ros.execution.drivers import Drivers, DriverWrite
from vla_ros.graph.wiring import Wiring


class GuardEnd(Protocol):
    """The way to the drivers through a guard, which ends velocities by itself.

    See :mod:`vla_ros.node.guard_client`.
    """

    @property
    def gids(self) -> Mapping[str, bytes]:
        """The id in discovery of the guard's publisher, by resolved command topic."""

    @property
    def subscribers(self) -> tuple[str, int]:
        """See :attr:`Outputs.subscribers`."""

    def writes(self, command: Command) -> list[DriverWrite]:
        """Return the frame of an arm's command."""

    def look(self) -> Mapping[Reason, str]:
        """Read what the guard tells; return why it lets nothing move. Raises WriteError if it holds by itself."""

    def keep_alive(self, *, steps: bool) -> None:
        """Announce every 0.1 s, to every arm, that what was sent last remains in force.

        The thread that sends motions does, also when it ``steps``: the guard then prepares for what follows.
        """

    def configure(self, config: Config) -> None:
        """Apply changed options to the commands that follow."""


class Outputs:
    """Sends commands; ``gids`` maps each resolved command topic to its publisher's id in discovery.

    With a ``guard``, this process has no publisher to a driver. ``write_failed`` is called with the error of what
    is sent later, a gripper's goal; assign it.
    """

    def __init__(self, context: Context, wiring: Wiring, guard: GuardEnd | None = None) -> None:
        self._context, self._guard = context, guard
        self.write_failed: Callable[[WriteError], object] = lambda _: None
        self._drivers: Drivers | GuardEnd = guard or Drivers(
            context, wiring, lambda error: self.write_failed(error)
        )
        self.gids: Mapping[str, bytes] = self._drivers.gids
        self._standing = StandingVelocities(context.clock, context.options)
        self.sent: Mapping[str, Command] = {}  # the last command of each arm, by its name

    @property
    def subscribers(self) -> tuple[str, int]:
        """The command topic, action or service with the fewest drivers, and their number."""
        return self._drivers.subscribers

    def look(self) -> Mapping[Reason, str]:
        """Return why a guard lets nothing move (:meth:`GuardEnd.look`)."""
        return self._guard.look() if self._guard else {}

    def keep_alive(self, *, steps: bool) -> None:
        """See :meth:`GuardEnd.keep_alive`."""
        if self._guard:
            self._guard.keep_alive(steps=steps)

    def configure(self, config: Config) -> None:
        """See :meth:`GuardEnd.configure`."""
        if self._guard:
            self._guard.configure(config)

    def prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        """Build the messages of all arms' commands; return a function that sends them.

        Call that function within ``CommandGate.sending()``: for a hold only if motion is *not* allowed, for motion
        only if it is. If the process was suspended in the meantime, it sends nothing more; nor does it after a
        message that could not be written, for which it raises WriteError.
        """
        sends = list[
            tuple[Command, DriverWrite, Any]
        ]()  # serialised already, so that sending takes as little as possible
        for command in commands:
            sends += [(command, each, each.pack(each.make())) for each in self._drivers.writes(command)]

        def send() -> None:
            resumed, sent = self._context.suspension.resumed, dict[str, Command]()
            try:
                for command, write, message in sends:
                    self._context.suspension.notice()
                    if self._context.suspension.resumed != resumed:
                        return
                    try:
                        write.send(message)
                    except Exception as error:  # of the middleware
                        raise WriteError(f"{write.topic}: {error}", frozenset(sent)) from error
                    sent[command.arm] = command
            finally:
                self.sent = {**self.sent, **sent}
                if self._guard is None:
                    self._standing.send(sent)

        return send

    def expired(self) -> list[Command]:
        """Return zeros for the arms to which no command was sent for ``timeouts.velocity``.

        A velocity command remains in force until the next one: during a long inference it would move the arm far
        beyond the intended step. Position commands need not expire. A guard sends the zeros by itself.
        """
        if not isinstance(self._drivers, Drivers):
            return []
        return [self._drivers.split(command)[0] for command in self._standing.expired()]
