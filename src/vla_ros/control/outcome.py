"""The control loop's two records: the result of a step and the outcome of a frame."""

from __future__ import annotations

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
class StepResult:
    """One step: the action and the commands made from it."""

    stamp: int  # stamp of the frame behind it, nanoseconds
    index: int  # position of the step in its chunk
    action: FloatArray  # float64 [D], un-normalised, before limits and kinematics
    commands: tuple[Command, ...] = ()  # one for each arm; empty if refused
    refused: Refused | None = None  # why there is no command, or None
    chunk: ActionChunk | None = None  # the policy's answer if it was asked for this step, else None
    observation: Observation | None = None  # what the policy was asked then
    # Milliseconds by stage: ``preprocess`` (including what the policy prepared while it ran, which ``inference``
    # does not count), the policy's own stages, ``inference``, ``control``.
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True)
class FrameOutcome:
    """The outcome of one frame. Every received frame has exactly one."""

    stamp: int  # stamp of its header, nanoseconds; 0 where it could not be read
    camera: str  # topic
    received: int  # nanoseconds of the ROS clock when it arrived
    # ``command``: a motion was sent. ``shown``: answered, and the arm might not move. ``replaced``: a newer frame
    # came before this one was used. ``before_arming``: it waited when somebody armed. Else the value of ``reason``.
    outcome: str
    reason: Reason | None = None  # why it was dropped or refused, or None
    detail: str = ""  # what was found then
    # Nanoseconds of the ROS clock when its command was sent or its action shown; None otherwise.
    ended: int | None = None
    # As :attr:`StepResult.stages_ms`; empty if the policy gave no answer.
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
