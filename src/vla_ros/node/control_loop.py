"""The control loop: takes the newest frame, infers, and sends what may be sent.

Receiving threads only leave things behind (mailboxes, inputs); the loop decides and sends. It never waits without a
bound, and uses a frame once. The live node runs :meth:`ControlLoop.run_once` on a thread of its own; replay and
tests call it on a simulated clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

from vla_ros.control.command import Command
from vla_ros.control.inputs import Snapshot
from vla_ros.control.joints import together
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.outcome import COMMANDED, REPLACED, SHOWN, StepResult
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import Level, Reason, Refused
from vla_ros.errors import ImageError
from vla_ros.node.context import Context
from vla_ros.node.receiver import Frame
from vla_ros.node.stepper import Inference, Stepper
from vla_ros.node.worker import Worker
from vla_ros.types import JointState

_PATIENCE = 0.1  # s between looks at whether the loop should end
_SUPERVISION_VALID = 0.05  # s; what the watchdog saw is old after this
_MARGIN = 1  # steps by which a chunk is asked for earlier than the last answers needed
_LOCKSTEP_WAIT = 5.0  # s; a simulation that sends a frame without its state is broken


class Did(Enum):
    """What one iteration of the loop did."""

    WAITED = "nothing was due, or no frame came"
    INFERRED = "a frame was given to the policy"
    CONTINUED = "the next step of the plan was made"


class ControlLoop:
    """Runs a :class:`Stepper` on live inputs.

    Args:
        mailboxes: One per ``camera.topics``; the loop follows the first camera, and takes the newest of the others.
        prepare: Makes the messages of all arms' commands; what it returns sends them, and is called only while
            motion is allowed.
        supervise: Asks the watchdog and tells ``safety``; called before each command, so that a frame which ends a
            hold is itself answered.
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
        self._watchdog = context.watchdog
        self._stepper = stepper
        self._mailboxes = mailboxes
        self._prepare = prepare
        self._supervise = supervise
        self._config = context.options.current
        self._stepper.configure(self._config)
        self._limiter = RateLimiter.from_config(self._config)
        self._newest: list[Frame | None] = [None] * len(mailboxes)
        self._unreported: set[int] = set()  # cameras whose newest frame has no outcome yet
        self._asked_at = 0  # position of the schedule when the policy was asked last
        self._task = (-1, -1)  # epoch of the inputs and number of the arming to which the plan belongs
        self._interruptions = 0  # those that the plan has seen
        self._held: set[Reason] = set()
        self._ending = False
        self._ended = threading.Condition()
        self._worker: Worker[Inference] = Worker(self._clock, self._ended)
        self._unconfigured = False  # options changed while the policy was being asked
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run on a thread of its own until :meth:`stop`."""
        self._thread = threading.Thread(target=self._run, name="vla_control", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False before :meth:`start`, after :meth:`stop`, and where the thread ended with an error."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 10.0) -> bool:
        """End for good; an inference under way is waited for.

        Returns:
            False where it did not end within ``timeout`` seconds.
        """
        with self._ended:
            self._ending = True
            self._ended.notify_all()
        thread, self._thread = self._thread, None
        until = self._clock.steady() + timeout
        if thread is not None:
            thread.join(timeout)
        ended = self._worker.close(max(0.0, until - self._clock.steady()))
        return ended and (thread is None or not thread.is_alive())

    def _run(self) -> None:
        try:
            while not self._ending:
                self.run_once()
        except BaseException as error:
            self._safety.stop(Reason.THREAD_DIED, f"{type(error).__name__}: {error}")
            self._context.logger.error(f"the control thread ended: {type(error).__name__}: {error}")
            raise

    def run_once(self) -> Did:
        """Make one iteration: wait for the next step's time or frame, a tenth of a second at most, and make it."""
        self._take_options()
        if not self._wait_until_due():
            return Did.WAITED
        self._take_task()
        self._discard_interrupted_plan()
        planned = self._planned
        if not planned or (self._is_ahead and self._is_time_to_ask):
            frame = self._mailboxes[0].take() if planned else self._next_frame()
            if frame is not None:
                self._answer(frame)
                return Did.INFERRED
            if not planned:
                return Did.WAITED
        self._continue()
        return Did.CONTINUED

    @property
    def _is_ahead(self) -> bool:
        """True where the plan is executed while the policy infers."""
        control = self._config.control
        return control.ask_ahead and not control.lockstep and self._stepper.spec.horizon > 1

    @property
    def _planned(self) -> int:
        """Steps that can be executed without another chunk."""
        schedule = self._stepper.schedule
        return schedule.left if self._is_ahead else schedule.remaining

    @property
    def _is_time_to_ask(self) -> bool:
        """True where the plan may end before a chunk that is asked for now has come, by the last answers' time."""
        schedule = self._stepper.schedule
        return schedule.wants_chunk or schedule.left <= self._worker.seconds / self._limiter.period + _MARGIN

    def _continue(self) -> None:
        """Execute the next step of the plan."""
        dt = self._limiter.planned_time(self._clock.steady())
        self._finish(self._stepper.next_command(self._fresh_joints(), dt), None)
        self._limiter.executed(self._clock.steady())

    def _take_options(self, *, asking: bool = False) -> None:
        """Follow options that changed; one step sees one set of them."""
        config = self._context.options.current
        if config is not self._config or (self._unconfigured and not asking):
            self._config, self._unconfigured = config, asking
            self._limiter.configure(config.control.rate_hz)
            self._stepper.configure(config, asking=asking)

    def _take_task(self) -> Snapshot:
        """The newest inputs; where they belong to another task or arming, what was planned before is forgotten."""
        armings, snapshot = self._safety.armings, self._inputs.snapshot
        if self._task != (snapshot.epoch, armings):
            self._task = snapshot.epoch, armings
            self._stepper.new_task()
        return snapshot

    def _discard_interrupted_plan(self) -> None:
        """Discard what was planned before a hold, however short it was: the arm moves on a fresh frame after it."""
        interruptions = self._safety.interruptions
        if interruptions != self._interruptions or not self._safety.may_move:
            self._interruptions = interruptions
            self._stepper.schedule.reset()

    def _is_void(self) -> bool:
        """True where what is being done belongs to an earlier task, or was begun before a person armed."""
        return self._task != (self._inputs.snapshot.epoch, self._safety.armings)

    def _fresh_joints(self) -> Mapping[str, JointState]:
        return self._inputs.fresh_joints(self._config.timeouts.joint_state)

    def _wait_until_due(self) -> bool:
        """Wait for the time of the next step; False where it has not come yet, or the loop is to end.

        In lockstep the simulation sets the rhythm.
        """
        if self._config.control.lockstep:
            return True
        due = self._limiter.planned_due if self._planned else self._limiter.frame_due
        self._wait(due - self._clock.steady(), lambda: self._ending)
        return not self._ending and due <= self._clock.steady()

    def _wait(self, seconds: float, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``, for ``seconds`` and a tenth of a second at most."""
        if seconds > 0:
            with self._ended:
                self._clock.wait_for(self._ended, ready, min(seconds, _PATIENCE))

    def _next_frame(self) -> Frame | None:
        """The newest frame of the first camera, or the one that is about to come."""
        mailbox = self._mailboxes[0]
        frame = mailbox.take(_PATIENCE)
        if frame is None or self._config.control.lockstep:
            return frame
        arrived = frame.arrived.steady / 1e9
        patience = self._limiter.patience(self._clock.steady(), arrived, arrived + frame.interval)
        newer = mailbox.take(min(patience, _PATIENCE)) if patience else None
        if newer is None:
            return frame
        self._context.report(frame.outcome(REPLACED))
        return newer

    def _answer(self, frame: Frame) -> None:
        """Infer on a frame of the first camera, and send the first command."""
        began = self._clock.steady()
        self._take(0, frame)
        for index, mailbox in enumerate(self._mailboxes[1:], start=1):
            other = mailbox.take()
            if other is not None:
                self._take(index, other)
        try:
            answer = self._infer(frame)
        except ImageError as error:
            self._watchdog.images(self._clock.now(), readable=False)
            self._refuse(Refused(Reason.IMAGE_INVALID, str(error)), frame)
            return
        except Refused as refused:
            self._refuse(refused, frame)
            return
        self._context.stats.record({"wait": 1e3 * began - frame.arrived.steady / 1e6})
        self._take_options()  # limits that were tightened meanwhile hold for this command
        dt = self._limiter.step_time(began)
        if self._is_ahead and self._stepper.schedule.position != self._asked_at:
            dt = self._limiter.period
            while not self._ending and self._limiter.planned_due > self._clock.steady():
                self._wait(self._limiter.planned_due - self._clock.steady(), lambda: self._ending)
        reference = self._inputs.joints_at(frame.stamp)
        step = self._stepper.next_command(self._fresh_joints(), dt, reference, answer)
        self._context.stats.record(step.stages_ms)
        self._finish(step, frame)
        self._limiter.answered(began, self._clock.steady())

    def _take(self, index: int, frame: Frame) -> None:
        """Make a frame its camera's newest; one before it that no step could use yet was replaced."""
        before, self._newest[index] = self._newest[index], frame
        if before is not None and index in self._unreported:
            self._context.report(before.outcome(REPLACED))
        self._unreported.add(index)

    def _infer(self, frame: Frame) -> Inference:
        """Ask the policy.

        Raises:
            ImageError: A frame cannot be decoded.
            Refused: Something is missing, or the answer is wrong, late or void.
        """
        if self._config.control.lockstep:
            keys = self._stepper.spec.feeds
            arms = tuple(arm.name for arm in self._stepper.controller.arms)
            if not self._inputs.wait_for_stamp(frame.stamp, keys, _LOCKSTEP_WAIT, arms):
                raise Refused(
                    Reason.JOINT_STATE_STALE, f"no joint state for the frame's stamp in {_LOCKSTEP_WAIT} s"
                )
        fresh = self._fresh_joints()
        inputs = replace(self._take_task(), joints=together(fresh.values()), arms=fresh)
        frames = [newest.data if newest else None for newest in self._newest]
        self._asked_at = self._stepper.schedule.position
        self._watchdog.inference_began(self._clock.now())
        try:
            if self._is_ahead:
                answer = self._ask_beside(partial(self._stepper.ask, frames, inputs))
            else:
                with self._clock.work():
                    answer = self._stepper.ask(frames, inputs)
            self._watchdog.images(self._clock.now(), readable=True)
        finally:
            in_time = self._watchdog.inference_ended(self._clock.now())
        if not in_time:
            self._stepper.schedule.reset()
            raise Refused(Reason.INFERENCE_LATE, f"over {self._config.timeouts.inference:g} s")
        if self._is_void():
            self._stepper.schedule.reset()
            raise Refused(Reason.TASK_CHANGED, "an instruction, a reset or an arming came during the inference")
        self._stepper.schedule.load(answer.chunk, self._asked_at)
        if not self._stepper.schedule.left:
            self._stepper.schedule.reset()
            raise Refused(Reason.INFERENCE_LATE, "all steps of the chunk were due before it came")
        return answer

    def _ask_beside(self, job: Callable[[], Inference]) -> Inference:
        """Ask the policy on its own thread, and execute the plan until it has answered.

        Raises:
            ImageError: As the policy's side raised it.
            Refused: The same, or the loop is to end.
        """
        self._worker.begin(job)
        schedule, ran_out = self._stepper.schedule, False
        while not self._worker.ready and not self._ending:
            self._discard_interrupted_plan()
            if self._is_void():
                schedule.reset()
            left = self._limiter.planned_due - self._clock.steady()
            if ran_out and left <= 0:
                ran_out = False
                if self._safety.may_move and not self._is_void():
                    self._safety.report(Reason.PLAN_EMPTY, "see control.ask_ahead and control.execute_steps")
            self._wait(left if self._planned or ran_out else _PATIENCE, self._is_answered)
            if self._planned and not self._ending and self._limiter.planned_due <= self._clock.steady():
                position = schedule.position
                self._take_options(asking=True)
                self._continue()
                ran_out = not self._planned and schedule.position > position
        if not self._worker.ready:
            raise Refused(Reason.TASK_CHANGED, "the node was told to end during the inference")
        return self._worker.result()

    def _is_answered(self) -> bool:
        return self._ending or self._worker.ready

    def _finish(self, step: StepResult, frame: Frame | None) -> None:
        """Show the action, and send the command where it may be sent."""
        self._context.sink.step(step)
        refused = step.refused or self._too_old(step)
        if refused is not None:
            self._stepper.schedule.reset()
            self._refuse(refused, frame)
            return
        for reason in self._held:
            self._safety.clear(reason)
        self._held.clear()
        began, stats = self._clock.steady(), self._context.stats
        sent = self._send_allowed(step.commands)
        now = self._clock.now()
        if sent:
            stats.commanded()
            stats.record({"publish": now.steady / 1e6 - 1e3 * began})
            for alone in filter(None, [command.refused for command in step.commands]):
                self._safety.count(alone.reason)
                self._context.throttled.log(alone.reason.value, f"{alone.reason.value}: {alone.detail}")
        else:
            self._stepper.schedule.reset()  # a hold may end before the next iteration could see it
        if frame is None:
            return
        # Disarmed, too: a dry run shows the age that motion would have.
        total = (now.steady - frame.arrived.steady) / 1e6
        stats.record({"frame_age": (now.ros - frame.stamp) / 1e6, "total": total})
        outcome = COMMANDED if sent else SHOWN
        for index in sorted(self._unreported):
            used = self._newest[index]
            assert used is not None
            self._context.report(used.outcome(outcome, ended=now.ros, stages_ms=step.stages_ms))
        self._unreported.clear()

    def _send_allowed(self, commands: Sequence[Command]) -> bool:
        """Send the commands where they may be sent; True where they were.

        A process that was suspended between the watchdog's look and the sending looks again. What remains is the
        sending itself: a driver that wants certainty looks at the stamp. A loop that was told to end sends nothing:
        it may have been left behind, and the arm be armed for another.
        """
        send = self._prepare(commands)
        while not self._ending:
            self._supervise()
            looked = self._clock.steady()
            with self._safety.motion() as may_move:
                if self._clock.steady() - looked > _SUPERVISION_VALID:
                    continue
                allowed = may_move and not self._is_void() and not self._ending
                if allowed:
                    send()
                    self._stepper.executed()
                return allowed
        return False

    def _too_old(self, step: StepResult) -> Refused | None:
        """No motion on a frame that is older than it may be when it comes, and inference and its turn may take.

        The watchdog looks at frames as they come. This catches what happens to them later: a process that was
        suspended, or a frame that waited behind a slow answer.
        """
        timeouts = self._config.timeouts
        if not timeouts.frame_age:
            return None
        allowed = timeouts.frame_age + timeouts.inference + (step.index + 1) * self._limiter.period
        age = (self._clock.ros() - step.stamp) / 1e9
        if age <= allowed:
            return None
        return Refused(Reason.FRAME_OLD, f"{age:.3g} s old when its motion was to be sent, allowed {allowed:.3g} s")

    def _refuse(self, refused: Refused, frame: Frame | None) -> None:
        """Hold, stop or count as the reason's level says; a hold ends with the next good step."""
        reason, detail = refused.reason, refused.detail
        if frame is None:
            self._safety.report(reason, detail)
        else:
            self._unreported.discard(0)
            self._context.report(frame.outcome(reason.value, reason=reason, detail=detail))
        if reason.level is Level.HOLD:
            self._held.add(reason)
        self._context.throttled.log(reason.value, f"{reason.value}: {detail}")
