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
from dataclasses import replace
from typing import Any

import numpy as np

from vla_ros.control.clock import SimulatedClock
from vla_ros.control.inputs import Snapshot
from vla_ros.control.outcome import Inference, StepResult
from vla_ros.control.reasons import Reason, Refused, reason_of
from vla_ros.control.robot import ArmJoints
from vla_ros.errors import VlaRosError
from vla_ros.execution.context import Context
from vla_ros.execution.source import ActionSource
from vla_ros.execution.states import InferenceRequest, RequestState
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
    """Infer on one set of frames and return the chunk's first step, as if no time passed in between.

    Earlier chunks are forgotten, so that this one is not blended with them. For ``dt`` and ``reference`` see
    :meth:`RobotController.make_step`. Raises the errors of :func:`infer`.
    """
    inference = infer(source, pipeline, frames, inputs)
    pipeline.schedule.reset()
    pipeline.schedule.load(inference.chunk)
    joints = inputs.arms or inputs.joints
    return pipeline.controller.make_step(pipeline.schedule.next(), joints, dt, reference, inference)


_Outcome = Inference | BaseException


class InferenceThread:
    """Runs one inference at a time and notifies ``changed`` when it ends. Used from the control thread.

    If nobody can take over, an inference during which nothing is sent runs on the control thread. On a simulated
    clock it runs immediately and ends when its duration has passed (:meth:`SimulatedClock.job`).

    Attributes:
        state: Where the request is: from none to pending, finished and none again.
        pending: The request that is pending or finished, or None.
        expected_seconds: The 95th percentile of the last 20 successful inferences; infinite before the first.
        died: True once the thread has ended with an error, and answers no request.
    """

    def __init__(
        self, context: Context, source: ActionSource, pipeline: ActionPipeline, changed: threading.Condition
    ) -> None:
        self._context, self._clock = context, context.clock
        self._threaded = context.options.current.takeover.input != "none"  # a person may take over meanwhile
        self._source, self._pipeline, self._changed = source, pipeline, changed
        self.state = RequestState.NONE
        self.pending: InferenceRequest | None = None
        self._outcome: tuple[_Outcome, bool] | None = None  # and True if it was in time
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.died = False
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self.expected_seconds = math.inf

    def is_due(self, period: float) -> bool:
        """Return True if the plan might run out before the arrival of a chunk that is requested now.

        False while a request is pending or finished. ``period`` is the duration of a step in seconds.
        """
        schedule, control = self._pipeline.schedule, self._context.options.current.control
        if self.state is not RequestState.NONE:
            return False
        if schedule.wants_chunk or not schedule.is_ahead:
            return schedule.wants_chunk
        overlap = 1 if schedule.kind == "append" else control.blend_steps
        return schedule.left <= (control.refill_steps or self.expected_seconds / period + overlap)

    def start(
        self, request: InferenceRequest, messages: list[CdrBytes | None], inputs: Snapshot, period: float
    ) -> None:
        """Request a chunk; wait for it if it runs on this thread.

        ``messages`` holds the newest one of each camera, ``inputs`` what was measured and the instruction.
        ``period`` is the duration of a step in seconds.
        """
        assert self.state is RequestState.NONE, "one inference at a time"
        schedule, previous = self._pipeline.schedule, None
        if schedule.kind == "rtc" and schedule.left:
            left_over = schedule.left_over(request.position)
            # The step that is due now is executed before any answer, however fast, so at least one is.
            steps = max(1, math.ceil(min(self.expected_seconds / period, len(left_over))))
            previous = PreviousChunk(left_over, steps if request.concurrent else 0)
        self.state, self.pending = RequestState.PENDING, request
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
        if not (request.concurrent or self._threaded):
            with self._clock.work():
                outcome = job()
            self._end(outcome, request)
        elif isinstance(self._clock, SimulatedClock):
            simulated, seconds = self._clock.job(job)
            self._clock.after(seconds, lambda: self._end(simulated, request))
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vla_inference", daemon=True)
                self._thread.start()
            self._jobs.put(lambda: self._end(job(), request))

    def take(self) -> tuple[Inference, bool]:
        """Remove and return the result, with True if it met ``timeouts.inference``.

        Raises ImageError or Refused.
        """
        assert self._outcome is not None, "the inference has not ended"
        (outcome, in_time), self._outcome, self.pending = self._outcome, None, None
        self.state = RequestState.NONE
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome, in_time

    def close(self, timeout: float) -> bool:
        """End after the current inference; return False if that takes longer than ``timeout`` seconds."""
        self._jobs.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (work := self._jobs.get()) is not None:
                work()
        except BaseException as error:
            self.died = True
            found = f"the inference thread: {type(error).__name__}: {error}"
            self._context.logger.error(f"{found}: start the node again")
            self._context.safety.stop(Reason.THREAD_DIED, found)
            raise

    def _end(self, outcome: _Outcome, request: InferenceRequest) -> None:
        in_time = self._context.watchdog.inference_ended(self._clock.now())
        if isinstance(outcome, Inference):
            self._durations.append(self._clock.steady() - request.taken_at)
            self.expected_seconds = float(np.percentile(self._durations, 95))
        with self._changed:
            self._outcome, self.state = (outcome, in_time), RequestState.FINISHED
            self._changed.notify_all()
