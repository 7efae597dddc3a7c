"""Who may move an armed arm, and who moves it."""

from enum import Enum
from typing import NamedTuple


class Mode(str, Enum):
    """Who may move an armed arm.

    ``AUTONOMOUS``: the policy. ``CORRECTING``: a person, as long as the input is live. ``PAUSED``: nobody. A stop
    or a disarm pauses a correction, so that the policy never continues by itself.
    """

    AUTONOMOUS = "autonomous"
    PAUSED = "paused"
    CORRECTING = "correcting"


class TaskId(NamedTuple):
    """What a plan belongs to: it is void as soon as one of these numbers differs."""

    epoch: int  # of the inputs; an instruction or a reset begins one
    armings: int
    handovers: int  # between the policy and a person


NO_TASK = TaskId(-1, -1, -1)

POLICY, PERSON, NOBODY = "policy", "person", "nobody"
"""Values of :attr:`vla_ros.control.safety.Status.source`."""
