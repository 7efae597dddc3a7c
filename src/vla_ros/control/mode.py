"""Who may move an armed arm, and who moves it."""

from enum import Enum


class Mode(str, Enum):
    """Who may move an armed arm.

    ``AUTONOMOUS``: the policy. ``CORRECTING``: a person, as long as the input is live. ``PAUSED``: nobody. A stop
    or a disarm pauses a correction, so that the policy never continues by itself.
    """

    AUTONOMOUS = "autonomous"
    PAUSED = "paused"
    CORRECTING = "correcting"


POLICY, PERSON, NOBODY = "policy", "person", "nobody"
"""Values of :attr:`vla_ros.control.safety.Status.source`."""
