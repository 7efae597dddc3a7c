"""What one row of the fault table says: what is injected, and what must follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Order = Mapping[str, Any]


class Reaction(str, Enum):
    """What the node must do.

    ``GOES_ON``: motions continue (if reasons are named, after a moment). ``HOLDS``: motions end, and resume by
    themselves after the fault. ``STOPS``: they end, and resume only after a person has reset and armed.
    ``DISARMED``: they end until a person arms. ``ENDS``: the process ends, and its successor moves nothing until a
    person has armed it.
    """

    GOES_ON = "goes on"
    HOLDS = "holds"
    STOPS = "stops"
    DISARMED = "disarmed"
    ENDS = "ends"


@dataclass(frozen=True)
class Row:
    """One fault."""

    name: str  # unique, for people
    reaction: Reaction  # what must follow
    reasons: tuple[str, ...] = ()  # one of these must be named on ``~/status``; any reason if empty
    begin: tuple[Order, ...] = ()  # orders to the robot at the injection
    end: tuple[Order, ...] = ()  # orders that end the fault
    within: float = 0.0  # seconds after which no motion may arrive (timeouts included), if it holds or stops
    lasts: tuple[float, float] = (0.3, 0.6)  # minimum and maximum duration of the fault in seconds
    # Signals to the node's process at the injection and after it, by name; ``DISK_FULL`` stops its files from
    # growing.
    node: tuple[str, ...] = ()
    # Signals to the robot's process in the same way. A killed one has a successor afterwards.
    robot: tuple[str, ...] = ()
    # The policy is asked over a websocket; what happens to its server at the injection and after it: a signal,
    # ``start`` with arguments (again), or a fault of :mod:`tools.faults.server`.
    server: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # options of the node, besides :data:`OPTIONS`
    robot_words: tuple[str, ...] = ()  # further arguments of the robot
    arms: tuple[str, ...] = ()  # names of its arms where there are several; orders name one of them but the first
    horizon: int = 1  # steps per chunk of the policy
    seconds: float = 0.0  # duration of each inference
    simulated: bool = False  # with simulated time
    lag: float = 0.0  # seconds by which the fault delays the robot's process
    memory: float = 0.0  # seconds during which the fault keeps the node from measuring
    pieces: bool = False  # the fault removes joints from joint states
    fresh: bool = False  # each injection needs a newly started node
    launched: bool = False  # the node is started by a launcher, which gets the signals SIGTERM and SIGKILL
    traced: bool = False  # the node records the outcome of each frame (``node.trace``)
    lease: float = 0.0  # seconds after which DDS considers a silent process dead (Cyclone's default is 10)
    renews: bool = False  # the fault changes the task: after ``within``, nothing begun before may move the arm
    # What the robot lacks when the node starts, is armed and waits for it; the fault is that alone.
    absent: str = ""
