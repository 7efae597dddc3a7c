"""The objects on the table, the tasks, and the instructions that ask for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vla_ros.errors import ConfigError

SLOTS = 4
"""Most objects that a scene can hold."""

SHAPES = ("cube", "cylinder", "ball")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.10),
    "green": (0.12, 0.62, 0.20),
    "blue": (0.10, 0.28, 0.85),
    "yellow": (0.95, 0.80, 0.10),
}
"""RGB in [0, 1]."""

TASK_NAMES = ("pick", "push_left", "push_right")
"""Tasks by the name that ``vla-ros demo --task`` takes."""

SIDES = {"left": 1.0, "right": -1.0}
"""Sign of y in the base frame: left and right are the robot's own, which faces +x (REP 103)."""

_PICK = re.compile(r"pick up the (\w+) (\w+)")
_PUSH = re.compile(r"push the (\w+) (\w+) to the (left|right)")


@dataclass(frozen=True)
class Task:
    """One thing to do with one object.

    Attributes:
        verb: ``pick`` or ``push``.
        colour: A key of :data:`COLOURS`.
        shape: One of :data:`SHAPES`.
        side: ``left`` or ``right`` for a push, "" for a pick.
    """

    verb: Literal["pick", "push"]
    colour: str
    shape: str
    side: str = ""

    @property
    def target(self) -> str:
        """Name of the object, for example ``red_cube``."""
        return f"{self.colour}_{self.shape}"

    @property
    def name(self) -> str:
        """One of :data:`TASK_NAMES`."""
        return "pick" if self.verb == "pick" else f"push_{self.side}"

    @property
    def instruction(self) -> str:
        """For example "push the red ball to the left"."""
        if self.verb == "pick":
            return f"pick up the {self.colour} {self.shape}"
        return f"push the {self.colour} {self.shape} to the {self.side}"


def make_task(name: str, target: str) -> Task:
    """The task called ``name`` (:data:`TASK_NAMES`) for the object ``target`` (``red_cube``).

    Raises:
        ConfigError: There is no such task.
    """
    if name not in TASK_NAMES:
        raise ConfigError(f"task: found {name!r}, expected one of {', '.join(TASK_NAMES)}")
    colour, shape = target.split("_")
    if name == "pick":
        return Task("pick", colour, shape)
    return Task("push", colour, shape, name.removeprefix("push_"))


def parse(instruction: str) -> Task | None:
    """The task that an instruction names, or None if there is none. Case and spaces do not matter."""
    text = " ".join(instruction.lower().split()).rstrip(".!")
    if match := _PICK.fullmatch(text):
        task = Task("pick", match[1], match[2])
    elif match := _PUSH.fullmatch(text):
        task = Task("push", match[1], match[2], match[3])
    else:
        return None
    return task if task.colour in COLOURS and task.shape in SHAPES else None
