"""The rows of the fault table: what is injected, and how the node must react."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Order = Mapping[str, Any]


class Reaction(str, Enum):
    """What the node must do.

    ``GOES_ON``: motions continue, perhaps after a short hold. ``HOLDS``: motions end, and resume by themselves
    after the fault. ``STOPS``: motions end until a person resets and arms. ``DISARMED``: motions end until a person
    arms. ``ENDS``: the process ends, and a new one moves nothing until a person arms it.
    """

    GOES_ON = "goes on"
    HOLDS = "holds"
    STOPS = "stops"
    DISARMED = "disarmed"
    ENDS = "ends"


@dataclass(frozen=True)
class Row:
    """A fault."""

    name: str  # unique
    reaction: Reaction  # what the node must do
    reasons: tuple[str, ...] = ()  # ``~/status`` must show one of these reasons; empty for any
    begin: tuple[Order, ...] = ()  # orders to the robot that begin the fault
    end: tuple[Order, ...] = ()  # orders to the robot that end the fault
    within: float = 0.0  # seconds after which no motion may arrive, timeouts included
    lasts: tuple[float, float] = (0.3, 0.6)  # minimum and maximum duration of the fault in seconds
    # Signals that begin and end the fault; for the node, also ``DISK_FULL``, ``RECORDER_KILLED``, ``BAGS_REMOVED``,
    # ``FREEZE`` and ``LOG_STALLS`` (:mod:`tools.faults.processes`). A killed robot is started again.
    node: tuple[str, ...] = ()
    robot: tuple[str, ...] = ()
    # What begins and ends a fault of the policy server: a signal, ``start`` with arguments, or a fault of
    # :mod:`tools.faults.server`. If empty, the policy runs in the node.
    server: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # options of the node, besides :data:`OPTIONS`
    robot_words: tuple[str, ...] = ()  # further arguments of the robot
    arms: tuple[str, ...] = ()  # names of the arms if there are several; orders may name all but the first
    horizon: int = 1  # steps per chunk of the policy
    seconds: float = 0.0  # duration of each inference
    simulated: bool = False  # use simulated time
    suspended: bool = False  # ``node`` suspends the node: no command may be based on what it knew before
    wakes: float = 0.0  # seconds between the signal that ends the fault and the orders that end it
    successor: bool = False  # during the fault, start another node for the same arm
    lag: float = 0.0  # seconds by which the fault delays the robot's process
    memory: float = 0.0  # seconds during which the fault keeps the node from measuring
    pieces: bool = False  # the fault damages single joints of joint states
    fresh: bool = False  # start a new node for each injection
    launched: bool = False  # a launcher starts the node, and gets the signals SIGTERM and SIGKILL
    traced: bool = False  # the node writes ``node.trace``
    # What becomes of the recorder's bag: it must be ``repaired``, be ``left`` as it is, or be named as ``removed``.
    recorded: str = ""
    lease: float = 0.0  # seconds after which DDS considers a silent process dead; 0 means 10
    renews: bool = False  # the fault changes the task: after ``within``, no earlier frame may move the arm
    person: str = ""  # a person holds a ``leader`` or a ``joy`` (:mod:`tools.faults.person`)
    corrects: bool = False  # the person has taken over before the fault, and only the person moves the arm
    storms: bool = False  # the person's last request counts
    until: bool = False  # the fault lasts until the node has reported one of ``reasons``
    urdf: str = ""  # the node has another description (:mod:`tools.faults.descriptions`)
    refused: str = ""  # a description with which a node must refuse to start; such a row has no other fault
    absent: str = ""  # driver that is missing when the node starts; such a row has no other fault
