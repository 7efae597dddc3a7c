"""The control loop: sends the steps of the plan when they are due, and requests new chunks.

Receiving threads only store data; the loop decides and sends. It uses each frame once and never waits without a
timeout. Its state is a pair: what moves the arms, and where the request is (:mod:`vla_ros.execution.states`). The
live node runs :meth:`ControlLoop.run_once` on its own thread, replay and tests on a simulated clock.
"""

import gc
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from vla_ros.config import Config
from vla_ros.control.joints import together
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.mode import NO_TASK
from vla_ros.control.reasons import OF_POLICY, Reason, Refused
from vla_ros.errors import ImageError, VlaRosError
from vla_ros.execution.camera_frames import Frame
from vla_ros.execution.context import Context
from vla_ros.execution.executor import StepExecutor
from vla_ros.execution.gate import CommandGate
from vla_ros.execution.source import ActionSource
from vla_ros.execution.states import InferenceRequest, MotionState, RequestState
from vla_ros.node.inference import InferenceThread
from vla_ros.node.pipeline import ActionPipeline
from vla_ros.person.loop import PersonLoop
from vla_ros.process import keep_prompt

_PATIENCE = 0.1  # s; the longest wait before the loop checks whether it should end


class LoopResult(Enum):
    """Result of one iteration of the loop."""

    WAITED = "nothing was due, or no frame arrived"
    ANSWERED = "the policy answered, with a chunk whose first step was executed or with an error"
    CONTINUED = "the next step of the plan was executed"
    INTERPOLATED = "a command between two steps was due"


