"""Sends commands while motion is allowed: for the plan's steps, between them, and during deceleration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from vla_ros.control.command import Command
from vla_ros.control.outcome import StepResult
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.suspension import LONGEST
from vla_ros.node.between import Between
from vla_ros.node.context import Context
from vla_ros.node.stepper import Stepper
from vla_ros.types import JointState

_SUPERVISION_VALID = 0.05  # s; after this time the watchdog is asked again


class Sender:
    """Sends the commands of all arms while motion is allowed. Used from the control thread.

    ``prepare`` builds the messages of all arms' commands and returns a function that sends them. ``supervise``
    passes the watchdog's findings to ``safety`` before each command. ``task`` is the epoch of the inputs and the
    number of armings to which the plan belongs; once ``ended`` is True, nothing is sent.
    """

    def __init__(
        self,
        context: Context,
        stepper: Stepper,
        limiter: RateLimiter,
        between: Between,
        prepare: Callable[[Sequence[Command]], Callable[[], None]],
        supervise: Callable[[], None],
    ) -> None:
        self._context, self._stepper = context, stepper
        self._clock, self._safety = context.clock, context.safety
        self._prepare, self._supervise = prepare, supervise
        self._limiter, self._between = limiter, between
        self._interruptions = 0  # count at the last check of the plan
        self._joints_read, self._resumed = 0.0, -math.inf  # when fresh_joints() was called; Suspension.resumed then
        self.task = (-1, -1)
        self.ended = False

    def is_void(self, task: tuple[int, int]) -> bool:
        """Return True if ``task`` has ended, or the arm was armed since it began."""
        return task != (self._context.inputs.snapshot.epoch, self._safety.armings)

    def is_interrupted(self) -> bool:
        """Return True if motion is not allowed, or was interrupted since the last call."""
        before, self._interruptions = self._interruptions, self._safety.interruptions
        return before != self._interruptions or not self._safety.may_move

    def ease(self) -> bool:
        """Decelerate with further commands; return False if none are needed."""
        self._between.ease()
        return self._between.step is not None and self._stepper.is_moving

    def check(self, step: StepResult, late: int = 0) -> None:
        """Raise Refused if a step's motion, which lags by ``late`` periods, must not be sent.

        ``server_lost``: the policy's server has been lost for ``timeouts.server_lost``.

        ``frame_old``: the step's frame is older than ``timeouts.frame_age`` plus ``timeouts.inference`` plus the
        step's offset. The watchdog checks frames only on arrival; this check detects a suspended process, or a
        frame that waited for a slow inference.
        """
        timeouts = self._context.options.current.timeouts
        lost = self._stepper.lost
        if lost is not None and lost.seconds > timeouts.server_lost:
            raise Refused(Reason.SERVER_LOST, f"{lost.why}; {lost.seconds:.3g} s ago")
        allowed = timeouts.frame_age + timeouts.inference + (step.index + late + 1) * self._limiter.period
        age = (self._clock.ros() - step.stamp) / 1e9
        if timeouts.frame_age and age > allowed:
            found = f"{age:.3g} s old when its motion was due, allowed {allowed:.3g} s"
            raise Refused(Reason.FRAME_OLD, found)

    def send(self, step: StepResult, dt: float, *, beside: bool) -> bool:
        """Send the commands of a step that lasts ``dt`` seconds; return True if they were sent.

        If the step is split into several commands, only the first one of each arm is sent.
        """
        commands = step.commands
        if beside and self._between.commands > 1:
            onward = self._stepper.onward(self.fresh_joints(), self._between.interval, dt, 0.0)
            commands = onward + tuple(command for command in commands if command.hold)
        began = self._clock.steady()
        if not self._send(commands, self._stepper.executed, step):
            return False
        self._context.stats.record({"publish": 1e3 * (self._clock.steady() - began)})
        return True

    def send_between(self, *, dry: bool) -> bool:
        """Send the command due between two steps or during deceleration; return True if it was sent.

        Once the arm rests, nothing more is sent. ``dry`` means that the plan has run out because the next chunk is
        late.
        """
        step, rested = self._between.step, self._between.rests
        assert step is not None
        dt, left, passed, late = self._between.next(self._clock.steady())
        if late and not rested and dry and not self.is_void(self.task):
            self._safety.report(Reason.PLAN_EMPTY, "see control.refill_steps and control.execute_steps")
        if late and not self._stepper.is_moving:
            return False
        return self._send(
            self._stepper.onward(self.fresh_joints(), dt, left, passed), self._stepper.sent, step, late
        )

    def fresh_joints(self) -> Mapping[str, JointState]:
        """Return each arm's newest joint state, unless it is stale or from before a suspension."""
        self._joints_read, self._resumed = self._clock.steady(), self._context.suspension.resumed
        return self._context.inputs.fresh_joints(self._context.options.current.timeouts.joint_state, self._resumed)

    def _send(self, commands: Sequence[Command], done: Callable[[], None], step: StepResult, late: int = 0) -> bool:
        """Send the commands if that is allowed, and call ``done``; return True if they were sent.

        If this thread was delayed after the watchdog's check, the check is repeated; commands that were made long
        before, or before the process was suspended, are not sent. Once the loop has ``ended``, nothing is sent,
        because another loop may own the arm. Deceleration (``late``) needs no valid task. Raises Refused as
        :meth:`check` does.
        """
        send = self._prepare(commands)
        while not self.ended:
            self._supervise()
            looked = self._clock.steady()
            with self._safety.motion() as may_move:
                if self._clock.steady() - looked > _SUPERVISION_VALID:
                    continue
                interrupted = self._safety.interruptions != self._interruptions
                void = interrupted or (not late and self.is_void(self.task))
                old = self._clock.steady() - self._joints_read > LONGEST
                old = old or self._context.suspension.resumed != self._resumed
                allowed = may_move and not void and not old and not self.ended
                if allowed:
                    self.check(step, late)
                    send()
                    done()
                    self._context.stats.commanded()
                    for alone in filter(None, [command.refused for command in commands]):
                        self._safety.count(alone.reason)
                        self._context.throttled.log(alone.reason.value, f"{alone.reason.value}: {alone.detail}")
                return allowed
        return False
