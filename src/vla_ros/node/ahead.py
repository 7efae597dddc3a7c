"""Runs inferences on the control thread, or on another thread while the plan is executed.

On another thread, an inference starts when the remaining steps last about as long as an inference, or when
``control.refill_steps`` are left. With the schedule ``rtc``, the observation contains the rest of the plan and the
number of its steps that will have been executed when the chunk arrives.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace

from vla_ros.config import ControlConfig
from vla_ros.control.inputs import Snapshot
from vla_ros.node.context import Context
from vla_ros.node.receiver import Frame
from vla_ros.node.stepper import Inference, Stepper
from vla_ros.node.worker import Worker
from vla_ros.types import PreviousChunk
from vla_ros.vision.messages import CdrBytes


@dataclass(frozen=True, eq=False)
class InferenceRequest:
    """A request to the policy, with the state in which it was made."""

    frame: Frame  # of the first camera
    began: float  # when the frame was taken, seconds of the steady clock
    position: int  # position of the schedule to which the chunk's first action belongs
    task: tuple[int, int]  # epoch of the inputs and number of armings
    interruptions: int  # number of interruptions of motion before the request
    previous: PreviousChunk | None  # the plan that the chunk continues, or None
    beside: bool  # True if commands are sent during the inference


class InferenceRunner:
    """Runs one inference at a time and notifies ``changed`` when it ends. Used from the control thread."""

    def __init__(self, context: Context, stepper: Stepper, changed: threading.Condition) -> None:
        self._context, self._clock, self._stepper = context, context.clock, stepper
        self._worker: Worker[Inference] = Worker(context.clock, changed, self._ended)
        self._request: InferenceRequest | None = None
        self._in_time = True

    @property
    def pending(self) -> InferenceRequest | None:
        """The request that is pending or finished; None after :meth:`take`."""
        return self._request

    @property
    def finished(self) -> bool:
        """True if :meth:`take` has something to return or raise."""
        return self._worker.ready

    def refill(self, control: ControlConfig, period: float) -> float:
        """Return the number of remaining steps at which to request a chunk; infinite before the first."""
        overlap = 1 if self._stepper.schedule.kind == "append" else control.blend_steps
        return control.refill_steps or self._worker.seconds / period + overlap

    def start(
        self,
        frame: Frame,
        data: list[CdrBytes | None],
        inputs: Snapshot,
        task: tuple[int, int],
        period: float,
        *,
        beside: bool,
        position: int | None = None,
    ) -> None:
        """Start an inference on a frame; without ``beside``, wait for its result.

        ``data`` holds the newest message of each camera, ``inputs`` the joint states, state topics and instruction.
        For ``task`` and ``beside`` see :class:`InferenceRequest`. ``period`` is the duration of a step in seconds.
        The chunk begins at ``position`` of the schedule: at the step just sent if the frame is no newer, or, with
        None, at the next step.
        """
        schedule, control = self._stepper.schedule, self._context.options.current.control
        previous, position = None, schedule.position if position is None or not schedule.left else position
        if schedule.kind == "rtc" and schedule.left:
            rest = schedule.rest(position)
            delay = math.ceil(min(self._worker.seconds / period, len(rest))) if beside else 0
            previous = PreviousChunk(rest, delay)
        interruptions = self._context.safety.interruptions
        began = self._clock.steady()
        self._request = InferenceRequest(frame, began, position, task, interruptions, previous, beside)

        def job() -> Inference:
            inference = self._stepper.ask(data, inputs, previous)
            if not control.inject_delay_ms:
                return inference
            self._clock.sleep(control.inject_delay_ms / 1e3)
            delayed = inference.stages_ms["inference"] + control.inject_delay_ms
            return replace(inference, stages_ms={**inference.stages_ms, "inference": delayed})

        self._context.watchdog.inference_began(self._clock.now())
        self._worker.begin(job, beside=beside)

    def take(self) -> tuple[Inference, bool]:
        """Return the result and whether it met ``timeouts.inference``. Raises ImageError or Refused."""
        self._request = None
        return self._worker.result(), self._in_time

    def close(self, timeout: float) -> bool:
        """Wait for the pending inference; return False after ``timeout`` seconds."""
        return self._worker.close(timeout)

    def _ended(self) -> None:
        self._in_time = self._context.watchdog.inference_ended(self._clock.now())
