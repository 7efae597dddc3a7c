"""Controls: changes to the demo that show what the policy relies on, with expected and measured success rates.

Each control is a list of options of ``vla-ros eval table``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.train.recipe import FOREIGN_DATASET


@dataclass(frozen=True)
class Control:
    """One row of the table."""

    name: str  # short name, for ``--only``
    title: str  # name in the table
    options: tuple[str, ...] = ()  # of ``vla-ros eval table``
    at_least: float = 0.0  # lowest expected success rate
    at_most: float = 1.0  # highest expected success rate

    def met(self, success_rate: float) -> bool:
        return self.at_least <= success_rate <= self.at_most


CONTROLS: tuple[Control, ...] = (
    Control("plain", "unchanged", at_least=0.97),
    Control("switch", "instruction switched to a distractor at step 6", ("-b", "switch_at=6"), at_least=0.95),
    Control("bump", "arm bumped by up to 5 cm", ("-b", "bump=0.05"), at_least=0.9),
    Control("dim", "camera dimmed to 60 %", ("-b", "dim=0.6"), at_least=0.9),
    Control("shuffle", "another object asked for than judged by", ("-b", "shuffle=true"), at_most=0.1),
    Control("blank", "black image", ("-b", "blank=true"), at_most=0.0),
    Control("orientation", "orientation fix off", ("-p", "camera.orientation:=[none]"), at_most=0.1),
    Control("gripper", "gripper binarisation off", ("-p", "gripper.mode:=continuous"), at_most=0.1),
    Control("unnorm", "wrong unnorm_key", ("-p", f"policy.unnorm_key:={FOREIGN_DATASET}"), at_most=0.1),
    Control("crop", "centre crop of 0.9, unlike training", ("-p", "camera.crop_area:=0.9"), at_most=0.9),
)
"""The table of ``docs/demo-policy.md``."""


def chosen(names: str) -> tuple[Control, ...]:
    """Return the controls in ``names``, separated by commas; all controls if ``names`` is empty.

    Raises:
        ValueError: There is no such control.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {control.name: control for control in CONTROLS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"controls: found {unknown}, expected one or more of {', '.join(known)}")
    return tuple(known[name] for name in wanted) or CONTROLS


def summarize(control: Control, episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table, from the episodes in a result of ``vla-ros eval``."""
    won = [episode["steps"] for episode in episodes if episode["metrics"]["success"]]
    rate = len(won) / len(episodes)
    return {
        "name": control.name,
        "title": control.title,
        "options": list(control.options),
        "episodes": len(episodes),
        "first_seed": episodes[0]["episode_id"],
        "success_rate": rate,
        "wrong_object_rate": sum(episode["reason"] == "wrong_object" for episode in episodes) / len(episodes),
        "steps": round(float(np.mean(won)), 1) if won else None,
        "expected": [control.at_least, control.at_most],
        "met": control.met(rate),
    }


HEADINGS = ("control", "on", "episodes", "success", "wrong object", "steps", "expected")


def row(figures: dict[str, Any]) -> tuple[str, ...]:
    low, high = figures["expected"]
    wanted = f">= {low:.0%}" if low else f"<= {high:.0%}" if high < 1 else ""
    return (
        figures["title"],
        figures.get("machine", ""),
        str(figures["episodes"]),
        f"{figures['success_rate']:.1%}",
        f"{figures['wrong_object_rate']:.1%}",
        "" if figures["steps"] is None else f"{figures['steps']:.1f}",
        wanted if figures["met"] else f"{wanted} MISSED",
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(row(figures) for figures in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
