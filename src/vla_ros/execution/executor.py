"""Executes the steps of the plan, the commands between them, and the deceleration after the last one."""

import math
from collections.abc import Mapping, Sequence

from vla_ros.config import VELOCITY_OUTPUTS, Config
from vla_ros.control.command import Command
from vla_ros.control.interpolator import CommandInterpolator
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.mode import NO_TASK, Mode, TaskId
from vla_ros.control.outcome import COMMANDED, SHOWN, StepResult
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import OF_PERSON, Level, Reason, Refused
from vla_ros.control.robot import RobotController
from vla_ros.control.safety import State
from vla_ros.control.schedule import ActionSchedule
from vla_ros.control.suspension import LONGEST
from vla_ros.errors import VlaRosError
from vla_ros.execution.camera_frames import Frame, NewestFrames
from vla_ros.execution.context import Context
from vla_ros.execution.gate import CommandGate
from vla_ros.execution.source import ActionSource
from vla_ros.types import JointState


class StepExecutor:
    """Sends the commands of all arms through ``gate`` while motion is allowed. Used from the control thread.

    ``config`` has the rates. ``mode`` is the mode in which it may move the arm. ``task`` is what the
    plan belongs to; once ``ended`` is True, nothing is sent.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        source: ActionSource,
        schedule: ActionSchedule,
        controller: RobotController,
        mailboxes: Sequence[Mailbox[Frame]],
        gate: CommandGate,
        mode: Mode = Mode.AUTONOMOUS,
    ) -> None:
        self._context, self._source, self._gate, self._mode = context, source, gate, mode
        self._schedule, self._controller = schedule, controller
        self._clock, self._safety = context.clock, context.safety
        velocities = any(arm.output in VELOCITY_OUTPUTS for arm in config.arms)
        self.limiter = RateLimiter(config.control.rate_hz, velocities=velocities)
        self.frames = NewestFrames(context, mailboxes, self.limiter)
        self.interpolator = CommandInterpolator(self.limiter, config.control.command_rate_hz)
        self._joint_counts = {arm.name: len(arm.joint_names) for arm in controller.arms}
        self._interruptions = 0  # count at the last check of the plan
        self._joints_read, self._resumed = 0.0, -math.inf  # when read_joints() was called; Suspension.resumed then
        self._held: set[Reason] = set()  # until the next good step
        self._failed: tuple[Refused, Frame] | None = None  # the arm decelerates, then holds for this reason
        self._armings = self._safety.armings  # count when commands last began at the measured positions
        self.task = NO_TASK
        self.ended = False

    @property
    def is_failing(self) -> bool:
        """True while the arm decelerates because an inference failed."""
        return self._failed is not None

    @property
    def newest_task(self) -> TaskId:
        return TaskId(self._context.inputs.snapshot.epoch, self._safety.armings, self._safety.handovers)

    def is_void(self, task: TaskId) -> bool:
        """Return True if ``task`` has ended: by an instruction, a reset, an arming or a handover.

        A task that began after a handover, because the loop had not noticed it, is void as well.
        """
        return task != self.newest_task or self._safety.mode is not self._mode

    def take_interruption(self) -> bool:
        """Return True if motion is not allowed, or was interrupted since the last call."""
        before, self._interruptions = self._interruptions, self._safety.interruptions
        return before != self._interruptions or not self._safety.may_move

    def notice_arming(self) -> None:
        """Begin at the measured positions after an arming: while disarmed, somebody may have moved the arm."""
        if self._armings != self._safety.armings:
            self._armings = self._safety.armings
            self._controller.restart()

    def read_joints(self) -> Mapping[str, JointState]:
        """Return each arm's newest joint state, unless it is stale or from before a suspension.

        Commands must be sent soon after this call.
        """
        self._joints_read, self._resumed = self._clock.steady(), self._context.suspension.resumed
        return self._context.inputs.fresh_joints(self._context.options.current.timeouts.joint_state, self._resumed)

    def execute(
        self, step: StepResult, dt: float, *, frame: Frame | None = None, interpolated: bool
    ) -> float | None:
        """Publish the action of a step that lasts ``dt`` seconds and, if that is allowed, send its commands.

        ``frame`` is given for the first step of a chunk. ``interpolated`` means that further commands may follow
        before the next step; if the step is split into several commands, only the first one of each arm is sent.
        Returns when it began to be sent, or None if it was not sent.
        """
        began = self._clock.steady()
        self._context.sink.on_step(step)
        try:
            if step.refused is not None:
                raise step.refused
            self._check(step)
            self.end_holds()
            commands = step.commands
            if interpolated and self.interpolator.commands_per_step > 1:
                first = self._controller.interpolate(self.read_joints(), self.interpolator.interval, dt, 0.0)
                commands = first + tuple(command for command in commands if command.hold)
            made = self._clock.steady()
            sent = self._send(commands, step)
            if sent:
                self._context.stats.record({"publish": 1e3 * (self._clock.steady() - made)})
        except Refused as refused:
            self._schedule.reset()
            self.rest()
            self.hold_for(refused, frame)
            return None
        if not sent:
            self._schedule.reset()  # a hold may end before the next iteration
            self.rest()
        now, stats = self._clock.now(), self._context.stats
        if frame is not None:
            # Also while disarmed: the age that motion would have.
            total = (now.steady - frame.arrived.steady) / 1e6
            stats.record({"frame_age": (now.ros - frame.stamp) / 1e6, "total": total})
            self.frames.finish(COMMANDED if sent else SHOWN, ended=now.ros, stages_ms=step.stages_ms)
        if not sent:
            return None
        stats.execution.sent(step, self._joint_counts, now, self.limiter.period)
        return began

    def interpolate(self, *, plan_is_empty: bool) -> None:
        """Send the command that is due between two steps, or during the deceleration after the last one.

        Once the arm rests, nothing more is sent. With ``plan_is_empty``, the next chunk is late.
        """
        step, rested = self.interpolator.step, self.interpolator.rests
        assert step is not None
        dt, remaining, elapsed, late = self.interpolator.advance(self._clock.steady())
        if late and not rested and plan_is_empty and not self.is_void(self.task):
            self._safety.react(Reason.PLAN_EMPTY, "see control.refill_steps and control.execute_steps")
        sent = False
        if not late or self._controller.is_moving:
            try:
                commands = self._controller.interpolate(self.read_joints(), dt, remaining, elapsed)
                sent = self._send(commands, step, late)
            except Refused as refused:
                self.hold_for(refused, None)
        if not sent:
            self.rest()

    def decelerate(self) -> bool:
        """Decelerate with further commands; return False if none are needed."""
        self.interpolator.decelerate()
        return self.interpolator.step is not None and self._controller.is_moving

    def rest(self) -> None:
        """Stop sending commands between steps, and hold if an inference failed."""
        self.interpolator.stop()
        failed, self._failed = self._failed, None
        if failed is not None:
            self.hold_for(*failed)

    def fail(self, refused: Refused, frame: Frame) -> None:
        """Discard the plan, decelerate, then refuse the frame."""
        self._failed = refused, frame
        self._schedule.reset()
        if not self.decelerate():
            self.rest()

    def end_holds(self, but: frozenset[Reason] = frozenset()) -> None:
        """End the holds of :meth:`hold_for`, ``but`` for these."""
        for reason in self._held - but:
            self._safety.clear(reason)
        self._held &= but

    @property
    def holds_alone(self) -> bool:
        """True if only refused steps, and a person's input, hold the arm: the next good step ends that."""
        status = self._safety.status
        return status.state is State.HOLDING and status.holds.keys() <= self._held | OF_PERSON

    def hold_for(self, refused: Refused, frame: Frame | None) -> None:
        """Hold, stop or count according to the reason's level; a hold ends with the next good step."""
        reason, detail = refused.reason, refused.detail
        if reason.level is Level.HOLD:
            self._held.add(reason)
            self._safety.hold(reason, detail)
        elif frame is None:
            self._safety.react(reason, detail)
        if frame is not None:
            self.frames.report_unused(frame, reason, detail)
        self._context.throttled.log(reason.value, f"{reason.value}: {detail}")

    def _check(self, step: StepResult, late: int = 0) -> None:
        """Raise Refused if a step's motion, which lags by ``late`` periods, must not be sent.

        ``server_lost``: the source has lost its server for ``timeouts.server_lost``.

        ``frame_old``: the step's frame is older than ``timeouts.frame_age`` plus ``timeouts.inference`` plus the
        step's offset. The watchdog checks frames only on arrival; this check detects a suspended process, or a
        frame that waited for a slow inference.
        """
        timeouts = self._context.options.current.timeouts
        lost = self._source.lost
        if lost is not None and lost.seconds > timeouts.server_lost:
            raise Refused(Reason.SERVER_LOST, f"{lost.why}; {lost.seconds:.3g} s ago")
        allowed = timeouts.frame_age + timeouts.inference + (step.index + late + 1) * self.limiter.period
        age = (self._clock.ros() - step.stamp) / 1e9
        if timeouts.frame_age and age > allowed:
            found = f"{age:.3g} s old when its motion was due, allowed {allowed:.3g} s"
            raise Refused(Reason.FRAME_OLD, found)

    def _send(self, commands: Sequence[Command], step: StepResult, late: int | None = None) -> bool:
        """Send the commands if that is allowed; return True if they were sent.

        Commands that were made long before, or before the process was suspended, are not sent. Once the loop has
        ``ended``, nothing is sent, because another loop may own the arm. ``late`` is None for the step itself, and
        the number of periods since its end for a command after it; deceleration needs no valid task. Raises Refused
        as :meth:`_check` does.
        """
        write = self._gate.prepare(commands)
        if self.ended:
            return False
        with self._gate.open() as may_move:
            if not may_move or self.ended or not self._is_current(decelerates=bool(late)):
                return False
            self._check(step, late or 0)
            try:
                write()
            except VlaRosError as error:
                self._controller.sent(self._gate.write_failed(error))
                return False
            if late is None:
                self._schedule.sent()
            self._controller.sent()
            self._context.stats.commanded()
            for alone in filter(None, [command.refused for command in commands]):
                self._safety.count(alone.reason)
                self._context.throttled.log(alone.reason.value, f"{alone.reason.value}: {alone.detail}")
            return True

    def _is_current(self, *, decelerates: bool) -> bool:
        """True if nothing has ended the plan since its commands were made, at most :data:`LONGEST` seconds ago."""
        suspension = self._context.suspension
        interrupted = self._safety.interruptions != self._interruptions
        void = interrupted or (not decelerates and self.is_void(self.task))
        old = self._clock.steady() - self._joints_read > LONGEST or suspension.resumed != self._resumed
        return not (void or old)
