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
    """One step: the action, and the commands that were made of it.

    Attributes:
        stamp: Stamp of the frame behind it, nanoseconds.
        index: Position of the step in its chunk.
        action: Float64 [D], un-normalised, before limits and kinematics.
        commands: One for each arm; empty if refused.
        refused: Why there is no command, or None.
        chunk: The policy's answer if it was asked for this step, else None.
        observation: What the policy was asked then.
        stages_ms: Milliseconds by stage: ``preprocess`` (including what the policy prepared while it ran, which
            ``inference`` does not count), the policy's own stages, ``inference``, ``control``.
    """

    stamp: int
    index: int
    action: FloatArray
    commands: tuple[Command, ...] = ()
    refused: Refused | None = None
    chunk: ActionChunk | None = None
    observation: Observation | None = None
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True)
class FrameOutcome:
    """The outcome of one frame. Every received frame has exactly one.

    Attributes:
        stamp: Stamp of its header, nanoseconds; 0 where it could not be read.
        camera: Topic.
        received: Nanoseconds of the ROS clock when it arrived.
        outcome: ``command``: a motion was sent. ``shown``: answered, and the arm might not move. ``replaced``: a
            newer frame came before this one was used. ``before_arming``: it waited when somebody armed. Else the
            value of ``reason``.
        reason: Why it was dropped or refused, or None.
        detail: What was found then.
        ended: Nanoseconds of the ROS clock when its command was sent or its action shown; None otherwise.
        stages_ms: As :attr:`StepResult.stages_ms`; empty if the policy gave no answer.
    """

    stamp: int
    camera: str
    received: int
    outcome: str
    reason: Reason | None = None
    detail: str = ""
    ended: int | None = None
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
