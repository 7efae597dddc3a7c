"""QoS profiles by name, and the rules for their compatibility.

Attributes and enumeration members are named as in ``rclpy.qos``, so that the same code reads profiles of both
backends.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class ReliabilityPolicy(Enum):
    """Whether lost samples are sent again."""

    RELIABLE = "reliable"
    BEST_EFFORT = "best_effort"


class DurabilityPolicy(Enum):
    """Whether a late subscriber gets earlier samples."""

    VOLATILE = "volatile"
    TRANSIENT_LOCAL = "transient_local"


class HistoryPolicy(Enum):
    """Which samples wait to be taken. Only KEEP_LAST is offered: KEEP_ALL can block the publisher."""

    KEEP_LAST = "keep_last"
    KEEP_ALL = "keep_all"


@dataclass(frozen=True)
class QoSProfile:
    """QoS of one endpoint; ``depth`` is the number of samples that KEEP_LAST keeps."""

    reliability: ReliabilityPolicy = ReliabilityPolicy.RELIABLE
    durability: DurabilityPolicy = DurabilityPolicy.VOLATILE
    depth: int = 10
    history: HistoryPolicy = HistoryPolicy.KEEP_LAST


_RELIABLE = ReliabilityPolicy.RELIABLE
_BEST_EFFORT = ReliabilityPolicy.BEST_EFFORT

PROFILES: dict[str, QoSProfile] = {
    # Only the newest image counts, and resending a lost one would delay it.
    "camera": QoSProfile(_BEST_EFFORT, depth=1),
    # A command must arrive, and a newer one replaces it.
    "command": QoSProfile(_RELIABLE, depth=1),
    # What a person asks for: a stop must not be replaced by what comes after it, such as a button that is released.
    "request": QoSProfile(_RELIABLE, depth=1000),
    # A latched text: late subscribers still get it.
    "instruction": QoSProfile(_RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, depth=1),
    # For subscriptions: best effort matches every publisher. Publishers use state_publisher.
    "state": QoSProfile(_BEST_EFFORT, depth=1),
    # Several drivers may publish on /joint_states at the same moment; a depth of 1 would keep only one message.
    "joint_states": QoSProfile(_BEST_EFFORT, depth=10),
    # A press is a message or two among many, and must not get lost while the process is busy or suspended.
    "buttons": QoSProfile(_BEST_EFFORT, depth=100),
    # For publishers: reliable matches every subscription.
    "state_publisher": QoSProfile(_RELIABLE, depth=1),
    "diagnostics": QoSProfile(_RELIABLE, depth=10),
    # A latched history: a recorder that joins late still gets it.
    "event": QoSProfile(_RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, depth=100),
    # A recorder must not slow a publisher, and must not lose what arrives while it is busy.
    "recorder": QoSProfile(_BEST_EFFORT, depth=100),
    # rclpy's profile for an integer depth of 10, also used by services.
    "default": QoSProfile(_RELIABLE, depth=10),
    # /clock, as rclcpp and rclpy subscribe to it.
    "clock": QoSProfile(_BEST_EFFORT, depth=1),
}
"""Profiles by name. ``Node.qos`` converts them to the type of its backend."""


def profile(name: str) -> QoSProfile:
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"unknown QoS profile '{name}'; expected one of {', '.join(sorted(PROFILES))}") from None


def incompatibilities(requested: Any, offered: Any) -> list[str]:
    """Return why a subscription (``requested``) does not match a publisher (``offered``); empty if it does.

    Takes profiles of either backend. The rules are those of DDS (request against offer): a reliable
    subscription needs a reliable publisher, a transient-local subscription a transient-local publisher.
    """
    problems = []
    if requested.reliability.name == "RELIABLE" and offered.reliability.name == "BEST_EFFORT":
        problems.append("the subscription asks for RELIABLE, the publisher offers BEST_EFFORT")
    if requested.durability.name == "TRANSIENT_LOCAL" and offered.durability.name == "VOLATILE":
        problems.append("the subscription asks for TRANSIENT_LOCAL, the publisher offers VOLATILE")
    return problems
