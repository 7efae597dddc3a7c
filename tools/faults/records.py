"""Records of all messages that the robot sends and receives, as lines of JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["frame", "joints", "command", "status", "mark", "ask", "answer", "scene"]


@dataclass(frozen=True)
class Record:
    """A message that the robot sent or received, or an order that it followed."""

    # ``frame`` and ``joints`` are sent by the robot, ``command`` and ``status`` by the node; ``mark`` is an order;
    # ``ask`` and ``answer`` are a person's request and the node's answer; ``scene`` are the obstacles from now on.
    kind: Kind
    time: float  # when the message was sent or arrived, seconds of the steady clock
    stamp: int = 0  # stamp of the message in nanoseconds; 0 for none
    ros: int = 0  # nanoseconds of the ROS clock at ``time``
    positions: tuple[float, ...] | None = None  # joint positions; None if there are none or they are unreadable
    names: tuple[str, ...] = ()  # names of the joints, in the order of ``positions``
    name: str = ""  # the order of a mark
    text: str = ""  # JSON of a status, or of the options of obstacles
    arm: str = ""  # name of the arm; "" for the first arm and for messages that belong to no arm
    delay: float = 0.0  # seconds from sending to receiving a command

    def line(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if value})

    @classmethod
    def parse(cls, line: str) -> "Record":
        """Parse a line; raises ValueError if it is not a record, such as a killed process's last line."""
        words: dict[str, Any] = json.loads(line)
        if not isinstance(words, dict) or "kind" not in words:
            raise ValueError(f"not a record: {line[:60]!r}")
        for key in ("positions", "names"):
            if key in words:
                words[key] = tuple(words[key])
        return cls(**words)
