"""Records of the control loop: an inference, the result of a step, the outcome of a frame."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason, Refused
from vla_ros.types import ActionChunk, FloatArray, Observation

COMMANDED, SHOWN, REPLACED, BEFORE_ARMING = "command", "shown", "replaced", "before_arming"
"""Values of :attr:`FrameOutcome.outcome` besides those of :class:`~vla_ros.control.reasons.Reason`."""

ANSWERED = frozenset({COMMANDED, SHOWN})

_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Inference:
    """An observation, and the chunk that was proposed for it."""

    observation: Observation
    chunk: ActionChunk  # checked for shape and NaN
    # ``preprocess``, ``inference`` and the policy's own stages, as in :class:`StepResult`.
    stages_ms: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class StepResult:
    """One step: the action and the commands made from it."""

    stamp: int  # stamp of the frame that led to the action, nanoseconds
    index: int  # position of the step in its chunk
    action: FloatArray  # float64 [D], un-normalised, before limits and kinematics
    commands: tuple[Command, ...] = ()  # one for each arm; empty if refused
    refused: Refused | None = None  # why there is no command, or None
    chunk: ActionChunk | None = None  # the source's result if this step is the first of an inference, else None
    observation: Observation | None = None  # input of that inference, else None
    # Milliseconds by stage: ``preprocess`` (including the policy's own image preprocessing, which ``inference``
    # excludes), the policy's own stages, ``inference``, ``control``.
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    by_person: bool = False  # True if a person who corrects moves the arm, not the policy


@dataclass(frozen=True)
class FrameOutcome:
    """The outcome of a frame. Every received frame has exactly one outcome."""

    stamp: int  # stamp of the header, nanoseconds; 0 if unreadable
    camera: str  # topic
    received: int  # time of arrival, nanoseconds of the ROS clock
    # ``command``: a motion was sent. ``shown``: the action was published, and no motion was allowed. ``replaced``:
    # a newer frame arrived before this frame was used. ``before_arming``: the frame was waiting when a person
    # armed. Otherwise the value of ``reason``.
    outcome: str
    reason: Reason | None = None  # why the frame was dropped or refused, or None
    detail: str = ""  # what was found
    ended: int | None = None  # when the command was sent or the action shown, nanoseconds of the ROS clock
    # As :attr:`StepResult.stages_ms`; empty without an inference.
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
