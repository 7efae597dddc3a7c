"""Compare two replay results (JSON files of `vla-ros replay --json`): two checkpoints, or two settings.

Prints each figure of both, which is better, and which options differ. Figures whose 95 % intervals do not overlap
are marked: the difference is more than the choice of episodes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_ros.errors import VlaRosError

SCHEMA = "vla_ros/replay/1"

MEASURES: tuple[tuple[str, str, int], ...] = (
    ("direction_cosine", "direction cosine", 1),
    ("gripper_f1", "gripper F1", 1),
    ("gripper.accuracy", "gripper accuracy", 1),
    ("gripper.events.f1", "gripper events F1", 1),
    ("mae", "MAE", -1),
    ("motion_mae", "motion MAE", -1),
    ("rmse", "RMSE", -1),
    ("skill.mean_action", "skill over mean", 1),
    ("skill.hold_last", "skill over hold last", 1),
    ("turns.direction_cosine", "cosine at turns", 1),
    ("motion.jerk_predicted", "jerk, RMS", -1),
    ("motion.idle_predicted", "idle share", 0),
    ("latency_ms.total.p50", "latency p50 [ms]", -1),
    ("latency_ms.total.p99", "latency p99 [ms]", -1),
    ("deadline.share", "deadlines missed", -1),
    ("frames.compared", "frames compared", 0),
)
"""Path in the JSON file, name, and 1 where more is better, -1 where less is."""


@dataclass(frozen=True)
class Row:
    """One figure of both results.

    Attributes:
        name: For people.
        first: Of the first file; NaN where it has none.
        second: Of the second file.
        better: ``A``, ``B`` or "" where equal or without preference.
        clear: True where the intervals do not overlap.
    """

    name: str
    first: float
    second: float
    better: str
    clear: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vla-ros compare``."""
    parser.add_argument("first", type=Path, metavar="A.json", help="result of vla-ros replay --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="another one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        VlaRosError: A file is missing or is no replay result.
    """
    first, second = read(arguments.first), read(arguments.second)
    rows = compare(first, second)
    options = differing_options(first, second)
    print("\n".join(lines(arguments.first, arguments.second, first, second, rows, options)))
    if arguments.json:
        content = {
            "schema": "vla_ros/compare/1",
            "first": str(arguments.first),
            "second": str(arguments.second),
            "figures": [
                {
                    "name": row.name,
                    "first": None if math.isnan(row.first) else row.first,
                    "second": None if math.isnan(row.second) else row.second,
                    "better": row.better,
                    "clear": row.clear,
                }
                for row in rows
            ],
            "options": {name: list(values) for name, values in options.items()},
            "same_frames": same_frames(first, second),
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def read(path: Path) -> dict[str, Any]:
    """A replay result.

    Raises:
        VlaRosError: The file is missing, is no JSON, or is of another kind.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise VlaRosError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise VlaRosError(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise VlaRosError(f"{path}: found {found!r}, expected a file of `vla-ros replay --json` ({SCHEMA})")
    return content


def _get(content: Mapping[str, Any], path: str) -> float:
    value: Any = content
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else math.nan


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Row]:
    """Every figure that at least one result has."""
    rows = []
    for path, name, sense in MEASURES:
        a, b = _get(first, path), _get(second, path)
        if math.isnan(a) and math.isnan(b):
            continue
        better = ""
        if sense and a != b and not (math.isnan(a) or math.isnan(b)):
            better = "A" if (a > b) == (sense > 0) else "B"
        ends = [_interval(content, path) for content in (first, second)]
        clear = all(ends) and (ends[0][0] > ends[1][1] or ends[1][0] > ends[0][1])
        rows.append(Row(name, a, b, better, bool(clear)))
    return rows


def _interval(content: Mapping[str, Any], path: str) -> Any:
    """Both ends of a figure's interval, or None."""
    skill, _, name = path.partition(".")
    if skill == "skill":
        return content.get("skill", {}).get("intervals", {}).get(name)
    return content.get("intervals", {}).get(path)


def differing_options(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that are not the same in both: name to both values."""
    a, b = first.get("config", {}), second.get("config", {})
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}


def same_frames(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """True where both compared as many frames of bags with the same names, in the same mode."""

    def key(content: Mapping[str, Any]) -> list[Any]:
        bags = [[Path(bag["path"]).name, bag["frames"]] for bag in content["bags"]]
        return [bags, content["frames"]["compared"], content["mode"], content["truth"]["source"]]

    return key(first) == key(second)


def lines(
    first_path: Path,
    second_path: Path,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    rows: Sequence[Row],
    options: Mapping[str, tuple[Any, Any]],
) -> list[str]:
    """The comparison for a terminal."""
    from vla_ros.report.markup import significant

    result = [
        f"A  {first_path}: {first['verdict']['level']}: {first['verdict']['headline']}",
        f"B  {second_path}: {second['verdict']['level']}: {second['verdict']['headline']}",
        f"{'':20}{'A':>12}{'B':>12}   better",
    ]
    for row in rows:
        sure = " (beyond chance)" if row.clear and row.better else ""
        result.append(
            f"{row.name:20}{significant(row.first):>12}{significant(row.second):>12}   {row.better}{sure}"
        )
    if not same_frames(first, second):
        result.append("Not the same frames, mode or recorded actions: differences are not only the policy's.")
    if options:
        result.append("Options that differ:")
        result += [f"  {name}: {a!r} -> {b!r}" for name, (a, b) in options.items()]
    return result