class ControlLoop:
    """Executes what ``source`` proposes, through ``gate``; ``person_loop`` moves it for a person.

    There is one mailbox for each of ``camera.topics``. The loop infers on new frames of the first camera that
    the policy uses, together with the newest frames of the others.
    """

    def __init__(
        self,
        context: Context,
        source: ActionSource,
        pipeline: ActionPipeline,
        mailboxes: Sequence[Mailbox[Frame]],
        gate: CommandGate,
        person_loop: PersonLoop | None = None,
    ) -> None:
        self._context, self._person_loop = context, person_loop
        self._clock, self._inputs, self._safety = context.clock, context.inputs, context.safety
        self._source, self._observer = source, pipeline.observer
        self._schedule, self._controller = pipeline.schedule, pipeline.controller
        self._gate, self._config = gate, context.options.current
        parts, lead = (source, self._schedule, self._controller, gate), pipeline.binding.lead
        self._executor = StepExecutor(context, self._config, *parts, mailboxes=mailboxes, lead=lead)
        self._frames = self._executor.frames
        self._ended = threading.Condition()
        self._inference = InferenceThread(context, source, pipeline, self._ended)
        self._unconfigured = False  # options changed during an inference
        self._accepted = self._config  # the last options that every part has applied
        self._thread: threading.Thread | None = None
        self._configure()

    def start(self) -> None:
        keep_prompt()
        self._thread = threading.Thread(target=self._run, name="vla_control", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False before :meth:`start`, after :meth:`stop`, and after a thread ended with an error."""
        return self._thread is not None and self._thread.is_alive() and not self._inference.died

    def stop(self, timeout: float = 10.0) -> bool:
        """Stop permanently after the current inference; return False if that takes over ``timeout`` seconds."""
        with self._ended:
            self._executor.ended = True
            self._ended.notify_all()
        thread, self._thread = self._thread, None
        until = self._clock.steady() + timeout
        if thread is not None:
            thread.join(timeout)
        ended = self._inference.close(max(0.0, until - self._clock.steady()))
        gc.unfreeze()
        return ended and (thread is None or not thread.is_alive())

    def _run(self) -> None:
        try:
            while not self._executor.ended:
                self.run_once()
        except BaseException as error:
            self._safety.stop(Reason.THREAD_DIED, f"{type(error).__name__}: {error}")
            self._context.logger.error(f"the control thread ended: {type(error).__name__}: {error}")
            raise
        if self._inference.pending is not None:
            stopped = Refused(Reason.TASK_CHANGED, "the node was stopped during the inference")
            self._executor.hold_for(stopped, self._inference.pending.frame)

    @property
    def state(self) -> tuple[MotionState, RequestState]:
        """What moves the arms, and where the request for the next chunk is."""
        corrects = self._person_loop is not None and self._person_loop.has_begun
        return MotionState.TELEOPERATING if corrects else self._executor.motion, self._inference.state

    def run_once(self) -> LoopResult:
        """Run one iteration: wait at most 0.1 s for the next event and handle it.

        An event is a due step of the plan, a due command between steps, a finished inference, or a new frame.
        """
        self._take_options()
        self._gate.keep_alive()
        if self._person_loop is not None and self._person_loop.acts:
            return self._correct(self._person_loop)
        self._wait(min(self._step_due, self._executor.command_due), lambda: self._step_due <= self._clock.steady())
        if self._executor.ended:
            return LoopResult.WAITED
        self._take_options()  # limits tightened meanwhile apply to the next command
        self._discard_void_plan()
        did = self._step() if self._step_due <= self._clock.steady() else LoopResult.WAITED
        if did is LoopResult.WAITED and self._executor.command_due <= self._clock.steady():
            infers = self._inference.state is not RequestState.NONE
            self._executor.interpolate(plan_is_empty=self._schedule.is_ahead and infers)
            return LoopResult.INTERPOLATED
        if did is LoopResult.WAITED:  # the graph thread may be blocked, such as by a log that nobody reads
            self._gate.supervise()
        return did

    def _correct(self, person_loop: PersonLoop) -> LoopResult:
        """Let a person move the arm, and drop what the policy still returns."""
        if not person_loop.has_begun:
            self._context.stats.execution.interrupted()
            self._executor.halt()
            self._executor.end_holds(OF_POLICY)
            self._executor.notice_arming()
            person_loop.begin(self._executor.step_ends)
        if self._inference.state is RequestState.FINISHED:
            self._receive_chunk()
        due = person_loop.run()
        if not person_loop.acts:
            self._frames.discard()
            return LoopResult.WAITED
        self._wait(due, lambda: self._inference.state is RequestState.FINISHED)
        return LoopResult.CONTINUED

    def _step(self) -> LoopResult:
        """Execute the step that is due, from a new chunk or from the plan, and request the next chunk in time."""
        asks = self._inference.is_due(self._executor.period)
        if asks and (self._schedule.planned or self._frames.wait(self._patience)):
            self._request_chunk()
        if self._inference.state is RequestState.FINISHED:
            self._receive_chunk()
            return LoopResult.ANSWERED
        if not self._schedule.planned:
            return LoopResult.WAITED
        self._executor.step()
        return LoopResult.CONTINUED

    @property
    def _step_due(self) -> float:
        """Earliest time of the next step or frame; infinite while the loop waits for an inference or for rest."""
        motion, request = self.state
        if motion is MotionState.ABORTING:
            return math.inf
        pending = self._inference.pending
        if request is RequestState.FINISHED and pending is not None and not pending.concurrent:
            return -math.inf  # its frame was taken when a step was due
        if self._schedule.planned or request is RequestState.FINISHED:
            return self._executor.step_due
        return self._executor.frame_due if request is RequestState.NONE else math.inf

    def _take_options(self) -> None:
        """Apply changed options between steps; the policy gets them once it is not inferring."""
        config, inferring = self._context.options.current, self._inference.state is not RequestState.NONE
        if config is not self._config or (self._unconfigured and not inferring):
            try:
                self._config, self._unconfigured = config, inferring
                self._configure()
                if not inferring:
                    self._accepted = config
                    self._safety.clear(Reason.OPTIONS_REFUSED)
            except Exception as error:  # of a third party's policy, or a range that is empty
                self._keep_options(config, error)

    def _keep_options(self, refused: Config, error: Exception) -> None:
        """Return to the options that every part has applied; the policy holds until it accepts others."""
        self._config, self._unconfigured = self._accepted, True
        self._context.options.give_up(refused, self._accepted)
        self._configure()
        self._unconfigured = False
        name = "" if isinstance(error, VlaRosError) else f"{type(error).__name__}: "
        self._safety.hold(Reason.OPTIONS_REFUSED, f"{name}{error}")
        self._context.logger.error(f"changed options could not be applied, the old ones stay: {name}{error}")

    def _configure(self) -> None:
        self._executor.configure(self._config)
        self._gate.configure(self._config)
        if self._controller.collision is not None:
            self._controller.collision.configure(self._config)
        if self._person_loop is not None:
            self._person_loop.configure(self._config)
        if not self._unconfigured:
            self._source.configure(self._config)
            self._observer.timeouts = self._config.timeouts

    def _wait(self, due: float, ready: Callable[[], bool]) -> None:
        """Wait until ``due`` (steady clock, s), but at most 0.1 s, or until ``ready`` or the end."""
        seconds = min(due - self._clock.steady(), _PATIENCE)
        if seconds > 0:
            with self._ended:
                self._clock.wait_for(self._ended, lambda: self._executor.ended or ready(), seconds)

    def _discard_void_plan(self) -> None:
        """Discard a plan from another task or from before a hold, so that the arm resumes with a fresh frame.

        If motion is still allowed, the arm first decelerates to rest.
        """
        if self._inference.state is RequestState.NONE:
            self._take_task()
        if self._executor.take_interruption():
            self._context.stats.execution.interrupted()
            self._executor.halt()
        elif self._executor.is_void():
            self._executor.decelerate()

    def _take_task(self) -> None:
        """If there is a new task, forget the plan and what the policy knows of the one before."""
        self._executor.notice_arming()
        task = self._executor.newest_task
        if self._executor.task != task:
            if self._executor.task is not NO_TASK and self._executor.task.handovers != task.handovers:
                self._frames.discard()  # a person had the arm, perhaps too briefly for the loop to notice
            self._executor.task = task
            self._source.reset()  # not the controller: a hold must not drop a gripped object
            self._observer.begin_task()
            self._context.stats.execution.interrupted()
            self._executor.decelerate()

    @property
    def _patience(self) -> float:
        """Longest wait for a frame, in seconds."""
        return max(0.0, min(_PATIENCE, self._executor.command_due - self._clock.steady()))

    def _request_chunk(self, position: int | None = None) -> None:
        """Infer on the newest frames if the first camera has one (see :meth:`InferenceThread.start`).

        The chunk begins at ``position`` of the schedule: at the step just sent if the frame is no newer, or, with
        None, at the next step.
        """
        self._take_task()  # first: a frame from before an arming must not belong to the task after it
        frame = self._frames.take(0.0 if self._schedule.planned else self._patience)
        if frame is None:
            return
        fresh = self._executor.read_joints()
        inputs = replace(self._inputs.snapshot, joints=together(fresh.values()), arms=fresh)
        begins = self._schedule.position if position is None or not self._schedule.left else position
        task, interruptions, concurrent = (
            self._executor.task,
            self._safety.interruptions,
            self._executor.is_concurrent,
        )
        request = InferenceRequest(frame, self._clock.steady(), begins, task, interruptions, concurrent)
        self._inference.start(request, self._frames.messages, inputs, self._executor.period)

    def _receive_chunk(self) -> None:
        """Load the new chunk into the schedule and execute the step of it that is due."""
        request = self._inference.pending
        assert request is not None
        try:
            inference, in_time = self._inference.take()
            self._context.watchdog.see_images(self._clock.now(), readable=True)
            self._check_chunk(request, in_time=in_time)
            self._schedule.load(inference.chunk, request.position, rested=self._executor.has_rested)
            if not self._schedule.left:
                raise Refused(Reason.INFERENCE_LATE, "all steps of the chunk were due before it arrived")
        except ImageError as error:
            self._context.watchdog.see_images(self._clock.now(), readable=False)
            self._executor.hold_for(Refused(Reason.IMAGE_INVALID, str(error)), request.frame)
            return
        except Refused as refused:
            if refused.reason is Reason.SERVER_LOST and self._schedule.planned:
                # Also if it is back already; StepExecutor holds when it has been lost for too long.
                self._frames.report_unused(request.frame, refused.reason, refused.detail, holds=False)
            else:
                self._executor.fail(refused, request.frame)
            return
        self._context.stats.record({"wait": 1e3 * request.taken_at - request.frame.arrived.steady / 1e6})
        self._take_options()  # limits tightened during the inference apply to this command
        position = self._schedule.position
        self._executor.step(request, inference)
        if self._schedule.planned and self._inference.is_due(self._executor.period):
            self._request_chunk(position)  # a period later it may be too late

    def _check_chunk(self, request: InferenceRequest, *, in_time: bool) -> None:
        """Raise Refused if a chunk is late, or its task or the motion has ended since the request."""
        if not in_time:
            raise Refused(Reason.INFERENCE_LATE, f"took over {self._config.timeouts.inference:g} s")
        if self._executor.is_void(request.task):
            why = "an instruction, a reset, an arming or a takeover came during the inference"
            raise Refused(Reason.TASK_CHANGED, why)
        if request.interruptions != self._safety.interruptions:
            raise Refused(Reason.TASK_CHANGED, "a hold, a stop or a disarm came during the inference")
