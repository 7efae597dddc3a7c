"""Declares an option of the tree: its default, unit, range, choices and description."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """Properties of a field besides its type and default."""

    description: str  # one sentence for ``vla-ros config`` and the ROS parameter descriptor
    unit: str = ""  # SI unit, or "" for plain numbers and text
    low: float | None = None  # smallest allowed number (each element of a list), or None
    high: float | None = None  # largest allowed number, or None
    choices: tuple[str, ...] = ()  # allowed texts; empty for any
    length: tuple[int, ...] = ()  # allowed lengths of a list; empty for any
    live: bool = False  # True if the value may change while the node runs
    # True for a list with one value for all cameras (which need not be a list) or one for each.
    per_camera: bool = False


def option(default: Any, description: str, **known: Any) -> Any:
    """Return a dataclass field with an :class:`Option` (``known`` are its fields); lists are given as tuples."""
    return field(default=default, metadata={_KEY: Option(description, **known)})


def option_of(metadata: Any) -> Option:
    """Return the :class:`Option` behind a dataclass field's ``metadata``."""
    found = metadata[_KEY]
    assert isinstance(found, Option)
    return found
