"""Compare two replay results (JSON files from `vla-ros replay --json`) of two checkpoints or settings.

Prints each figure of both results, which result is better, and the options that differ. A difference is marked if
the 95 % intervals do not overlap, because then the choice of episodes does not explain the difference.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vla_ros.errors import VlaRosError, printable
from vla_ros.files import read_json_value, save_text

SCHEMA = "vla_ros_lab/replay/1"

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
"""Path in the JSON file, name, and 1 if higher is better, -1 if lower is better, 0 otherwise."""


class Row(NamedTuple):
    """A figure of both results; None if a file does not have it."""

    name: str
    first: float | None
    second: float | None
    better: str  # ``A`` or ``B``; "" if neither is better
    clear: bool  # True if the 95 % intervals do not overlap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="result of vla-ros replay --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="another result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison; - prints only it")


def run(arguments: argparse.Namespace) -> int:
    from vla_ros_lab.report import page

    printed = page.to_stdout(json=arguments.json)
    first, second = _read(arguments.first), _read(arguments.second)
    options = [result.get("config", {}) for result in (first, second)]
    values = {name: [each.get(name) for each in options] for name in sorted({*options[0], *options[1]})}
    differing = {name: (a, b) for name, (a, b) in values.items() if a != b}
    content = {
        "schema": "vla_ros/compare/1",
        "first": str(arguments.first),
        "second": str(arguments.second),
        "figures": [row._asdict() for row in compare(first, second)],
        "options": differing,
        "same_frames": _frames(first) == _frames(second),
    }
    shown = []
    for letter, path, result in (("A", arguments.first, first), ("B", arguments.second, second)):
        shown.append(f"{letter}  {path}: {result['verdict']['level']}: {result['verdict']['headline']}")
    shown += _lines(list(compare(first, second)))
    if not content["same_frames"]:
        shown.append("Frames, mode or recorded actions differ: differences are not only the policy's.")
    if differing:
        shown.append("Options that differ:")
        shown += [f"  {name}: {a!r} -> {b!r}" for name, (a, b) in differing.items()]
    print(printable("\n".join(shown)), file=sys.stderr if printed else sys.stdout)
    if arguments.json:
        save_text(arguments.json, json.dumps(content, indent=2) + "\n")
    return 0


def _read(path: Path) -> dict[str, Any]:
    """Read a replay result; raises VlaRosError if the file is missing or is not a result."""
    try:
        content = read_json_value(path)
    except OSError as error:
        raise VlaRosError(f"{path}: {error.strerror}; expected a file written by `vla-ros replay --json`") from None
    except ValueError as error:
        raise VlaRosError(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        found = repr(found)[:80]
        raise VlaRosError(f"{path}: found {found}, expected a file written by `vla-ros replay --json` ({SCHEMA})")
    try:
        _check(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        why = f"{type(error).__name__}: {str(error)[:80]}"
        raise VlaRosError(f"{path}: is damaged ({why}); write it again with `vla-ros replay --json`") from None
    return content


def _check(content: Mapping[str, Any]) -> None:
    """Raise one of the usual errors of Python unless a result has what is compared, of the right types."""
    _frames(content)
    dict(content.get("config", {}))
    for name in ("level", "headline"):
        if not isinstance(content["verdict"][name], str):
            raise TypeError(f"the verdict's {name} is no text")
    for path, _, _ in MEASURES:
        section, _, key = f".{path}".rpartition(".")
        interval = _get(content, f"{section}.intervals.{key}".lstrip("."))
        for number in (_get(content, path), *(interval or ())):
            if number is not None and type(number) not in (int, float):
                raise TypeError(f"{path} is no number")
        if interval and len(interval) != 2:
            raise ValueError(f"the interval of {path} has {len(interval)} numbers")


def _get(content: Mapping[str, Any], path: str) -> Any:
    value: Any = content
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Row]:
    for path, name, sense in MEASURES:
        section, _, key = f".{path}".rpartition(".")
        a, b = _get(first, path), _get(second, path)
        ends = [_get(content, f"{section}.intervals.{key}".lstrip(".")) for content in (first, second)]
        better, clear = "", False
        if sense and a is not None and b is not None and a != b:
            better = "A" if (a > b) == (sense > 0) else "B"
            clear = all(ends) and (ends[0][0] > ends[1][1] or ends[1][0] > ends[0][1])
        if a is not None or b is not None:
            yield Row(name, a, b, better, clear)


def _frames(content: Mapping[str, Any]) -> list[Any]:
    bags = [[Path(bag["path"]).name, bag["frames"]] for bag in content["bags"]]
    return [bags, content["frames"]["compared"], content["mode"], content["truth"]["source"]]


def _lines(rows: list[Row]) -> Iterator[str]:
    from vla_ros_lab.report.markup import significant

    yield f"{'':20}{'A':>12}{'B':>12}   better"
    for row in rows:
        sure = " (beyond chance)" if row.clear else ""
        yield f"{row.name:20}{significant(row.first):>12}{significant(row.second):>12}   {row.better}{sure}"
