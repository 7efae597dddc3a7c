"""Moves the arms for one source: the steps of its plan, the commands between them, and the way to rest.

The control loop drives one executor for the policy, and :class:`~vla_ros.person.loop.PersonLoop` one for a person.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, Config
from vla_ros.control.command import Command
from vla_ros.control.interpolator import CommandInterpolator
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.mode import NO_TASK, Mode, TaskId
from vla_ros.control.outcome import COMMANDED, SHOWN, Inference, StepResult
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
from vla_ros.execution.states import InferenceRequest, MotionState
from vla_ros.types import JointState

_FORGETS = 0.02  # share of the time that a step was made too early by which the next ones are made later


class StepExecutor:
    """Sends the commands of all arms through ``gate`` while motion is allowed. Used from the control thread.

    Args:
        context: The node's context.
        config: The options, with the rates.
        source: Proposes the actions.
        schedule: The plan.
        controller: Makes the commands.
        gate: Lets commands through.
        mode: In which it may move the arms.
        mailboxes: Frames of each camera, if the source needs any.
        lead: The camera whose frames begin inferences.

    Attributes:
        motion: What moves the arms; ``TELEOPERATING`` is the control loop's.
        task: What the plan belongs to.
        ended: Once it is True, nothing is sent.
        frames: The newest frames, and their outcomes.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        source: ActionSource,
        schedule: ActionSchedule,
        controller: RobotController,
        gate: CommandGate,
        mode: Mode = Mode.AUTONOMOUS,
        mailboxes: Sequence[Mailbox[Frame]] = (),
        lead: int = 0,
    ) -> None:
        self._context, self._source, self._gate, self._mode = context, source, gate, mode
        self._schedule, self._controller = schedule, controller
        self._clock, self._safety = context.clock, context.safety
        velocities = any(arm.output in VELOCITY_OUTPUTS for arm in config.arms)
        self._limiter = RateLimiter(config.control.rate_hz, velocities=velocities)
        self._interpolator = CommandInterpolator(self._limiter, config.control.command_rate_hz)
        self._joint_counts = {arm.name: len(arm.joint_names) for arm in controller.arms}
        self._interruptions = 0  # count at the last check of the plan
        self._joints_read, self._resumed = 0.0, -math.inf  # when read_joints() was called; Suspension.resumed then
        self._held: set[Reason] = set()  # until the next good step
        self._failed: tuple[Refused, Frame] | None = None  # why the arms come to rest and then hold
        self._armings = self._safety.armings  # count when commands last began at the measured positions
        self.frames = NewestFrames(context, mailboxes, self._limiter, lead)
        self.motion = MotionState.IDLE
        self.task = NO_TASK
        self.ended = False
        self._ahead = 0.0  # s by which a step is made before it is due

    def configure(self, config: Config) -> None:
        """Apply changed options between steps; raises ConfigError if a joint has no range left."""
        self._limiter.rate_hz = config.control.rate_hz
        self._interpolator.rate_hz = config.control.command_rate_hz
        self._schedule.control = config.control
        self._controller.configure(config)

    # When something is due: seconds of the steady clock

    @property
    def period(self) -> float:
        """Duration of a step in seconds."""
        return self._limiter.period

    @property
    def interval(self) -> float:
        """Seconds between two commands."""
        return self._interpolator.interval

    @property
    def frame_due(self) -> float:
        """Earliest time to infer on a frame for the next step."""
        return self._limiter.frame_due

    @property
    def step_due(self) -> float:
        """Earliest time to make the plan's next step; during the deceleration, when a command is due."""
        due, interpolator = self._limiter.planned_due - self._ahead, self._interpolator
        return max(due, interpolator.due) if interpolator.rests else due

    @property
    def command_due(self) -> float:
        """Time of the next command between two steps or on the way to rest; infinite if there is none."""
        return self._interpolator.due

    @property
    def step_ends(self) -> float:
        """When the step that is being executed ends; now, if commands between steps can end it at any time."""
        return self._limiter.planned_due if self._interpolator.commands_per_step == 1 else self._clock.steady()

    @property
    def has_rested(self) -> bool:
        """True if the plan's next step was due more than half a period ago: the arms have come to rest since."""
        return self._clock.steady() - self._limiter.planned_due > 0.5 * self.period

    @property
    def is_concurrent(self) -> bool:
        """True if commands are sent while the source infers: the plan's steps, or those to its last step's end."""
        return self._schedule.is_ahead or self._interpolator.rate_hz > 0 or self._mode is Mode.CORRECTING

    # What has ended the plan

    @property
    def newest_task(self) -> TaskId:
        return TaskId(self._context.inputs.snapshot.epoch, self._safety.armings, self._safety.handovers)

    def is_void(self, task: TaskId | None = None) -> bool:
        """Return True if ``task`` (None: the plan's) was ended by an instruction, a reset, an arming or a handover.

        A task that began after a handover, because the loop had not noticed it, is void as well.
        """
        return (task or self.task) != self.newest_task or self._safety.mode is not self._mode

    def take_interruption(self) -> bool:
        """Return True if motion is not allowed, or was interrupted since the last call."""
        before, self._interruptions = self._interruptions, self._safety.interruptions
        return before != self._interruptions or not self._safety.may_move

    def notice_arming(self) -> None:
        """Begin at the measured positions after an arming: while disarmed, somebody may have moved the arm."""
        if self._armings != self._safety.armings:
            self._armings = self._safety.armings
            self._controller.restart()

    # Motion

    def read_joints(self) -> Mapping[str, JointState]:
        """Return each arm's newest joint state, unless it is stale or from before a suspension.

        Commands must be sent soon after this call.
        """
        self._joints_read, self._resumed = self._clock.steady(), self._context.suspension.resumed
        return self._context.inputs.fresh_joints(self._context.options.current.timeouts.joint_state, self._resumed)

    def step(self, request: InferenceRequest | None = None, inference: Inference | None = None) -> None:
        """Make and execute the plan's next step; a chunk's first one has a ``request`` and an ``inference``."""
        self._gate.keep_alive(steps=True)
        dt = self.step_duration(request)
        reference = self._context.inputs.joints_at(request.frame.stamp) if request is not None else None
        step = self._controller.make_step(self._schedule.next(), self.read_joints(), dt, reference, inference)
        if request is not None:
            self._context.stats.record(step.stages_ms)
        self.execute(step, dt, request)

    def step_duration(self, request: InferenceRequest | None = None) -> float:
        """Return the seconds until the next command after a step that is sent now."""
        if request is None or request.concurrent:
            return self._limiter.planned_duration(self._clock.steady())
        return self._limiter.step_duration(request.taken_at)

    def execute(self, step: StepResult, dt: float, request: InferenceRequest | None = None) -> float | None:
        """Send the commands of a step that lasts ``dt`` seconds when it is due, if that is allowed.

        If the step is split into several commands, only the first one of each arm is sent. Its action is published
        after that, in any case. Returns when it began to be sent, or None if it was not sent.
        """
        self._await_due()
        began, frame = self._clock.steady(), request.frame if request else None
        sent, refused = False, step.refused
        try:
            if refused is None:
                self._check(step)
                self.end_holds()
                commands = step.commands
                if self._interpolator.commands_per_step > 1:
                    first = self._controller.interpolate(self.read_joints(), self.interval, dt, 0.0)
                    commands = first + tuple(command for command in commands if command.hold)
                made = self._clock.steady()
                sent = self._send(commands, step)
        except Refused as error:
            refused = error.with_traceback(None)  # whose frames would keep the camera's image
        self._context.sink.on_step(step)
        now, stats = self._clock.now(), self._context.stats
        if not sent:
            self.halt()  # a hold may end before the next iteration
        if refused is not None:
            self.hold_for(refused, frame)
        elif frame is not None:
            # Also while disarmed: the age that motion would have.
            total = (now.steady - frame.arrived.steady) / 1e6
            stats.record({"frame_age": (now.ros - frame.stamp) / 1e6, "total": total})
            self.frames.finish(COMMANDED if sent else SHOWN, ended=now.ros, stages_ms=step.stages_ms)
        if request is not None and not request.concurrent:
            self._limiter.answered(request.taken_at, self._clock.steady())
        elif sent or self._mode is Mode.AUTONOMOUS:
            taken_at = None if request is None or self._schedule.is_ahead else request.taken_at
            self._limiter.sent(self._clock.steady(), taken_at)
        if not sent:
            return None
        stats.record({"publish": now.steady / 1e6 - 1e3 * made})
        stats.execution.sent(step, self._joint_counts, now, self.period)
        self.motion = MotionState.EXECUTING
        if self.is_concurrent:
            self._interpolator.begin(step, began, self._limiter.planned_due)
        else:  # control.command_rate_hz may have been set to 0 since the step before
            self._interpolator.stop()
        return began

    def continue_motion(self, start: float) -> None:
        """Bring the arms, which another one moves, to rest from ``start`` on, unless a step follows before."""
        if self._controller.is_moving:
            moving = StepResult(self._clock.ros(), 0, np.zeros(0))
            self._interpolator.begin(moving, start, start + self.period)
            self.motion = MotionState.EXECUTING

    def interpolate(self, *, plan_is_empty: bool) -> None:
        """Send the command that is due between two steps, or during the deceleration after the last one.

        Once the arm rests, nothing more is sent. With ``plan_is_empty``, the next chunk is late.
        """
        step, rested = self._interpolator.step, self._interpolator.rests
        assert step is not None
        dt, remaining, elapsed, late = self._interpolator.advance(self._clock.steady())
        if late and not rested and plan_is_empty and not self.is_void():
            self._safety.react(Reason.PLAN_EMPTY, "see control.refill_steps and control.execute_steps")
        if late and self.motion is MotionState.EXECUTING:
            self.motion = MotionState.DECELERATING
        sent = False
        if not late or self._controller.is_moving:
            try:
                commands = self._controller.interpolate(self.read_joints(), dt, remaining, elapsed)
                sent = self._send(commands, step, late)
            except Refused as refused:
                self.hold_for(refused, None)
        if not sent:
            self._rest()

    def _await_due(self) -> None:
        """Wait until a step that was made early is due, and learn how early the next ones must be made.

        At most by half of the time between two commands, which leaves none out. A late chunk says nothing.
        """
        most = self.interval / 2 if self._interpolator.commands_per_step > 1 else 0.0
        late = self._clock.steady() - self._limiter.planned_due
        if late < 2 * most:
            self._clock.sleep(max(0.0, min(-late, self._ahead)))
            self._ahead = min(max(self._ahead + late * (1.0 if late > 0 else _FORGETS), 0.0), most)

    def decelerate(self) -> bool:
        """Discard the plan, and decelerate with further commands; return False if none are needed."""
        self._schedule.reset()
        self._interpolator.decelerate()
        decelerates = self._interpolator.step is not None
        if self.motion is MotionState.EXECUTING:
            self.motion = MotionState.DECELERATING if decelerates else MotionState.IDLE
        return decelerates and self._controller.is_moving

    def halt(self) -> None:
        """Discard the plan, and send nothing more of it."""
        self._schedule.reset()
        self._rest()

    def fail(self, refused: Refused, frame: Frame) -> None:
        """Discard the plan, and refuse the frame: for a reason to hold, after a deceleration to rest."""
        if refused.reason.level is not Level.HOLD:
            self._schedule.reset()
            self.hold_for(refused, frame)
        elif self.decelerate():
            self._failed, self.motion = (refused, frame), MotionState.ABORTING
        else:
            self._rest()
            self.hold_for(refused, frame)

    def _rest(self) -> None:
        """Send no more commands between steps, and hold if an inference failed."""
        self._interpolator.stop()
        self.motion = MotionState.IDLE
        failed, self._failed = self._failed, None
        if failed is not None:
            self.hold_for(*failed)

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
        allowed = timeouts.frame_age + timeouts.inference + (step.index + late + 1) * self.period
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
        void = interrupted or (not decelerates and self.is_void())
        old = self._clock.steady() - self._joints_read > LONGEST or suspension.resumed != self._resumed
        return not (void or old)
