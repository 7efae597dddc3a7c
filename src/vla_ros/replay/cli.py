"""Evaluate a policy on recorded bags: the same inference step as on the robot, without ROS or the robot.

Reads rosbag2 folders, .mcap and .db3 files (also zstd), from Humble to Lyrical. Prints a summary, and writes a JSON
file and an HTML report on request. Ctrl-C keeps partial results; the same command with the same --json resumes.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import ConfigError

if TYPE_CHECKING:
    from vla_ros.replay.play import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vla-ros replay``."""
    parser.add_argument(
        "bags", nargs="+", type=Path, metavar="BAG", help="bag folder, .mcap or .db3, or a folder of bags"
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures (docs/replay.md explains them)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write an HTML report")
    parser.add_argument(
        "--write", type=Path, metavar="BAG", help="write predicted and recorded actions as a new bag"
    )
    parser.add_argument(
        "--speed",
        default="max",
        metavar="max|X",
        help="max: infer every frame (open loop). X: as it would have run at X times the recorded speed",
    )
    parser.add_argument("--every", type=int, default=1, metavar="K", help="open loop: use every K-th frame")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="use at most N frames of each bag")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes (Ray's where it is installed)"
    )
    parser.add_argument(
        "--instruction", default="", metavar="TEXT", help="use this instead of the recorded instruction"
    )
    parser.add_argument(
        "--topics",
        nargs="+",
        default=[],
        metavar="ROLE=/TOPIC",
        help="topic of the camera, joint_states, instruction or truth if types and names are ambiguous "
        "(several cameras or joint states with commas; truth=joint_states compares with the measured motion, "
        "truth=none with nothing)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.2,
        metavar="S",
        help="maximum delay from a frame to its recorded action",
    )
    parser.add_argument("--gap", type=float, default=2.0, metavar="S", help="a longer pause starts a new episode")
    parser.add_argument(
        "--max-mae", type=float, metavar="X", help="exit with status 3 if the mean absolute error is larger"
    )
    parser.add_argument(
        "--no-trials",
        action="store_true",
        help="do not try other orientations, colours, crop and statistics if actions disagree",
    )
    parser.add_argument("--restart", action="store_true", help="ignore partial results of an interrupted run")


def run(arguments: argparse.Namespace) -> int:
    """Play the bags; return 3 if ``--max-mae`` is exceeded, 130 after Ctrl-C (partial results are written)."""
    from vla_ros.policies.base import Policy, create
    from vla_ros.replay.bag import find_bags
    from vla_ros.replay.evaluate import Job, play_all
    from vla_ros.replay.result import exceeds, make_result, summary_lines, write_json
    from vla_ros.replay.trials import explain

    options = _options(arguments)
    config = load(arguments.config, arguments.param)
    partial = arguments.json.with_name(arguments.json.name + ".partial") if arguments.json else None
    if arguments.restart and partial is not None:
        shutil.rmtree(partial, ignore_errors=True)
    jobs = [Job(bag, config, options, partial) for bag in find_bags(arguments.bags)]
    with ExitStack() as stack, _Progress(len(jobs)) as progress:

        @functools.cache
        def policy() -> Policy:
            created = create(config)
            stack.callback(created.close)
            created.load(progress.load)
            return created

        ask = progress.ask if sys.stdin.isatty() and sys.stdout.isatty() else None
        outcomes = play_all(jobs, policy, arguments.workers, ask, progress.advance)
        result = make_result(outcomes, config, options)
        if not (arguments.no_trials or result.figures["interrupted"]):
            progress.say("trying other settings")
            result = explain(result, policy)
    print("\n".join(summary_lines(result.figures)))
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.report:
        from vla_ros.replay.report import write_report

        write_report(result, arguments.report)
    if arguments.write:
        from vla_ros.replay.write import write_bag

        write_bag(result, arguments.write)
    if result.figures["interrupted"] or len(outcomes) < len(jobs):
        return 130
    if partial is not None:
        shutil.rmtree(partial, ignore_errors=True)
    return 3 if exceeds(result.figures, arguments.max_mae) else 0


def _options(arguments: argparse.Namespace) -> Options:
    """Check the arguments; raise ConfigError for a number out of range."""
    from vla_ros.replay.play import Options
    from vla_ros.replay.topics import parse_overrides

    try:
        speed = 0.0 if arguments.speed == "max" else float(arguments.speed)
        if arguments.speed != "max" and not 0 < speed <= 1000:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--speed {arguments.speed}: expected max or a number above 0, for example 1.0") from None
    for name, low in (("every", 1), ("limit", 0), ("workers", 1)):
        if (value := getattr(arguments, name)) < low:
            raise ConfigError(f"--{name} {value}: expected {low} or more")
    for name in ("tolerance", "gap"):
        if not 0 < (seconds := getattr(arguments, name)) < 1e6:
            raise ConfigError(f"--{name} {seconds:g}: expected seconds above 0")
    topics = parse_overrides(arguments.topics)
    return Options(
        speed, arguments.every, arguments.limit, arguments.instruction, arguments.tolerance, arguments.gap, topics
    )


class _Progress:
    """A progress line on a terminal, nothing in a log file."""

    def __init__(self, bags: int) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bags, self._seen = bags, set[str]()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("loading the policy")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.stop()

    def ask(self, question: str, candidates: Sequence[str]) -> str:
        """Ask a question on the terminal; the progress line pauses meanwhile."""
        from rich.prompt import IntPrompt

        self._bar.stop()
        print("\n".join(f"  {number}  {name}" for number, name in enumerate(candidates, start=1)))
        chosen = IntPrompt.ask(question, choices=[str(number) for number in range(1, len(candidates) + 1)])
        self._bar.start()
        return candidates[chosen - 1]

    def load(self, fraction: float, message: str) -> None:
        """Show loading progress."""
        self._bar.update(self._task, description=f"{message} ({100 * fraction:.0f} %)")

    def say(self, message: str) -> None:
        """Show a message beside the spinner."""
        self._bar.update(self._task, description=message)

    def advance(self, bag: str, count: int) -> None:
        """Show the progress of a bag."""
        self._seen.add(bag)
        self._bar.update(self._task, description=f"bag {len(self._seen)} of {self._bags}, {bag}: {count} frames")
