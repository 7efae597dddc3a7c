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
import hashlib
import json
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vla_ros.config import Config
from vla_ros.config.checkpoints import folder_of
from vla_ros.config.files import read_file
from vla_ros.config.loading import parse_assignment
from vla_ros.config.show import number
from vla_ros.errors import ConfigError, printable
from vla_ros.files import keeps_files, save_text
from vla_ros_lab.eval import report
from vla_ros_lab.eval.arguments import add_common_arguments
from vla_ros_lab.eval.compare import compare_results
from vla_ros_lab.eval.port import SIMULATED, WALL
from vla_ros_lab.eval.progress import ProgressList
from vla_ros_lab.eval.protocols import published_score
from vla_ros_lab.eval.results import CHECKPOINT, Log, Score, to_json, unjudged
from vla_ros_lab.report import page

_CONSOLE = Console(highlight=False)
_WIDTH = 150  # columns of the summary if the output is no terminal
_SETTINGS = (
    "benchmark", "checkpoint", "policy", "live", "clock", "delay_ms", "schedule", "seed", "max_steps", "config",
    "param", "benchmark_param",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("benchmark", nargs="?", metavar="BENCHMARK", help="table, CONFIG.yaml of vla-eval, or module:Class")
    add_common_arguments(parser)
    add("--python", default="", metavar="PY", help="Python that has the benchmark's packages (default: this one)")
    add("--tasks", metavar="T,T", help="only these tasks: numbers, or parts of names")
    text = "set a parameter of the benchmark; may be repeated"
    add("-b", "--benchmark-param", action="append", default=[], metavar="NAME=VALUE", help=text)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sync", action="store_true", help="the environment waits for each action (default)")
    text = "the environment steps at HZ whether or not it has an action"
    mode.add_argument("--live", type=number(float, 0.01, 1e5), metavar="HZ", help=text)
    text = "with --live: an inference takes --delay-ms (default), or the real time"
    add("--clock", choices=(SIMULATED, WALL), default=SIMULATED, help=text)
    add("--resume", action="store_true", help="go on with --json FILE: run what is missing or ended in an error")
    text = "run N processes; with a policy server, it batches"
    add("--shards", type=number(int, 1), default=1, metavar="N", help=text)
    add("--compare", type=Path, nargs=2, metavar=("A.json", "B.json"), help="compare two results, run nothing")
    add("--shard", help=argparse.SUPPRESS)  # I/N
    add("--log", type=Path, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the episodes and write the outputs; returns 1 if some were not run or none was judged."""
    if arguments.compare:
        return compare_results(arguments.compare[0], arguments.compare[1], _CONSOLE)
    _check(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: environments are closed
    _CONSOLE.stderr = page.to_stdout(json=arguments.json, report=arguments.report)
    settings = settings_of(arguments)
    with tempfile.TemporaryDirectory(prefix="vla_ros_eval_") as folder:
        path = arguments.log or _log_of(arguments.json) or Path(folder) / "episodes.jsonl"
        log = Log(path, settings, resume=arguments.resume or bool(arguments.shard), alone=not arguments.shard)
        progress, failed = ProgressList(_CONSOLE, log.scores()), list[str]()
        try:
            with progress:
                failed = _run_all(arguments, log, progress)
        finally:  # also after Ctrl-C
            if not arguments.shard:
                scores = [progress.scores.get(score.key, score) for score in log.scores()]  # these have traces
                _write(arguments, scores, settings, progress.config)
        if not arguments.shard and (why := unjudged(log.scores())):
            failed.append(why)
    for line in failed:
        _CONSOLE.print(f"[red]{escape(printable(line))}[/]", soft_wrap=True)
    return 1 if failed else 0


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what determines the scores, as JSON, with digests of the checkpoint and of the files of options."""
    found = json.loads(json.dumps({name: getattr(arguments, name) for name in _SETTINGS}, default=str))
    mode = "sync" if arguments.live is None else f"live_{arguments.clock}"
    return {**found, "mode": mode, "weights": scored_digest(arguments), "options": _options_digest(arguments)}


def scored_digest(arguments: argparse.Namespace) -> str:
    """Return the digest of what is scored, so that nobody takes the scores for another checkpoint's.

    A viewpoint adapter (``policy.view``) is what is scored, with its base; its file holds the base's hash.
    """
    given = {name: value for file in arguments.config for name, value in read_file(file).items()}
    given |= dict(map(parse_assignment, arguments.param))
    checkpoint = str(arguments.checkpoint or given.get("policy.checkpoint", ""))
    folder = folder_of(checkpoint)
    if given.get("policy.view"):
        folder = Path(given["policy.view"]).expanduser().parent
    if not checkpoint or not folder.is_dir():
        return ""
    from vla_ros_models.evidence import digest_of  # as late as torch

    return digest_of(folder)


def _options_digest(arguments: argparse.Namespace) -> str:
    """Return the digest of what the files of options, and of the benchmark, say of anything but the checkpoint."""
    given = {name: value for file in arguments.config for name, value in read_file(file).items()}
    benchmark = Path(arguments.benchmark)
    said = benchmark.read_text(encoding="utf-8") if benchmark.is_file() else arguments.benchmark
    kept = {name: value for name, value in given.items() if name not in CHECKPOINT}
    return hashlib.sha256(json.dumps([kept, said], sort_keys=True, default=str).encode()).hexdigest()


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.benchmark:
        raise ConfigError("BENCHMARK is missing: table, CONFIG.yaml of vla-eval, or module:Class")
    if arguments.live is None and (arguments.delay_ms or arguments.clock == "wall" or arguments.schedule):
        raise ConfigError("--clock wall, --delay-ms and --schedule need --live HZ: else the environment waits")
    if arguments.clock == "wall" and arguments.delay_ms:
        raise ConfigError("--delay-ms: with --clock wall, an inference takes the time that it takes")
    if arguments.clock == "wall" and arguments.shards > 1:
        raise ConfigError("--shards: on the wall clock, shards would slow each other; use one")
    if arguments.resume and _log_of(arguments.json) is None:
        raise ConfigError("--resume: needs --json FILE, beside which the episodes are logged")


def _log_of(path: Path | None) -> Path | None:
    return path.with_suffix(".episodes.jsonl") if path is not None and keeps_files(path) else None


def _run_all(arguments: argparse.Namespace, log: Log, progress: ProgressList) -> list[str]:
    """Run the episodes; return why some were not run."""
    # Here, so that --help and --compare need no msgpack.
    from vla_ros_lab.eval.run import NothingToDoError, run_here, run_shards

    try:
        if arguments.shards > 1 and not arguments.shard:
            return run_shards(arguments, log, progress)
        run_here(arguments, log, progress)
    except NothingToDoError as nothing:
        progress.say(str(nothing))
    return []


def _write(
    arguments: argparse.Namespace, scores: Sequence[Score], settings: dict[str, Any], config: Config | None
) -> None:
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
        save_text(arguments.report, report.render_scores(scores, name, settings, published, config))
        _CONSOLE.print(f"report: {arguments.report}", markup=False, soft_wrap=True)


def _table(scores: Sequence[Score]) -> Table:
    shown = Table(title="success, with its 95 % interval", title_justify="left")
    for heading, right in zip(report.COLUMNS, (False, *[True] * 20), strict=False):
        shown.add_column(heading, justify="right" if right else "left")
    for row in report.task_rows(scores):
        shown.add_row(*(escape(printable(cell)) for cell in row))
    return shown
