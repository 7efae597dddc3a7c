"""The objects on the table, the tasks, and their instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vla_ros.errors import ConfigError

SLOTS = 4
"""Maximum number of objects in a scene."""

SHAPES = ("cube", "cylinder", "ball")
COLOURS: dict[str, tuple[float, float, float]] = {"red": (0.86, 0.12, 0.10), "green": (0.12, 0.62, 0.20)}
COLOURS |= {"blue": (0.10, 0.28, 0.85), "yellow": (0.95, 0.80, 0.10)}
"""Name to RGB in [0, 1]."""

KINDS = tuple(f"{colour}_{shape}" for colour in COLOURS for shape in SHAPES)
"""Names of all objects that a scene may hold."""

TASK_NAMES = ("pick", "push_left", "push_right")
"""Names of all tasks; ``vla-ros demo --task`` selects among them."""

SIDES = {"left": 1.0, "right": -1.0}
"""Sign of y in the base frame: left and right as seen by the robot, which faces +x (REP 103)."""

_THING = r"the (\w+) (\w+)"
_PICK = re.compile(rf"pick up {_THING}")
_PICK_TWO = re.compile(rf"pick up {_THING} with the left arm and {_THING} with the right arm")
_PUSH = re.compile(rf"push {_THING} to the (left|right)")


@dataclass(frozen=True)
class Task:
    """A task with one target object per arm."""

    verb: Literal["pick", "push"]
    targets: tuple[str, ...]  # name of the object of each arm, for example ``red_cube``
    side: str = ""  # ``left`` or ``right`` for a push, "" for a pick

    @property
    def target(self) -> str:
        return self.targets[0]

    @property
    def name(self) -> str:
        """One of :data:`TASK_NAMES`."""
        return "pick" if self.verb == "pick" else f"push_{self.side}"

    @property
    def instruction(self) -> str:
        """The instruction, for example "push the red ball to the left"."""
        things = [f"the {name.replace('_', ' ')}" for name in self.targets]
        if self.verb == "push":
            return f"push {things[0]} to the {self.side}"
        if len(things) == 1:
            return f"pick up {things[0]}"
        return f"pick up {things[0]} with the left arm and {things[1]} with the right arm"


def make_task(name: str, *targets: str) -> Task:
    """Return the task called ``name`` (:data:`TASK_NAMES`) for one object per arm (``red_cube``)."""
    if name not in TASK_NAMES:
        raise ConfigError(f"task: found {name!r}, expected one of {', '.join(TASK_NAMES)}")
    if name == "pick":
        return Task("pick", targets)
    if len(targets) > 1:
        raise ConfigError(f"task: found {name!r} for {len(targets)} arms; several arms can only pick")
    return Task("push", targets, name.removeprefix("push_"))


def parse_instruction(instruction: str) -> Task | None:
    """Return the task that an instruction describes, or None; case and spaces do not matter."""
    text = " ".join(instruction.lower().split()).rstrip(".!")
    if match := _PICK.fullmatch(text) or _PICK_TWO.fullmatch(text):
        words, side = match.groups(), ""
    elif match := _PUSH.fullmatch(text):
        words, side = match.groups()[:2], match[3]
    else:
        return None
    colours, shapes = words[::2], words[1::2]
    if not {*colours} <= COLOURS.keys() or not {*shapes} <= {*SHAPES}:
        return None
    targets = tuple(f"{colour}_{shape}" for colour, shape in zip(colours, shapes, strict=True))
    return Task("push" if side else "pick", targets, side)
