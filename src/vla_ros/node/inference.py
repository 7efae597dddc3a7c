"""Runs inferences on a thread of their own while the plan is executed, or on the control thread.

On its own thread, an inference starts when the remaining steps last about as long as an inference, or when
``control.refill_steps`` are left. With the schedule ``rtc``, the observation contains the rest of the plan and the
number of its steps that will have been executed when the chunk arrives.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.control.clock import SimulatedClock
from vla_ros.control.inputs import Snapshot
from vla_ros.control.mode import TaskId
from vla_ros.control.outcome import Inference, StepResult
from vla_ros.control.reasons import Reason, Refused, reason_of
from vla_ros.control.robot import ArmJoints
from vla_ros.errors import VlaRosError
from vla_ros.execution.camera_frames import Frame
from vla_ros.execution.context import Context
from vla_ros.execution.source import ActionSource
from vla_ros.node.pipeline import ActionPipeline
from vla_ros.types import ActionChunk, PreviousChunk
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.preprocess import LazyImages

_REMEMBERED = 20  # inferences, for their expected duration


def infer(
    source: ActionSource,
    pipeline: ActionPipeline,
    messages: Sequence[CdrBytes | None],
    inputs: Snapshot,
    previous: PreviousChunk | None = None,
) -> Inference:
    """Observe each camera's newest message (:meth:`Observer.observe`) and let the source propose a chunk for it.

    ``previous`` is the plan that the chunk should continue.

    Raises the errors of :meth:`Observer.observe`, and Refused if the source fails or its chunk has a wrong shape or
    NaN.
    """
    began = time.perf_counter()
    observation = pipeline.observer.observe(messages, inputs)
    if previous is not None:
        observation = replace(observation, previous=previous)
    observed = time.perf_counter()
    chunk: Any  # a third party's source may raise and return anything
    try:
        chunk = source.infer(observation)
    except Refused:
        raise
    except Exception as error:
        kind = "" if isinstance(error, VlaRosError) else f"{type(error).__name__}: "
        raise Refused(reason_of(error), f"{kind}{error}") from error
    if not isinstance(chunk, ActionChunk) or not isinstance(chunk.actions, np.ndarray):
        found = type(chunk.actions if isinstance(chunk, ActionChunk) else chunk).__name__
        raise Refused(Reason.ACTION_INVALID, f"the policy returned {found}, expected an ActionChunk of arrays")
    pipeline.controller.check(chunk)
    ended = time.perf_counter()
    images_ms = observation.images.spent_ms if isinstance(observation.images, LazyImages) else 0.0
    stages = {
        "preprocess": 1e3 * (observed - began) + images_ms,
        "inference": 1e3 * (ended - observed) - images_ms,
        **{f"policy/{name}": ms for name, ms in chunk.stages_ms.items()},
    }
    return Inference(observation, chunk, stages)


def first_step(
    source: ActionSource,
    pipeline: ActionPipeline,
    frames: Sequence[CdrBytes | None],
    inputs: Snapshot,
    dt: float,
    reference: ArmJoints = None,
) -> StepResult:
    """Infer on one set of frames and return the first step, as if no time passed in between.

    For ``dt`` and ``reference`` see :meth:`RobotController.make_step`. Raises the errors of :func:`infer`.
    """
    inference = infer(source, pipeline, frames, inputs)
    pipeline.schedule.load(inference.chunk)
    joints = inputs.arms or inputs.joints
    return pipeline.controller.make_step(pipeline.schedule.next(), joints, dt, reference, inference)


@dataclass(frozen=True, eq=False)
class InferenceRequest:
    """A request for a chunk, with the state in which it was made."""

    frame: Frame  # of the first camera
    taken_at: float  # when the frame was taken, seconds of the steady clock
    position: int  # position of the schedule to which the chunk's first action belongs
    task: TaskId
    interruptions: int  # number of interruptions of motion before the request
    previous: PreviousChunk | None  # the plan that the chunk continues, or None
    concurrent: bool  # True if commands are sent during the inference


_Outcome = Inference | BaseException


class InferenceThread:
    """Runs one inference at a time and notifies ``changed`` when it ends. Used from the control thread.

    On a simulated clock an inference runs immediately and ends when its duration has passed
    (:meth:`SimulatedClock.job`). ``pending`` is the request that is pending or finished; None after :meth:`take`.
    """

    def __init__(
        self, context: Context, source: ActionSource, pipeline: ActionPipeline, changed: threading.Condition
    ) -> None:
        self._context, self._clock = context, context.clock
        self._source, self._pipeline, self._changed = source, pipeline, changed
        self.pending: InferenceRequest | None = None
        self._outcome: _Outcome | None = None
        self._in_time = True
        self._jobs: queue.SimpleQueue[Callable[[], _Outcome] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.died = False  # the thread has ended with an error, and answers no request
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def finished(self) -> bool:
        """True if :meth:`take` has something to return or raise."""
        return self._outcome is not None

    @property
    def expected_seconds(self) -> float:
        """The 95th percentile of the last 20 successful inferences; infinite before the first."""
        return float(np.percentile(self._durations, 95)) if self._durations else math.inf

    def refill_steps(self, period: float) -> float:
        """Return the number of remaining steps at which to request a chunk; infinite before the first."""
        control = self._context.options.current.control
        overlap = 1 if self._pipeline.schedule.kind == "append" else control.blend_steps
        return control.refill_steps or self.expected_seconds / period + overlap

    def request(
        self,
        frame: Frame,
        messages: list[CdrBytes | None],
        inputs: Snapshot,
        task: TaskId,
        period: float,
        *,
        concurrent: bool,
        threaded: bool = False,
        position: int | None = None,
    ) -> None:
        """Request a chunk for a frame; unless ``concurrent`` or ``threaded``, wait for it.

        ``messages`` holds the newest one of each camera, ``inputs`` what was measured and the instruction. For
        ``task`` and ``concurrent`` see :class:`InferenceRequest`. ``period`` is the duration of a step in seconds.
        The chunk begins at ``position`` of the schedule: at the step just sent if the frame is no newer, or, with
        None, at the next step.
        """
        assert self.pending is None, "one inference at a time"
        schedule = self._pipeline.schedule
        previous, position = None, schedule.position if position is None or not schedule.left else position
        if schedule.kind == "rtc" and schedule.left:
            rest = schedule.rest(position)
            delay = math.ceil(min(self.expected_seconds / period, len(rest))) if concurrent else 0
            previous = PreviousChunk(rest, delay)
        interruptions, began = self._context.safety.interruptions, self._clock.steady()
        self.pending = InferenceRequest(frame, began, position, task, interruptions, previous, concurrent)
        delay_ms = self._context.options.current.control.inject_delay_ms

        def job() -> _Outcome:
            try:
                inference = infer(self._source, self._pipeline, messages, inputs, previous)
            except BaseException as error:  # raised again by take()
                return error
            if not delay_ms:
                return inference
            self._clock.sleep(delay_ms / 1e3)
            delayed = inference.stages_ms["inference"] + delay_ms
            return replace(inference, stages_ms={**inference.stages_ms, "inference": delayed})

        self._context.watchdog.inference_began(self._clock.now())
        if not (concurrent or threaded):
            with self._clock.work():
                outcome = job()
            self._end(outcome, began)
        elif isinstance(self._clock, SimulatedClock):
            simulated, seconds = self._clock.job(job)
            self._clock.after(seconds, lambda: self._end(simulated, began))
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vla_inference", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def take(self) -> tuple[Inference, bool]:
        """Remove and return the result, with True if it met ``timeouts.inference``.

        Raises ImageError or Refused.
        """
        outcome, self._outcome, self.pending = self._outcome, None, None
        assert outcome is not None, "the inference has not ended"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome, self._in_time

    def close(self, timeout: float) -> bool:
        """End after the current inference; return False if that takes longer than ``timeout`` seconds."""
        self._jobs.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                assert self.pending is not None
                began = self.pending.taken_at
                self._end(job(), began)
        except BaseException as error:
            self.died = True
            found = f"the inference thread: {type(error).__name__}: {error}"
            self._context.logger.error(f"{found}: start the node again")
            self._context.safety.stop(Reason.THREAD_DIED, found)
            raise

    def _end(self, outcome: _Outcome, began: float) -> None:
        self._in_time = self._context.watchdog.inference_ended(self._clock.now())
        if isinstance(outcome, Inference):
            self._durations.append(self._clock.steady() - began)
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()
