"""The two states of the control loop: what moves the arms, and where the request for the next chunk is.

docs/architecture.md has the table of their pairs.
"""

from dataclasses import dataclass
from enum import Enum

from vla_ros.control.mode import TaskId
from vla_ros.execution.camera_frames import Frame


class MotionState(Enum):
    """What moves the arms."""

    IDLE = "idle"  # nothing: they hold, or have come to rest
    EXECUTING = "executing"  # the steps of a plan, and the commands between them
    DECELERATING = "decelerating"  # the plan has ended or is void: commands until rest, or until a step follows
    ABORTING = "aborting"  # an inference has failed: commands until rest and then a hold; no step before
    TELEOPERATING = "teleoperating"  # a person moves them


class RequestState(Enum):
    """Where the request for the next chunk is."""

    NONE = "none"
    PENDING = "pending"  # the source infers
    FINISHED = "finished"  # a chunk, or why there is none, waits for the control thread


@dataclass(frozen=True, eq=False)
class InferenceRequest:
    """A request for a chunk, with what was true when it was made."""

    frame: Frame  # of the first camera
    taken_at: float  # when the frame was taken, seconds of the steady clock
    position: int  # position of the schedule to which the chunk's first action belongs
    task: TaskId
    interruptions: int  # number of interruptions of motion until then
    concurrent: bool  # True if commands are sent during the inference
