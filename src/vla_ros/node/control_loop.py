"""The control loop: sends the steps of the plan when they are due, and requests new chunks.

Receiving threads only store data; the loop decides and sends. It uses each frame once and never waits without a
timeout. The live node runs :meth:`ControlLoop.run_once` on its own thread, replay and tests on a simulated clock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from vla_ros.config import VELOCITY_OUTPUTS
from vla_ros.control.command import Command
from vla_ros.control.joints import together
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import COMMANDED, SHOWN, StepResult
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import Level, Reason, Refused
from vla_ros.errors import ImageError
from vla_ros.node.ahead import InferenceRequest, InferenceRunner
from vla_ros.node.between import Between
from vla_ros.node.context import Context
from vla_ros.node.frames import Frames
from vla_ros.node.receiver import Frame
from vla_ros.node.sender import Sender
from vla_ros.node.stepper import Inference, Stepper

_PATIENCE = 0.1  # s; the longest wait before the loop checks whether it should end


class Did(Enum):
    """Result of one iteration of the loop."""

    WAITED = "nothing was due, or no frame arrived"
    INFERRED = "the policy returned a chunk, and its first step was executed"
    CONTINUED = "the next step of the plan was executed"
    BETWEEN = "a command between two steps was due"


class ControlLoop:
    """Runs a :class:`Stepper` on live inputs; for ``prepare`` and ``supervise`` see :class:`Sender`.

    There is one mailbox for each of ``camera.topics``. The loop infers on new frames of the first camera, together
    with the newest frames of the others.
    """

    def __init__(
        self,
        context: Context,
        stepper: Stepper,
        mailboxes: Sequence[Mailbox[Frame]],
        prepare: Callable[[Sequence[Command]], Callable[[], None]],
        supervise: Callable[[], None],
    ) -> None:
        self._context = context
        self._clock, self._inputs, self._safety = context.clock, context.inputs, context.safety
        self._stepper = stepper
        self._frames = Frames(context, mailboxes)
        self._config = context.options.current
        self._stepper.configure(self._config)
        velocities = any(arm.output in VELOCITY_OUTPUTS for arm in self._config.arms)
        self._limiter = RateLimiter(self._config.control.rate_hz, velocities=velocities)
        self._between = Between(self._limiter, self._config.control.command_rate_hz)
        self._sender = Sender(context, stepper, self._limiter, self._between, prepare, supervise)
        self._supervise = supervise
        self._held: set[Reason] = set()
        self._joints = {arm.name: len(arm.arm_names) for arm in stepper.controller.arms}
        self._ended = threading.Condition()
        self._runner = InferenceRunner(context, stepper, self._ended)
        self._unconfigured = False  # options changed during an inference
        self._failed: tuple[Refused, Frame] | None = None  # the arm decelerates, then holds for this reason
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run on a new thread until :meth:`stop`."""
        self._thread = threading.Thread(target=self._run, name="vla_control", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False before :meth:`start`, after :meth:`stop`, and after the thread ended with an error."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 10.0) -> bool:
        """Stop permanently after the current inference; return False if that takes over ``timeout`` seconds."""
        with self._ended:
            self._sender.ended = True
            self._ended.notify_all()
        thread, self._thread = self._thread, None
        until = self._clock.steady() + timeout
        if thread is not None:
            thread.join(timeout)
        ended = self._runner.close(max(0.0, until - self._clock.steady()))
        return ended and (thread is None or not thread.is_alive())

    def _run(self) -> None:
        try:
            while not self._sender.ended:
                self.run_once()
        except BaseException as error:
            self._safety.stop(Reason.THREAD_DIED, f"{type(error).__name__}: {error}")
            self._context.logger.error(f"the control thread ended: {type(error).__name__}: {error}")
            raise
        if self._runner.pending is not None:
            told = Refused(Reason.TASK_CHANGED, "the node was stopped during the inference")
            self._refuse(told, self._runner.pending.frame)

    def run_once(self) -> Did:
        """Run one iteration: wait at most 0.1 s for the next event and handle it.

        An event is a due step of the plan, a due command between steps, a finished inference, or a new frame.
        """
        self._take_options()
        self._wait(min(self._step_due, self._between.due) - self._clock.steady())
        if self._sender.ended:
            return Did.WAITED
        self._discard_void_plan()
        did = self._step() if self._step_due <= self._clock.steady() else Did.WAITED
        if did is Did.WAITED and self._between.due <= self._clock.steady():
            self._send_between()
            return Did.BETWEEN
        if did is Did.WAITED:  # the graph thread may be blocked, such as by a log that nobody reads
            self._supervise()
        return did

    def _step(self) -> Did:
        """Execute the step that is due, from a new chunk or from the plan, and request the next chunk in time."""
        idle = self._runner.pending is None
        if idle and self._is_time_to_infer and (self._planned or self._frames.wait(self._patience)):
            self._ask()
        if self._runner.finished:
            self._land()
            return Did.INFERRED
        if not self._planned:
            return Did.WAITED
        self._continue()
        return Did.CONTINUED

    @property
    def _step_due(self) -> float:
        """Earliest time of the next step or frame; infinite while the loop waits for an inference or for rest."""
        inferring = self._runner.pending is not None
        if self._failed is not None or (inferring and not self._planned and not self._runner.finished):
            return math.inf
        if not inferring and not self._planned:
            return self._limiter.frame_due
        return max(self._limiter.planned_due, self._between.rest_due)

    @property
    def _is_ahead(self) -> bool:
        """True if the plan is executed while the policy infers."""
        return self._stepper.schedule.kind != "sync"

    @property
    def _is_beside(self) -> bool:
        """True if commands are sent during an inference: the plan's steps, or commands towards its last step."""
        return self._is_ahead or self._config.control.command_rate_hz > 0

    @property
    def _planned(self) -> int:
        """Number of steps that can be executed without another chunk."""
        schedule = self._stepper.schedule
        return schedule.left if self._is_ahead else schedule.remaining

    @property
    def _is_time_to_infer(self) -> bool:
        """True if the plan might run out before the arrival of a chunk that is requested now."""
        schedule = self._stepper.schedule
        if schedule.wants_chunk or not self._is_ahead:
            return schedule.wants_chunk
        return schedule.left <= self._runner.refill(self._config.control, self._limiter.period)

    def _take_options(self) -> None:
        """Apply changed options between steps; the policy gets them once it is not inferring."""
        config, inferring = self._context.options.current, self._runner.pending is not None
        if config is not self._config or (self._unconfigured and not inferring):
            self._config, self._unconfigured = config, inferring
            self._limiter.rate_hz = config.control.rate_hz
            self._between.rate_hz = config.control.command_rate_hz
            self._stepper.configure(config, inferring=inferring)

    def _wait(self, seconds: float) -> None:
        """Wait until a step is due, but at most ``seconds`` and at most 0.1 s."""
        if seconds > 0:
            with self._ended:
                self._clock.wait_for(
                    self._ended,
                    lambda: self._sender.ended or self._step_due <= self._clock.steady(),
                    min(seconds, _PATIENCE),
                )

    def _discard_void_plan(self) -> None:
        """Discard a plan from another task or from before a hold, so that the arm resumes with a fresh frame.

        If motion is still allowed, the arm first decelerates to rest.
        """
        if self._runner.pending is None:
            self._take_task()
        if self._sender.is_interrupted():
            self._context.stats.execution.interrupted()
            self._stepper.schedule.reset()
            self._rest()
        elif self._sender.is_void(self._sender.task):
            self._stepper.schedule.reset()
            self._sender.ease()

    def _take_task(self) -> None:
        """Reset the policy and the plan if the task has changed or the arm was armed."""
        task = self._inputs.snapshot.epoch, self._safety.armings
        if self._sender.task != task:
            self._sender.task = task
            self._stepper.new_task()
            self._context.stats.execution.interrupted()
            self._sender.ease()

    @property
    def _patience(self) -> float:
        """Longest wait for a frame, in seconds."""
        return max(0.0, min(_PATIENCE, self._between.due - self._clock.steady()))

    def _ask(self, position: int | None = None) -> None:
        """Infer on the newest frames if the first camera has one (see :meth:`InferenceRunner.start`)."""
        self._take_task()  # first: a frame from before an arming must not belong to the task after it
        frame = self._frames.waiting()
        if frame is None:
            return
        if not self._planned:
            frame = self._frames.newer(frame, self._limiter, self._patience)
        self._frames.use(frame)
        fresh = self._sender.fresh_joints()
        inputs = replace(self._inputs.snapshot, joints=together(fresh.values()), arms=fresh)
        task, period = self._sender.task, self._limiter.period
        self._runner.start(
            frame, self._frames.data, inputs, task, period, beside=self._is_beside, position=position
        )

    def _land(self) -> None:
        """Load the new chunk into the schedule and execute the step of it that is due."""
        request = self._runner.pending
        assert request is not None
        try:
            answer = self._load(request)
        except ImageError as error:
            self._context.watchdog.images(self._clock.now(), readable=False)
            self._refuse(Refused(Reason.IMAGE_INVALID, str(error)), request.frame)
            return
        except Refused as refused:
            if refused.reason is Reason.SERVER_LOST and self._planned:
                # Also if it is back already; Sender.check holds when it has been lost for too long.
                self._frames.refuse(request.frame, refused.reason, refused.detail, holds=False)
                return
            if refused.reason.level is not Level.HOLD:
                self._refuse(refused, request.frame)
                return
            self._failed = refused, request.frame
            self._stepper.schedule.reset()
            if not self._sender.ease():
                self._rest()
            return
        self._context.stats.record({"wait": 1e3 * request.began - request.frame.arrived.steady / 1e6})
        self._take_options()  # limits tightened during the inference apply to this command
        now = self._clock.steady()
        dt = self._limiter.planned_time(now) if request.beside else self._limiter.step_time(request.began)
        reference = self._inputs.joints_at(request.frame.stamp)
        step = self._stepper.next_command(self._sender.fresh_joints(), dt, reference, answer)
        self._context.stats.record(step.stages_ms)
        position = self._stepper.schedule.position
        self._execute(step, dt, request)
        if self._planned and self._is_time_to_infer:
            self._ask(position)  # a period later it may be too late

    def _load(self, request: InferenceRequest) -> Inference:
        """Switch to the chunk that the policy returned. Raises Refused if it is invalid, late or void."""
        schedule = self._stepper.schedule
        answer, in_time = self._runner.take()
        self._context.watchdog.images(self._clock.now(), readable=True)
        refused = None
        if not in_time:
            refused = Refused(Reason.INFERENCE_LATE, f"took over {self._config.timeouts.inference:g} s")
        elif self._sender.is_void(request.task):
            came = "an instruction, a reset or an arming came during the inference"
            refused = Refused(Reason.TASK_CHANGED, came)
        elif request.interruptions != self._safety.interruptions:
            refused = Refused(Reason.TASK_CHANGED, "a hold, a stop or a disarm came during the inference")
        else:
            late = self._clock.steady() - self._limiter.planned_due
            schedule.load(answer.chunk, request.position, rested=late > 0.5 * self._limiter.period)
            if not schedule.left:
                refused = Refused(Reason.INFERENCE_LATE, "all steps of the chunk were due before it arrived")
        if refused is not None:
            schedule.reset()
            raise refused
        return answer

    def _continue(self) -> None:
        """Execute the next step of the plan."""
        dt = self._limiter.planned_time(self._clock.steady())
        self._execute(self._stepper.next_command(self._sender.fresh_joints(), dt), dt, None)

    def _execute(self, step: StepResult, dt: float, request: InferenceRequest | None) -> None:
        """Send a step that lasts ``dt`` seconds; ``request`` is given only for the first step of a chunk."""
        made = self._clock.steady()
        sent = self._finish(step, dt, request.frame if request else None)
        now = self._clock.steady()
        if request is None or request.beside:
            self._limiter.executed(now, None if request is None or self._is_ahead else request.began)
        else:
            self._limiter.answered(request.began, now)
        if not sent:
            return
        self._context.stats.execution.sent(step, self._joints, self._clock.now(), self._limiter.period)
        if self._is_beside:
            self._between.begin(step, made, self._limiter.planned_due)
        else:  # control.command_rate_hz may have been set to 0 since the step before
            self._between.stop()

    def _finish(self, step: StepResult, dt: float, frame: Frame | None) -> bool:
        """Publish the action and, if allowed, send the step's command; return True if it was sent."""
        self._context.sink.step(step)
        try:
            if step.refused is not None:
                raise step.refused
            self._sender.check(step)
            for reason in self._held:
                self._safety.clear(reason)
            self._held.clear()
            sent = self._sender.send(step, dt, beside=self._is_beside)
        except Refused as refused:
            self._stepper.schedule.reset()
            self._rest()
            self._refuse(refused, frame)
            return False
        now, stats = self._clock.now(), self._context.stats
        if not sent:
            self._stepper.schedule.reset()  # a hold may end before the next iteration
            self._rest()
        if frame is None:
            return sent
        # Also while disarmed, because a dry run shows the age that motion would have.
        total = (now.steady - frame.arrived.steady) / 1e6
        stats.record({"frame_age": (now.ros - frame.stamp) / 1e6, "total": total})
        outcome = COMMANDED if sent else SHOWN
        self._frames.finish(outcome, ended=now.ros, stages_ms=step.stages_ms)
        return sent

    def _send_between(self) -> None:
        """Send the command that is due between two steps, or during deceleration after the last step."""
        try:
            sent = self._sender.send_between(dry=self._is_ahead and self._runner.pending is not None)
        except Refused as refused:
            self._refuse(refused, None)
            sent = False
        if not sent:
            self._rest()

    def _rest(self) -> None:
        """Stop sending commands between steps, and hold if an inference failed."""
        self._between.stop()
        failed, self._failed = self._failed, None
        if failed is not None:
            self._refuse(*failed)

    def _refuse(self, refused: Refused, frame: Frame | None) -> None:
        """Hold, stop or count according to the reason's level; a hold ends with the next good step."""
        reason, detail = refused.reason, refused.detail
        if reason.level is Level.HOLD:
            self._held.add(reason)
            self._safety.hold(reason, detail)
        elif frame is None:
            self._safety.report(reason, detail)
        if frame is not None:
            self._frames.refuse(frame, reason, detail)
        self._context.throttled.log(reason.value, f"{reason.value}: {detail}")
