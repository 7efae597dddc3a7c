"""Declares an option of the tree: its default, unit, range, choices and description."""

from dataclasses import dataclass, field
from typing import Any

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """Properties of an option besides its name, type and default."""

    description: str  # one sentence for ``vla-ros config`` and the ROS parameter descriptor
    unit: str = ""  # SI unit, or "" for plain numbers and text
    low: float | None = None  # smallest allowed number (for each element of a list); None: no limit
    high: float | None = None  # largest allowed number; None: no limit
    unset: float | None = None  # a number below the range that stands for another source, such as -1
    choices: tuple[str, ...] = ()  # allowed texts; empty: any
    length: tuple[int, ...] = ()  # allowed lengths of a list; empty: any
    live: bool = False  # True if the value may change while the node runs
    per_camera: bool = False  # True for a list with one value per camera, or a single value for all cameras


def option(default: Any, *known: Any, **by_name: Any) -> Any:
    """Return a dataclass field with this default (a tuple for a list); other arguments are :class:`Option`'s."""
    return field(default=default, metadata={_KEY: Option(*known, **by_name)})


def option_of(metadata: Any) -> Option:
    """Return the :class:`Option` in a dataclass field's ``metadata``."""
    found = metadata[_KEY]
    assert isinstance(found, Option)
    return found


AUTO = "auto"
"""The default of ``policy.name``, the policy that claims ``policy.checkpoint``, and of ``guard.process``."""


LONGEST_INSTRUCTION = 500
"""Characters; longer instructions are refused."""


@dataclass(frozen=True)
class PolicyConfig:
    """The policy to run, and the options of all policies; a policy with further options extends this class."""

    name: str = option(
        AUTO,
        "Name of the policy's entry point (group vla_ros.policies); auto: the one that policy.checkpoint needs",
    )
    instruction: str = option("", "Instruction to follow until one arrives on ~/instruction", live=True)


@dataclass(frozen=True)
class AutoOptions(PolicyConfig):
    """The options while ``policy.name`` is :data:`AUTO`; a checkpoint replaces them by those of its policy."""

    checkpoint: str = option(
        "", "Folder of the checkpoint, which names its policy (vla-ros config -p policy.name:=...)"
    )
