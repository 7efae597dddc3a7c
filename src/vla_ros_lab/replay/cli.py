"""Evaluate a policy on recorded bags with the same inference step as on the robot, without ROS or a robot.

Reads rosbag2 folders, .mcap and .db3 files (also zstd), from Humble to Lyrical. Prints a summary, and writes a JSON
file and an HTML report on request. Ctrl-C keeps partial results; the same command with the same --json resumes.
"""

import argparse
import contextlib
import functools
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments, number
from vla_ros.errors import ConfigError, one_line, printable
from vla_ros.files import check_parent, keeps_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, count, seconds = parser.add_argument, number(int, 1), number(float, 0.001, 1e6)
    add("bags", nargs="+", type=Path, metavar="BAG", help="bag folder, .mcap or .db3, or a folder of bags")
    add_config_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="write all figures; - prints only them (see docs/replay.md)")
    add("--report", type=Path, metavar="FILE.html", help="write an HTML report")
    add("--write", type=Path, metavar="BAG", help="write predicted and recorded actions as a new bag")
    text = "max (default): infer every frame (open loop). X: run as live, at X times the recorded speed"
    add("--speed", type=_speed, default=0.0, metavar="max|X", help=text)
    add("--every", type=count, default=1, metavar="K", help="open loop: use every K-th frame")
    add("--limit", type=count, default=0, metavar="N", help="use at most N frames of each bag")
    add("--workers", type=count, default=1, metavar="N", help="processes (Ray's where it is installed)")
    add("--instruction", default="", metavar="TEXT", help="use this instead of the recorded instruction")
    text = (
        "topic of the camera, joint_states, instruction or truth if types and names are ambiguous (several with "
        "commas; truth=joint_states compares with the measured motion, truth=none with nothing)"
    )
    add("--topics", nargs="+", default=[], metavar="ROLE=/TOPIC", help=text)
    add("--tolerance", type=seconds, default=0.2, metavar="S", help="maximum delay from a frame to its action")
    add("--gap", type=seconds, default=2.0, metavar="S", help="a longer pause starts a new episode")
    text = "exit with status 3 if the mean absolute error is larger"
    add("--max-mae", type=number(float, 0), metavar="X", help=text)
    text = "do not try other orientations, colours, crop and statistics if actions disagree"
    add("--no-trials", action="store_true", help=text)
    add("--restart", action="store_true", help="ignore partial results of an interrupted run")


def _speed(text: str) -> float:
    return 0.0 if text == "max" else number(float, 0.001, 1000)(text)


def run(arguments: argparse.Namespace) -> int:
    with _swallowed_interrupts() as check:
        return _run(arguments, check)


def _run(arguments: argparse.Namespace, check: Callable[[], None]) -> int:
    from rich.console import Console
    from rich.prompt import IntPrompt

    from vla_ros.policies.base import Policy, create
    from vla_ros_lab.replay.bag import find_bags
    from vla_ros_lab.replay.evaluate import BagJob, play_all
    from vla_ros_lab.replay.play import ReplayOptions
    from vla_ros_lab.replay.result import exceeds, make_result, summary_lines, write_json
    from vla_ros_lab.replay.topics import parse_overrides
    from vla_ros_lab.replay.trials import explain
    from vla_ros_lab.replay.verdict import moves_nothing
    from vla_ros_lab.report.page import to_stdout

    printed = to_stdout(json=arguments.json, report=arguments.report)
    if arguments.write is not None:
        check_parent("--write", arguments.write)
    if arguments.write is not None and arguments.write.exists():
        raise ConfigError(f"--write {arguments.write}: already exists; name a folder that does not exist yet")
    frames, text = (arguments.speed, arguments.every, arguments.limit), arguments.instruction
    overrides = parse_overrides(arguments.topics)
    options = ReplayOptions(*frames, text, arguments.tolerance, arguments.gap, overrides)
    config = load(arguments.config, arguments.param)
    partial = None
    if arguments.json is not None and keeps_files(arguments.json):
        partial = arguments.json.with_name(arguments.json.name + ".partial")
        if arguments.restart:
            shutil.rmtree(partial, ignore_errors=True)
    jobs = [BagJob(bag, config, options, partial) for bag in find_bags(arguments.bags)]
    seen: set[str] = set()
    with contextlib.ExitStack() as stack, Console(stderr=True).status("loading the policy") as status:

        def say(text: str) -> None:
            check()
            status.update(text)

        @functools.cache
        def policy() -> Policy:
            created = create(config)
            stack.callback(created.close)
            created.load(lambda fraction, text: say(f"{text} ({fraction:.0%})"))
            return created

        def advance(bag: str, frames: int) -> None:
            check()
            seen.add(bag)
            if frames % 50 == 0:
                say(f"bag {len(seen)} of {len(jobs)}, {bag}: {frames} frames")

        def ask(question: str, candidates: Sequence[str]) -> str:
            status.stop()
            print("\n".join(f"  {number}  {one_line(name)}" for number, name in enumerate(candidates, start=1)))
            chosen = IntPrompt.ask(question, choices=[str(number) for number in range(1, len(candidates) + 1)])
            status.start()
            return candidates[chosen - 1]

        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        outcomes = play_all(jobs, policy, arguments.workers, ask if terminal else None, advance)
        result = make_result(outcomes, config, options)
        if not (arguments.no_trials or result.figures["interrupted"]):
            say("trying other settings")
            result = explain(result, policy)
    lines = "\n".join(summary_lines(result.figures))
    print(printable(lines), file=sys.stderr if printed else sys.stdout)
    if arguments.json:
        write_json(result, arguments.json)
    if arguments.report:
        from vla_ros_lab.replay.report import write_report

        write_report(result, arguments.report)
    if arguments.write:
        from vla_ros_lab.replay.write import write_bag

        write_bag(result, arguments.write)
    if result.figures["interrupted"] or len(outcomes) < len(jobs):
        return 130
    if partial is not None:
        shutil.rmtree(partial, ignore_errors=True)
    if moves_nothing(result.figures):
        return 1
    return 3 if exceeds(result.figures, arguments.max_mae) else 0


@contextlib.contextmanager
def _swallowed_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt after a Ctrl-C that a library swallowed.

    If Ctrl-C interrupts the import of an extension module, the module raises ImportError, which libraries ignore if
    the module is optional.
    """
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
