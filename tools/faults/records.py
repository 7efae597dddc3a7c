"""What the robot saw and did, as lines between processes. Times are of CLOCK_MONOTONIC, which all of them share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["frame", "joints", "command", "status", "mark"]


@dataclass(frozen=True)
class Record:
    """One event on the robot's side of the wire, or a mark of the director.

    Attributes:
        kind: ``frame`` or ``joints``: sent by the robot. ``command`` or ``status``: came from the node. ``mark``:
            something was done (``name`` says what).
        time: Seconds of the steady clock: before sending, or when it came.
        stamp: Stamp of the message, nanoseconds; 0 where it has none.
        ros: Nanoseconds of the ROS clock at ``time``.
        positions: Joint positions, where the record has any; None for a joint state that cannot be read.
        names: Their names.
        name: Name of a mark.
        text: JSON of a status.
    """

    kind: Kind
    time: float
    stamp: int = 0
    ros: int = 0
    positions: tuple[float, ...] | None = None
    names: tuple[str, ...] = ()
    name: str = ""
    text: str = ""

    def line(self) -> str:
        """As one line of JSON; what is empty is left out."""
        return json.dumps({key: value for key, value in asdict(self).items() if value})

    @classmethod
    def parse(cls, line: str) -> Record:
        """The record of a line.

        Raises:
            ValueError: It is none (the last line of a process that was killed).
        """
        words: dict[str, Any] = json.loads(line)
        if not isinstance(words, dict) or "kind" not in words:
            raise ValueError(f"no record: {line[:60]!r}")
        for key in ("positions", "names"):
            if key in words:
                words[key] = tuple(words[key])
        return cls(**words)
