"""Score a policy on a benchmark, with the node in the loop: contract, schedule, limits and safety as on a robot.

BENCHMARK is `table` (the simulated table), a configuration of vla-eval, or the import string of one of its
benchmarks. The benchmark runs in a process of its own, with --python in a Python of its own; docs/benchmarks.md
scores a checkpoint in three commands.

  vla-ros eval table --checkpoint demo --episodes 20 --json table.json
  vla-ros eval libero_spatial.yaml --python ~/libero/bin/python --checkpoint DIR -p preset:=libero --json a.json
  vla-ros eval libero_spatial.yaml ... --live 20 --delay-ms 200     the environment does not wait for the policy
  vla-ros eval --compare a.json b.json                              which episodes changed, and is it chance?
"""

import argparse
import json
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vla_ros.config.control import SCHEDULES
from vla_ros.config.show import add_config_arguments, number
from vla_ros.errors import ConfigError, printable
from vla_ros.files import keeps_files, save_text
from vla_ros_lab.eval import report
from vla_ros_lab.eval.compare import compare_results
from vla_ros_lab.eval.protocols import published_score
from vla_ros_lab.eval.results import Log, Score, by_task, summary_of, to_json
from vla_ros_lab.report import page

_CONSOLE = Console(highlight=False)
_WIDTH = 150  # columns of the summary if the output is no terminal
_SETTINGS = (
    "benchmark", "checkpoint", "policy", "live", "clock", "delay_ms", "schedule", "seed", "max_steps", "config",
    "param", "benchmark_param",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive, natural, decimal = number(int, 1), number(int, 0), number(float, 0.01, 1e5)
    add = parser.add_argument
    add("benchmark", nargs="?", metavar="BENCHMARK", help="table, CONFIG.yaml of vla-eval, or module:Class")
    add("--checkpoint", metavar="DIR", help="checkpoint of the policy (policy.checkpoint)")
    add("--policy", metavar="NAME", help="policy by its entry-point name (policy.name)")
    add("--python", default="", metavar="PY", help="Python that has the benchmark's packages (default: this one)")
    add("--episodes", type=positive, metavar="N", help="episodes of each task (table: in total, default 5)")
    add("--tasks", metavar="T,T", help="only these tasks: numbers, or parts of names")
    add("--seed", type=natural, metavar="S", help="the benchmark's seed (table: seed of the first scene)")
    add("--max-steps", type=positive, metavar="N", help="control steps of an episode (default: the benchmark's)")
    text = "set a parameter of the benchmark; may be repeated"
    add("-b", "--benchmark-param", action="append", default=[], metavar="NAME=VALUE", help=text)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sync", action="store_true", help="the environment waits for each action (default)")
    mode.add_argument(
        "--live", type=decimal, metavar="HZ", help="the environment steps at HZ whether or not it has one"
    )
    clocks = ("simulated", "wall")
    text = "with --live: an inference takes --delay-ms (default), or the real time"
    add("--clock", choices=clocks, default="simulated", help=text)
    delay = number(float, 0.0, 1e4)
    add("--delay-ms", type=delay, default=0.0, metavar="MS", help="with --live: duration of an inference")
    add("--schedule", choices=SCHEDULES, help="with --live: how chunks follow each other (control.schedule)")
    add("--json", type=Path, metavar="FILE", help="write the results, which vla-eval's tools read; - prints them")
    add("--report", type=Path, metavar="FILE.html", help="write a report with videos, failures first")
    add("--resume", action="store_true", help="go on with --json FILE: run what is missing or ended in an error")
    add("--shards", type=positive, default=1, metavar="N", help="run N processes; with a policy server, it batches")
    add("--step-timeout", type=decimal, default=60.0, metavar="S", help="maximum wait for the environment")
    add("--compare", type=Path, nargs=2, metavar=("A.json", "B.json"), help="compare two results, run nothing")
    add("--shard", help=argparse.SUPPRESS)  # I/N
    add("--log", type=Path, help=argparse.SUPPRESS)
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write the outputs; returns 0 even if episodes fail, 1 if some were not run."""
    if arguments.compare:
        return compare_results(arguments.compare[0], arguments.compare[1], _CONSOLE)
    _check(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: environments are closed
    _CONSOLE.stderr = page.to_stdout(json=arguments.json, report=arguments.report)
    settings = json.loads(json.dumps({name: getattr(arguments, name) for name in _SETTINGS}, default=str))
    settings["mode"] = "sync" if arguments.live is None else f"live_{arguments.clock}"
    with tempfile.TemporaryDirectory(prefix="vla_ros_eval_") as folder:
        path = arguments.log or _log_of(arguments.json) or Path(folder) / "episodes.jsonl"
        log = Log(path, settings, resume=arguments.resume or bool(arguments.shard), alone=not arguments.shard)
        failed: list[str] = []
        try:
            failed = _run_all(arguments, log)
        finally:  # also after Ctrl-C
            if not arguments.shard:
                _write(arguments, log.scores(), settings)
    for line in failed:
        _CONSOLE.print(f"[red]{escape(printable(line))}[/]", soft_wrap=True)
    return 1 if failed else 0


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.benchmark:
        raise ConfigError("BENCHMARK is missing: table, CONFIG.yaml of vla-eval, or module:Class")
    if arguments.live is None and (arguments.delay_ms or arguments.clock == "wall" or arguments.schedule):
        raise ConfigError(
            "--clock wall, --delay-ms and --schedule need --live HZ: with --sync the environment waits"
        )
    if arguments.clock == "wall" and arguments.delay_ms:
        raise ConfigError("--delay-ms: with --clock wall, an inference takes the time that it takes")
    if arguments.clock == "wall" and arguments.shards > 1:
        raise ConfigError("--shards: on the wall clock, shards would slow each other; use one")
    if arguments.resume and _log_of(arguments.json) is None:
        raise ConfigError("--resume: needs --json FILE, beside which the episodes are logged")


def _log_of(path: Path | None) -> Path | None:
    return path.with_suffix(".episodes.jsonl") if path is not None and keeps_files(path) else None


def _run_all(arguments: argparse.Namespace, log: Log) -> list[str]:
    # Here, so that --help and --compare need no msgpack.
    from vla_ros_lab.eval.run import NothingToDoError, run_here, run_shards
    from vla_ros_lab.eval.suites import Suite

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=_CONSOLE, transient=True) as bar:
        shown = bar.add_task("opening", total=None)
        done = {score.key: score for score in log.scores()}

        def tell(score: Score, count: int) -> None:
            mark = "[yellow]error[/]" if score.success is None else "[red]failure[/]"
            mark = "[green]success[/]" if score.success else mark
            note = f"  {escape(printable(score.error))}" if score.error else ""
            line = f"{escape(printable(score.task))} {score.state}  {score.steps} steps  {mark}{note}"
            bar.console.print(line, soft_wrap=True)
            done[score.key] = score
            text = f"episodes, {summary_of(list(done.values())).rate:.0%} succeed"
            bar.update(shown, completed=len(done), total=count or None, description=text)

        def describe(suite: Suite, binding: str) -> None:
            for line in (*suite.notes, *binding.splitlines()):
                bar.console.print(escape(printable(line)), soft_wrap=True)

        if arguments.shards > 1 and not arguments.shard:
            return run_shards(arguments, log, tell)
        try:
            run_here(arguments, log, tell, describe)
        except NothingToDoError as nothing:
            bar.console.print(str(nothing))
        return []


def _write(arguments: argparse.Namespace, scores: Sequence[Score], settings: dict[str, Any]) -> None:
    """Print the summary, and write the outputs."""
    if not scores:
        return
    name = Path(str(arguments.benchmark)).stem
    published = published_score(str(arguments.checkpoint or ""), name)
    if not _CONSOLE.is_terminal:
        _CONSOLE.width = _WIDTH
    _CONSOLE.print(_table(scores))
    if published:
        _CONSOLE.print(escape(printable(published)), soft_wrap=True)
    if arguments.json is not None:
        save_text(arguments.json, json.dumps(to_json(scores, name, settings), indent=2) + "\n")
    if arguments.report is not None:
        report.write_scores(scores, name, settings, published, arguments.report)
        _CONSOLE.print(f"report: {arguments.report}", markup=False, soft_wrap=True)


def _table(scores: Sequence[Score]) -> Table:
    shown = Table(title="success, with its 95 % interval", title_justify="left")
    for heading, right in zip(report.COLUMNS, (False, *[True] * 20), strict=False):
        shown.add_column(heading, justify="right" if right else "left")
    tasks = by_task(scores)
    for task, each in tasks.items():
        shown.add_row(escape(printable(task)), *report.cells(summary_of(each)))
    if len(tasks) > 1:
        shown.add_row("total", *report.cells(summary_of(scores)), style="bold")
    return shown
