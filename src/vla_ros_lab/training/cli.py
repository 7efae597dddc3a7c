"""Fine-tune a checkpoint on recorded bags or a LeRobot v3 data set; --check only compares both.

With --check, nothing is trained and no weights are read: it prints what the data have beside what the checkpoint
was trained on, and what looks wrong. See docs/finetune.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import printable
from vla_ros.files import save_text
from vla_ros_lab.training.finetune import add_training_arguments

if TYPE_CHECKING:
    from vla_ros.policies.base import Policy
    from vla_ros_lab.training.check import Comparison, NumberRow
    from vla_ros_lab.training.episodes import EpisodeSamples, ReadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", nargs="+", type=Path, metavar="DATA", help="bags, folders of bags, or one LeRobot v3 data set")
    add("--checkpoint", required=True, metavar="DIR", help="checkpoint to start from")
    add_config_arguments(parser)
    add("--check", action="store_true", help="only compare the data with the checkpoint")
    add("--json", type=Path, metavar="FILE", help="write all figures; - prints only them")
    add_data_arguments(parser)
    add_training_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says how the data are read."""
    add = parser.add_argument
    for name, choices, text in (
        (
            "--statistics",
            ("auto", "checkpoint", "data"),
            "normalise with these (auto: the checkpoint's if the data fit)",
        ),
        (
            "--goal",
            ("commands", "measured"),
            "bags: actions lead to the commanded position, or to the next measured one",
        ),
        (
            "--clock",
            ("auto", "frames", "received", "stamp"),
            "bags: as of export; auto: frames at the policy's rate",
        ),
    ):
        add(name, default=choices[0], choices=choices, help=text)
    add("--instruction", default="", metavar="TEXT", help="instruction, instead of the recorded one")
    text = "bags: what is an episode, as for export (taught: corrections of an episode that has any, others whole)"
    add("--episodes", default="taught", metavar="taught|corrections|bag|armed|/TOPIC", help=text)
    add("--failures", action="store_true", help="also episodes that a person labelled failure")
    add(
        "--whole-chunks",
        action="store_true",
        help="leave out frames after which an episode is shorter than a chunk",
    )
    text = "as for replay: camera, joint_states, instruction"
    add("--topics", nargs="+", default=[], metavar="ROLE=/TOPIC", help=text)


def read_options(arguments: argparse.Namespace) -> ReadOptions:
    from vla_ros_lab.replay.topics import parse_overrides
    from vla_ros_lab.training.episodes import ReadOptions

    kept = ("failures", "whole_chunks", "goal", "clock", "instruction", "episodes")
    return ReadOptions(
        **{name: getattr(arguments, name) for name in kept}, topics=parse_overrides(arguments.topics)
    )


def open_data(arguments: argparse.Namespace) -> tuple[Policy, EpisodeSamples, Comparison]:
    """Return the policy, which is not loaded, its samples, and what a check finds."""
    from vla_ros.policies.base import checkpoint_options, create
    from vla_ros_lab.training.check import check
    from vla_ros_lab.training.reading import open_samples

    named = checkpoint_options(None, arguments.checkpoint, arguments.config)
    config = load(arguments.config, [*named, *arguments.param])
    policy = create(config)
    samples = open_samples(arguments.data, policy.describe(), config, read_options(arguments))
    learned = policy.learned() if hasattr(policy, "learned") else None
    return policy, samples, check(samples, learned, config, arguments.statistics)


def run(arguments: argparse.Namespace) -> int:
    from vla_ros_lab.report.page import to_stdout

    if not arguments.check:
        from vla_ros_lab.training.command import fine_tune, require_outputs

        require_outputs(arguments)
        return fine_tune(arguments, *open_data(arguments), read_options(arguments))
    printed = to_stdout(json=arguments.json)
    _, _, report = open_data(arguments)
    if arguments.json is not None:
        _write(report, arguments.json)
    if not printed:
        print(text_of(report))
    return 0


def _write(report: Comparison, path: Path) -> None:
    """Write a report's figures; infinity becomes null."""
    from vla_ros_lab.replay.result import for_json

    figures = for_json({**asdict(report), "wrong": len(report.wrong)})
    save_text(path, json.dumps(figures, indent=2, allow_nan=False) + "\n")


def text_of(report: Comparison) -> str:
    """Return a report as text for a terminal of 100 columns."""
    return printable("\n".join([*_head(report), "", *_table(report.rows), *_findings(report)]))


def _head(report: Comparison) -> Iterator[str]:
    told = report.summary
    minutes, seconds = divmod(round(told["seconds"]), 60)
    corrections = f", {told['corrections']} of them corrections" if told["corrections"] else ""
    frames = f"{told['frames']} frames at {told['rate_hz']:g} Hz, {minutes}:{seconds:02} min"
    yield f"{told['episodes']} episodes{corrections}: {frames}"
    yield f"{told['samples']} samples of images {', '.join(told['images'])} with chunks of {told['chunk']} actions"
    for text in told["instructions"][:3]:
        yield f"  {text!r}"
    if (more := len(told["instructions"]) - 3) > 0:
        yield f"  and {more} more instructions"


_COLUMNS = ("", "number", "unit", "of", "data", "checkpoint", "normalised")


def _table(rows: Sequence[NumberRow]) -> Iterator[str]:
    """Yield the lines of a table with one number a line."""
    cells = [_COLUMNS, *map(_cells, rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(_COLUMNS))]
    for row in cells if rows else ():
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if rows:
        yield "normalised: where the checkpoint's statistics put the data's 1st and 99th percentile; its own are"
        yield "about -1 and 1 (of mean and std, -2.3 and 2.3). ! is far from that."
        yield ""


def _cells(row: NumberRow) -> tuple[str, ...]:
    name = f"{row.feature} {row.number} {row.name}".rstrip()
    ranges = [_range(ends) if ends else "as it is" for ends in (row.data, row.checkpoint, row.normalized)]
    return (
        "!" if row.is_off else "",
        name,
        row.unit,
        "/".join(row.statistics),
        *ranges[:2],
        ranges[2] if row.normalized else "",
    )


def _range(ends: tuple[float, float]) -> str:
    return " ".join(f"{end:9.4g}" for end in ends)


def _findings(report: Comparison) -> Iterator[str]:
    for level, title in (("wrong", "What looks wrong:"), ("note", "To know:")):
        found = [one for one in report.findings if one.level == level]
        if found:
            yield title
        for one in found:
            yield f"  {one.name}: {one.found}"
            if one.fix:
                yield f"      -> {one.fix}"
    if not report.wrong:
        yield "Nothing looks wrong."
    other = "data" if report.choice == "checkpoint" else "checkpoint"
    yield f"Statistics: the {report.choice}'s, because {report.why} (--statistics {other} takes the other ones)."
