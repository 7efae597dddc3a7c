"""Records of what the robot saw and did, as lines between processes; times are of CLOCK_MONOTONIC."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["frame", "joints", "command", "status", "mark"]


@dataclass(frozen=True)
class Record:
    """One event on the robot's side of the wire, or a mark of the director."""

    # ``frame`` or ``joints``: sent by the robot. ``command`` or ``status``: from the node. ``mark``: an order was
    # followed (``name`` says which).
    kind: Kind
    time: float  # seconds of the steady clock: before sending, or at arrival
    stamp: int = 0  # stamp of the message in nanoseconds; 0 if it has none
    ros: int = 0  # nanoseconds of the ROS clock at ``time``
    # Joint positions, if the record has any; None for an unreadable joint state.
    positions: tuple[float, ...] | None = None
    names: tuple[str, ...] = ()  # their names
    name: str = ""  # name of a mark
    text: str = ""  # JSON of a status
    arm: str = ""  # which arm's; "" for the first and for what concerns none
    # Seconds since the node sent a command: what the way took, and a robot that got no processor.
    delay: float = 0.0

    def line(self) -> str:
        """Return the record as one line of JSON, without empty fields."""
        return json.dumps({key: value for key, value in asdict(self).items() if value})

    @classmethod
    def parse(cls, line: str) -> Record:
        """Read the record of a line.

        Raises:
            ValueError: The line is not a record, such as the last line of a killed process.
        """
        words: dict[str, Any] = json.loads(line)
        if not isinstance(words, dict) or "kind" not in words:
            raise ValueError(f"no record: {line[:60]!r}")
        for key in ("positions", "names"):
            if key in words:
                words[key] = tuple(words[key])
        return cls(**words)
