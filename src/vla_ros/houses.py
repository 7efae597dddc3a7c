"""What a house offers to the command ``vla-ros``: its sub-commands, and what ``doctor`` finds out about it.

The package has three houses: the robot (``vla_ros``), the models (``vla_ros_models``) and the laboratory
(``vla_ros_lab``). Each names its :class:`House` in the entry-point group ``vla_ros.houses``, so that the robot's
house imports neither of the others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import NamedTuple

_GROUP = "vla_ros.houses"
_OWN = tuple(
    EntryPoint(name, f"{module}:HOUSE", _GROUP)
    for name, module in (
        ("robot", "vla_ros.cli.house"),
        ("models", "vla_ros_models.house"),
        ("laboratory", "vla_ros_lab.house"),
    )
)
"""The entry points of setup.py, for a source tree that is not installed."""

GOOD, NOTE, WRONG = "ok", "note", "wrong"


class SubCommand(NamedTuple):
    """A sub-command of ``vla-ros``."""

    module: str  # has ``add_arguments(parser)`` and ``run(arguments) -> int``; imported only when the command runs
    help: str


@dataclass(frozen=True)
class Finding:
    """The result of one check of ``vla-ros doctor``: a row of the printed table."""

    name: str  # what was checked
    found: str
    level: str = GOOD  # ``ok``, ``note`` or ``wrong``
    fix: str = ""  # what to do


@dataclass(frozen=True)
class House:
    """One of the three import packages."""

    title: str  # in one line, for the list of commands
    commands: Mapping[str, SubCommand]
    examine: Callable[[], Iterable[Finding]]  # imports no library and opens no socket


@cache
def houses() -> tuple[House, ...]:
    """Return every house, the robot's first; one that cannot be imported has no commands, and says why."""
    points = sorted(entry_points(group=_GROUP) or _OWN, key=lambda point: (point.name != "robot", point.name))
    return tuple(map(_open, points))


def _open(point: EntryPoint) -> House:
    try:
        house: House = point.load()
    except ImportError as error:
        missing = Finding(f"house {point.name}", str(error), WRONG, "install the package again")
        return House(f"the {point.name}", {}, lambda: (missing,))
    return house


def commands() -> dict[str, SubCommand]:
    return {name: command for house in houses() for name, command in house.commands.items()}


def installed(package: str) -> str | None:
    """Return the installed version of a distribution, without importing it, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_library(name: str, package: str, level: str, fix: str) -> Finding:
    """Return the finding about a library: its version, or what ``level`` and ``fix`` say if it is missing."""
    found = installed(package)
    return Finding(name, found) if found else Finding(name, "not installed", level, fix)
