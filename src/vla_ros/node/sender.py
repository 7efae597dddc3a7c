"""Sends commands while they are allowed: of the plan's steps, between them, and to rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from vla_ros.config import Config
from vla_ros.control.command import Command
from vla_ros.control.outcome import StepResult
from vla_ros.control.reasons import Reason, Refused
from vla_ros.node.between import Between
from vla_ros.node.context import Context
from vla_ros.node.stepper import Stepper
from vla_ros.types import JointState

_SUPERVISION_VALID = 0.05  # s; what the watchdog saw is old after this


class Sender:
    """Used from the control thread.

    Args:
        prepare: Makes the messages of all arms' commands; what it returns sends them, and is called only while
            motion is allowed.
        supervise: Reports the watchdog's findings to ``safety``; called before each command, so that a frame which
            ends a hold is itself answered.

    Attributes:
        task: Epoch of the inputs and number of the arming to which the plan belongs.
        ended: True once nothing more may be sent.
    """

    def __init__(
        self,
        context: Context,
        stepper: Stepper,
        prepare: Callable[[Sequence[Command]], Callable[[], None]],
        supervise: Callable[[], None],
    ) -> None:
        self._context, self._stepper = context, stepper
        self._clock, self._safety = context.clock, context.safety
        self._prepare, self._supervise = prepare, supervise
        self._between = Between()
        self._interruptions = 0  # those that the plan has seen
        self.task = (-1, -1)
        self.ended = False

    def configure(self, config: Config, period: float) -> None:
        """Follow options; ``period`` is that of the steps in seconds."""
        self._config, self._period = config, period
        self._between.configure(config.control, period)

    @property
    def due(self) -> float:
        """When :meth:`send_between` is due where no step is; infinite for never. Seconds of the steady clock."""
        return self._between.due

    @property
    def rest_due(self) -> float:
        """As :attr:`due` while the arm comes to rest: a step must not follow such a command any sooner."""
        return self._between.due if self._between.rests else -math.inf

    def is_void(self, task: tuple[int, int]) -> bool:
        """Return True if ``task`` has ended, or began before a person armed."""
        return task != (self._context.inputs.snapshot.epoch, self._safety.armings)

    def is_interrupted(self) -> bool:
        """Return True if motion is not allowed, or was not at some moment since the last call."""
        before, self._interruptions = self._interruptions, self._safety.interruptions
        return before != self._interruptions or not self._safety.may_move

    def ease(self) -> bool:
        """Come to rest by further commands; False if none are needed."""
        self._between.ease()
        return self._between.step is not None and self._stepper.is_moving

    def stop(self) -> None:
        """Send nothing more between steps."""
        self._between.stop()

    def check_age(self, step: StepResult, late: int = 0) -> None:
        """Refuse motion on a frame that is older than its maximal age plus inference and its period.

        The watchdog checks frames on arrival. This catches what happens to them later: a process that was
        suspended, or a frame that waited behind a slow answer.

        Args:
            step: Of the plan.
            late: By how many periods its motion may be later than the step.

        Raises:
            Refused: ``frame_old``.
        """
        timeouts = self._config.timeouts
        allowed = timeouts.frame_age + timeouts.inference + (step.index + late + 1) * self._period
        age = (self._clock.ros() - step.stamp) / 1e9
        if timeouts.frame_age and age > allowed:
            found = f"{age:.3g} s old when its motion was to be sent, allowed {allowed:.3g} s"
            raise Refused(Reason.FRAME_OLD, found)

    def send(self, step: StepResult, dt: float, *, ahead: bool) -> bool:
        """Send the commands of a step that lasts ``dt`` seconds, or the first one towards it; True if sent.

        Raises:
            Refused: Nothing may be made or sent.
        """
        commands = step.commands
        if ahead and self._between.divides:
            onward = self._stepper.onward(self._fresh_joints(), self._between.interval, dt, 0.0)
            commands = onward + tuple(command for command in commands if command.hold)
        began = self._clock.steady()
        if not self._send(commands, self._stepper.executed):
            return False
        self._context.stats.record({"publish": 1e3 * (self._clock.steady() - began)})
        return True

    def begin(self, step: StepResult, end: float) -> None:
        """Send commands on the way to a step that was sent; the next one is due at ``end``."""
        self._between.begin(step, end)

    def send_between(self, *, asking: bool) -> bool:
        """Send the command that is due between two steps, or towards rest after the last; True if sent.

        Once the arm rests, nothing more is sent. ``asking``: the policy has not answered in time.

        Raises:
            Refused: Nothing may be made or sent.
        """
        step, rested = self._between.step, self._between.rests
        assert step is not None
        dt, left, passed, late = self._between.next(self._clock.steady())
        if late and not rested and asking and not self.is_void(self.task):
            self._safety.report(Reason.PLAN_EMPTY, "see control.refill_steps and control.execute_steps")
        if late and not self._stepper.is_moving:
            return False
        self.check_age(step, late)
        return self._send(
            self._stepper.onward(self._fresh_joints(), dt, left, passed), self._stepper.sent, to_rest=late > 0
        )

    def _fresh_joints(self) -> Mapping[str, JointState]:
        return self._context.inputs.fresh_joints(self._config.timeouts.joint_state)

    def _send(self, commands: Sequence[Command], done: Callable[[], None], *, to_rest: bool = False) -> bool:
        """Send the commands if that is allowed, and call ``done``; True if they were sent.

        A process that was suspended between the watchdog's check and the sending checks again. What remains is the
        sending itself: a driver that wants certainty looks at the stamp. A loop that was told to end sends nothing:
        it may have been left behind, and the arm be armed for another. Coming to rest needs no valid task.
        """
        send = self._prepare(commands)
        while not self.ended:
            self._supervise()
            looked = self._clock.steady()
            with self._safety.motion() as may_move:
                if self._clock.steady() - looked > _SUPERVISION_VALID:
                    continue
                interrupted = self._safety.interruptions != self._interruptions
                void = interrupted if to_rest else self.is_void(self.task)
                allowed = may_move and not void and not self.ended
                if allowed:
                    send()
                    done()
                    self._context.stats.commanded()
                return allowed
        return False
