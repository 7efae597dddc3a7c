"""The working thread: takes the newest frame, makes the step, and sends what may be sent.

Receiving threads only leave things behind (mailboxes, inputs); this thread decides and sends. It never waits
for anything without a bound, and a frame is used once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vla_ros.config import Config
from vla_ros.control.inputs import Inputs, Snapshot
from vla_ros.control.mailbox import Mailbox
from vla_ros.control.rate_limiter import RateLimiter
from vla_ros.control.reasons import Level, Reason, Refused
from vla_ros.control.safety import Safety
from vla_ros.control.watchdog import Now, Watchdog
from vla_ros.errors import ImageError
from vla_ros.graph.node import Logger
from vla_ros.node.stepper import Stepper, StepResult
from vla_ros.telemetry.stats import Stats
from vla_ros.types import JointState
from vla_ros.vision.messages import CdrBytes

_PATIENCE = 0.1  # s between looks at whether the thread should end
_LOOK_HOLDS = 0.05  # s; what the watchdog saw is old after this
_LOCKSTEP_WAIT = 5.0  # s; a simulation that sends a frame without its state is broken


@dataclass(frozen=True, eq=False)
class Frame:
    """A camera message as it came.

    Attributes:
        data: Its CDR bytes.
        stamp: Stamp of its header, nanoseconds.
        received: Nanoseconds of the ROS clock when it came.
        arrived: Seconds of the steady clock when it came.
        interval: Seconds since the one before came; infinite for the first.
    """

    data: CdrBytes
    stamp: int
    received: int
    arrived: float
    interval: float = math.inf


class Witness(Protocol):
    """Looks on; see :class:`vla_ros.telemetry.telemetry.Telemetry`."""

    def show(self, step: StepResult) -> None:
        """A step was made."""

    def answered(self, stamp: int, received: int, now: Now, moved: bool, stages_ms: Mapping[str, float]) -> None:
        """A frame was answered; ``moved`` where its motion was sent."""

    def dropped(self, stamp: int, camera: str, received: int, reason: Reason) -> None:
        """A frame was not used."""


class ControlLoop:
    """Runs a :class:`Stepper` on live inputs.

    Args:
        config: The whole tree; :meth:`configure` takes a changed one.
        stepper: Loaded.
        cameras: One mailbox per ``camera.topics``; the first camera sets the limiter.
        inputs: Joint state, feeds and instruction.
        safety: Decides what may be sent.
        watchdog: Told about inference.
        stats: Told about everything.
        prepare: Makes the message of a step's command; what it returns sends it, and is called only while motion is
            allowed.
        witness: Told of every step and of what became of every frame, whether or not the arm may move.
        supervise: Asks the watchdog and tells ``safety``; called before each step, so that a frame which ends a
            hold is itself answered.
        now: The present on both clocks.
        logger: Says what is refused, each reason at most once a second.
    """

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        cameras: Sequence[Mailbox[Frame]],
        inputs: Inputs,
        safety: Safety,
        watchdog: Watchdog,
        stats: Stats,
        prepare: Callable[[StepResult], Callable[[], None]],
        witness: Witness,
        supervise: Callable[[], None],
        now: Callable[[], Now],
        logger: Logger,
    ) -> None:
        self._config = config
        self._stepper = stepper
        self._cameras = cameras
        self._newest: list[Frame | None] = [None] * len(cameras)
        self._inputs = inputs
        self._safety = safety
        self._watchdog = watchdog
        self._stats = stats
        self._prepare = prepare
        self._witness = witness
        self._supervise = supervise
        self._now = now
        self._logger = logger
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._task = (-1, -1)  # of the inputs and of the arming to which the plan belongs
        self._limiter = RateLimiter.from_config(config.control)
        self._held: set[Reason] = set()
        self._said: dict[Reason, float] = {}

    def start(self) -> None:
        """Begin on a thread of its own."""
        self._ending.clear()
        self._limiter.reset()
        self._thread = threading.Thread(target=self._run, name="vla_control", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False before :meth:`start`, after :meth:`stop`, and where the thread ended with an error."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread; a policy that is thinking is waited for.

        Returns:
            False where it did not end within ``timeout`` seconds.
        """
        self._ending.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def configure(self, config: Config) -> None:
        """Take options that may change while running; from any thread."""
        self._config = config
        self._limiter.configure(config.control.rate_hz)
        self._stepper.configure(config)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._cycle()
        except BaseException as error:
            self._safety.stop(Reason.THREAD_DIED, f"{type(error).__name__}: {error}")
            self._logger.error(f"the control thread ended: {type(error).__name__}: {error}")
            raise

    def _cycle(self) -> None:
        if not self._is_due():
            return
        self._take_task()
        if not self._safety.may_move:
            self._stepper.schedule.reset()  # what was planned before a hold is old by the time it ends
        if not self._stepper.wants_frame:
            self._finish(self._stepper.next_command(self._fresh_joints(), self._limiter.period), None)
            self._limiter.executed(time.monotonic())
            return
        frame = self._next_frame()
        if frame is not None:
            self._answer(frame)

    def _next_frame(self) -> Frame | None:
        """The newest frame of the first camera, or the one that is about to come."""
        mailbox = self._cameras[0]
        frame = mailbox.take(_PATIENCE)
        if frame is None or self._config.control.lockstep:
            return frame
        patience = self._limiter.patience(time.monotonic(), frame.arrived, frame.arrived + frame.interval)
        newer = mailbox.take(min(patience, _PATIENCE)) if patience else None
        if newer is None:
            return frame
        self._stats.dropped("replaced")
        return newer

    def _take_task(self) -> Snapshot:
        """The newest inputs; where they belong to another task or arming, what was planned before is forgotten."""
        armings, snapshot = self._safety.armings, self._inputs.snapshot
        if self._task != (snapshot.epoch, armings):
            self._task = snapshot.epoch, armings
            self._stepper.new_task()
        return snapshot

    def _is_void(self) -> bool:
        """True where what is being done belongs to a task of before, or was begun before a person armed."""
        return self._task != (self._inputs.snapshot.epoch, self._safety.armings)

    def _fresh_joints(self) -> JointState | None:
        return self._inputs.fresh_joints(self._config.timeouts.joint_state)

    def _is_due(self) -> bool:
        """Wait for the next step; False where its time has not come yet (or the thread is to end).

        In lockstep the simulation sets the limiter.
        """
        if self._config.control.lockstep:
            return True
        due = self._limiter.frame_due if self._stepper.wants_frame else self._limiter.planned_due
        left = due - time.monotonic()
        if left <= 0:
            return True
        self._ending.wait(min(left, _PATIENCE))
        return not self._ending.is_set() and due <= time.monotonic()

    def _answer(self, frame: Frame) -> None:
        """Make the step for one frame of the first camera."""
        began = time.monotonic()
        self._newest[0] = frame
        for index, mailbox in enumerate(self._cameras[1:], start=1):
            other = mailbox.take(0.0)
            if other is not None:
                self._newest[index] = other
                self._stats.used()
        try:
            step = self._step(frame, began)
        except ImageError as error:
            self._watchdog.pictures(self._now(), readable=False)
            self._drop(frame, Reason.IMAGE_INVALID, str(error))
            return
        except Refused as refused:
            self._drop(frame, refused.reason, refused.detail)
            return
        self._stats.used()
        self._stats.record({"wait": 1e3 * (began - frame.arrived), **step.stages_ms})
        self._finish(step, frame)
        self._limiter.answered(began, time.monotonic())

    def _drop(self, frame: Frame, reason: Reason, detail: str) -> None:
        self._stats.dropped(reason.value)
        self._witness.dropped(frame.stamp, self._config.camera.topics[0], frame.received, reason)
        self._refuse(reason, detail)

    def _step(self, frame: Frame, began: float) -> StepResult:
        if self._config.control.lockstep:
            keys = self._stepper.spec.state_keys
            if not self._inputs.wait_for_stamp(frame.stamp, keys, _LOCKSTEP_WAIT):
                raise Refused(
                    Reason.JOINT_STATE_STALE, f"no joint state for the frame's stamp in {_LOCKSTEP_WAIT} s"
                )
        inputs = replace(self._take_task(), joints=self._fresh_joints())
        self._watchdog.inference_began(self._now())
        try:
            step = self._stepper.step(
                [newest.data if newest else None for newest in self._newest],
                inputs,
                self._limiter.step_time(began),
                self._inputs.joints_at(frame.stamp),
                self._fresh_joints,
            )
            self._watchdog.pictures(self._now(), readable=True)
        finally:
            in_time = self._watchdog.inference_ended(self._now())
        if not in_time:
            self._stepper.schedule.reset()
            raise Refused(Reason.INFERENCE_LATE, f"over {self._config.timeouts.inference:g} s")
        if self._is_void():
            self._stepper.schedule.reset()
            raise Refused(
                Reason.TASK_CHANGED, "another instruction, a reset or an arming came while the policy was thinking"
            )
        return step

    def _finish(self, step: StepResult, frame: Frame | None) -> None:
        """Show the action, and send the command where it may be sent."""
        self._witness.show(step)
        refused = step.refused or self._too_old(step)
        if refused is not None:
            self._stepper.schedule.reset()
            self._refuse(refused.reason, refused.detail)
            return
        for reason in self._held:
            self._safety.clear(reason)
        self._held.clear()
        began = time.monotonic()
        allowed = self._send_allowed(step)
        stages = {}
        if allowed:
            self._stats.commanded()
            stages["publish"] = 1e3 * (time.monotonic() - began)
        if frame is not None:  # disarmed, too: a dry run shows the age that motion would have
            stages["frame_age"] = (self._now().ros - frame.stamp) / 1e6
            stages["total"] = 1e3 * (time.monotonic() - frame.arrived)
        self._stats.record(stages)
        if frame is not None:
            self._witness.answered(frame.stamp, frame.received, self._now(), allowed, step.stages_ms)

    def _send_allowed(self, step: StepResult) -> bool:
        """Send the command where it may be sent; True where it was.

        A process that was suspended between the watchdog's look and the sending looks again. What remains is the
        sending itself: a driver that wants certainty looks at the stamp. A thread that was told to end sends
        nothing: it may have been left behind, and the arm be armed for another.
        """
        send = self._prepare(step)
        while not self._ending.is_set():
            self._supervise()
            looked = time.monotonic()
            with self._safety.motion() as may_move:
                if time.monotonic() - looked > _LOOK_HOLDS:
                    continue
                allowed = may_move and not self._is_void() and not self._ending.is_set()
                if allowed:
                    send()
                    self._stepper.executed()
                return allowed
        return False

    def _too_old(self, step: StepResult) -> Refused | None:
        """No motion on a frame that is older than it may be when it comes, and thinking and its turn may take.

        The watchdog looks at frames as they come. This catches what happens to them later: a process that was
        suspended, or a frame that waited behind a slow answer.
        """
        timeouts = self._config.timeouts
        if not timeouts.frame_age:
            return None
        allowed = timeouts.frame_age + timeouts.inference + (step.index + 1) * self._limiter.period
        age = (self._now().ros - step.stamp) / 1e9
        if age <= allowed:
            return None
        return Refused(Reason.FRAME_OLD, f"{age:.3g} s old when its motion was to be sent, allowed {allowed:.3g} s")

    def _refuse(self, reason: Reason, detail: str) -> None:
        """Hold, stop or count, as the reason's level says; a hold ends with the next good step."""
        self._safety.report(reason, detail)
        if reason.level is Level.HOLD:
            self._held.add(reason)
        now = time.monotonic()
        if now - self._said.get(reason, -1.0) >= 1.0:
            self._said[reason] = now
            self._logger.warning(f"{reason.value}: {detail}")
