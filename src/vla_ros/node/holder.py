"""Sends a hold when motion ends, at the newest measurement, and keeps the arm where it is after a suspension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from vla_ros.control.command import Command
from vla_ros.control.suspension import LONGEST
from vla_ros.node.context import Context
from vla_ros.node.stepper import Stepper
from vla_ros.types import JointState

_PERIOD = 0.005  # s


class Holder:
    """Sends one hold to every arm each time that motion ends. Any thread may call it.

    An arm with a velocity output stops at once. The position of another one must have arrived within
    ``timeouts.joint_state`` and must have been published after the process last resumed (:class:`Suspension`);
    until then, its hold is due.

    Args:
        context: The node's context.
        stepper: Makes the commands.
        prepare: As for :class:`~vla_ros.node.sender.Sender`.
        poll: Reads joint states that the graph thread has not processed yet.
    """

    def __init__(
        self,
        context: Context,
        stepper: Stepper,
        prepare: Callable[[Sequence[Command]], Callable[[], None]],
        poll: Callable[[], None],
    ) -> None:
        self._context, self._safety, self._suspension = context, context.safety, context.suspension
        self._stepper, self._prepare, self._poll = stepper, prepare, poll
        self._interruptions = self._safety.interruptions  # count at the last hold
        self._due: frozenset[str] = frozenset()  # arms
        self._measured = tuple(arm.name for arm in stepper.controller.arms if arm.arm_names)
        self._passed = -math.inf  # when the suspension began that gate() has found to be over
        self.looked = -math.inf
        """Time of the last look at other commanders (:meth:`Clock.awake`)."""

    def gate(self) -> str:
        """Return why nothing may move after a suspension, or "": :attr:`Safety.gate`."""
        self._suspension.notice()
        resumed = self._suspension.resumed
        if resumed <= self._passed:
            return ""
        fresh = self._context.inputs.fresh_joints(math.inf, resumed)
        missing = [name for name in self._measured if name not in fresh]
        alone = self._context.options.current.control.arms_hold_alone and len(missing) < len(self._measured)
        if missing and not alone:
            wanted = "no joint state was published since it resumed"
        elif self._due & fresh.keys():
            wanted = "the hold was not sent yet"
        elif self.looked < resumed:
            wanted = "the graph was not searched for other commanders since it resumed"
        elif self._context.clock.awake() < self._suspension.settled:
            wanted = "a stop that was sent meanwhile may still arrive"
        else:
            self._passed = resumed
            return ""
        return f"the process did not run for {self._suspension.lasted:.3g} s; {wanted}"

    def forget(self) -> None:
        """Forget holds that are due, because a person has taken over the arm."""
        with self._safety.motion():
            self._due = frozenset()

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` until every hold that is due was sent."""
        until = self._context.clock.steady() + seconds
        while self._due and self._context.clock.steady() < until:
            self._context.clock.sleep(_PERIOD)
            self.look()

    def look(self) -> None:
        """Send the holds that are due. Call it when motion has ended, and fifty times a second."""
        if not self._due and self._safety.interruptions == self._interruptions:
            return
        try:
            self._poll()
        except Exception as error:  # hold at the last known position
            self._log(f"joint states could not be read: {type(error).__name__}: {error}")
        with self._safety.motion() as allowed:
            if self._safety.interruptions != self._interruptions:
                self._interruptions = self._safety.interruptions
                self._due = frozenset(arm.name for arm in self._stepper.controller.arms)
            if allowed:  # the reason has ended, and motion may already have been sent
                self._due = frozenset()
            if self._due:
                self._hold(self._fresh())

    def _fresh(self) -> Mapping[str, JointState]:
        timeout = self._context.options.current.timeouts.joint_state + LONGEST
        return self._context.inputs.fresh_joints(timeout, self._suspension.resumed)

    def _hold(self, fresh: Mapping[str, JointState]) -> None:
        resumed = self._suspension.resumed
        commands, refusals = self._stepper.hold(fresh, self._due)
        self._prepare(commands)()
        self._suspension.notice()
        if self._suspension.resumed != resumed:  # suspended while it sent: what was sent is corrected
            return
        # An arm whose measurement is unusable has nothing to hold; one without waits for a measurement.
        self._due = self._due - {command.arm for command in commands} - fresh.keys()
        for refused in refusals:
            self._log(f"no hold could be sent{' yet' if self._due else ''}: {refused.detail}")

    def _log(self, text: str) -> None:
        self._context.throttled.log("hold", text, "error")
