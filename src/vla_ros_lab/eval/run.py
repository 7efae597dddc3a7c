"""Runs the episodes of an evaluation, in this process or in several shards."""

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.policies.base import create
from vla_ros.types import UInt8Array
from vla_ros_lab.eval.environment import BenchmarkEnvironment, Case
from vla_ros_lab.eval.results import Log, Score
from vla_ros_lab.eval.suites import Choose, Suite, open_suite
from vla_ros_lab.sim.environment import EpisodeOptions
from vla_ros_lab.sim.one_process import InLockstep, OneProcess, OnTheWallClock
from vla_ros_lab.sim.simulated_time import SimulatedTime

_LOOK = 1.0  # s between two looks at the shards' log
_PATIENCE = 20.0  # s for a shard to end after SIGINT
_UNSAFE = re.compile(r"[^\w-]+")

Told = Callable[[Score, int], None]
"""Receives an episode that has ended, and the number of all episodes."""


def chooser(arguments: argparse.Namespace, done: set[tuple[str, int]], count: list[int]) -> Choose:
    """Return a function that selects the episodes of ``--tasks`` and of this shard that are not ``done``.

    ``count`` receives the number of episodes of ``--tasks``.
    """

    def choose(cases: Sequence[Case]) -> Sequence[Case]:
        tasks = list(dict.fromkeys(case.task for case in cases))
        wanted = _wanted(arguments.tasks, tasks)
        cases = [case for case in cases if case.task in wanted]
        count[:] = [len(cases)]
        left = [case for case in cases if (case.task, case.state) not in done]
        if arguments.shard:  # whole tasks where possible: an environment is built for each
            part, parts = map(int, arguments.shard.split("/"))
            own = set(cases[len(cases) * part // parts : len(cases) * (part + 1) // parts])
            left = [case for case in left if case in own]
        if not left:
            raise NothingToDoError("every episode has been run already")
        return left

    return choose


class NothingToDoError(ConfigError):
    """All episodes that were asked for are in the log already."""


def _wanted(chosen: str | None, tasks: Sequence[str]) -> set[str]:
    """Return the tasks named by ``--tasks``: numbers, or parts of names, separated by commas."""
    if chosen is None:
        return set(tasks)
    found = set[str]()
    for text in (part.strip() for part in chosen.split(",")):
        if text.isdigit() and int(text) < len(tasks):
            found.add(tasks[int(text)])
        elif named := {task for task in tasks if text and text in task}:
            found |= named
        else:
            listed = "; ".join(f"{number} {task}" for number, task in enumerate(tasks[:20]))
            raise ConfigError(f"--tasks: found {text!r}, expected numbers or parts of names of: {listed}")
    return found


def run_here(arguments: argparse.Namespace, log: Log, tell: Told, describe: Callable[[Suite, str], None]) -> None:
    """Run the episodes that the log does not have, in this process.

    ``describe`` is called with the suite and the table of the policy's inputs and outputs.
    """
    count = [0]
    done = {score.key for score in log.scores() if score.success is not None}
    suite = open_suite(arguments, chooser(arguments, done, count))
    with closing(suite), closing(PolicySource(create(suite.config))) as source:
        source.load()
        for position in range(len(suite.cases)):
            score, binding = _episode(suite, position, source, arguments)
            if binding:
                describe(suite, binding)
            log.append(score)
            tell(score, count[0])


def _runner(suite: Suite, position: int, source: PolicySource, arguments: argparse.Namespace) -> OneProcess:
    """Return the node for one episode: made anew, so that no episode depends on those before it."""
    options = EpisodeOptions(
        suite.max_steps[position],
        arguments.step_timeout,
        1 / suite.environment.step_seconds,
        waits=False,
        film=bool(arguments.report),
    )
    kind: type[OneProcess] = SimulatedTime
    if arguments.live is None:
        kind = InLockstep
    elif arguments.clock == "wall":
        kind = OnTheWallClock
    return kind(suite.environment, suite.config, source, options)  # type: ignore[call-arg]


def _episode(suite: Suite, position: int, source: PolicySource, arguments: argparse.Namespace) -> tuple[Score, str]:
    """Run one case; return its score and the table of the binding ("" unless it is the first)."""
    case, began = suite.cases[position], time.monotonic()
    if position in suite.impossible:
        return Score(case.task, case.state, None, suite.impossible[position]), ""
    source.start()
    runner = _runner(suite, position, source, arguments)
    error = ""
    try:
        runner.run(suite.keys[position])
    except VlaRosError as raised:
        error = str(raised)
    error = error or (runner.failed if not suite.environment.success else "")
    latency: Any = runner.stats["latency_ms"]
    spent = latency.get("inference")
    environment, steps = suite.environment, runner.steps
    score = Score(
        case.task,
        case.state,
        None if error else environment.success,
        error,
        getattr(environment, "instruction", ""),
        steps,
        steps * environment.step_seconds,
        round(time.monotonic() - began, 3),
        runner.limited,
        runner.held,
        runner.refused,
        getattr(runner, "late", 0),
        (spent["p50"], spent["p99"]) if spent else (),
        environment.result if isinstance(environment, BenchmarkEnvironment) else {},
        _film(runner.film, case, arguments.report, round(1 / environment.step_seconds)),
    )
    return score, runner.binding if position == 0 else ""


def _film(images: Sequence[UInt8Array], case: Case, report: Path | None, rate: int) -> str:
    """Write the video of an episode beside the report; return its file, or "" without PyAV."""
    if not images or report is None:
        return ""
    try:
        from vla_ros_lab.export.video import encode
    except ImportError:
        return ""
    folder = report.with_name(report.stem + "_videos")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_UNSAFE.sub('_', case.task)[:80]}_{case.state}.mp4"
    encode(path, images, max(rate, 1), 28)
    return str(path)


def run_shards(arguments: argparse.Namespace, log: Log, tell: Told) -> list[str]:
    """Run the episodes in ``arguments.shards`` processes, which append to the log; return why some failed."""
    count, told = arguments.shards, {score.key for score in log.scores()}
    command = [sys.executable, "-m", "vla_ros.cli", *sys.argv[1:], "--log", str(log.path)]
    outputs = [log.path.with_suffix(f".shard{part}.log") for part in range(count)]
    shards: list[subprocess.Popen[bytes]] = []
    try:
        for part, output in enumerate(outputs):
            with output.open("wb") as file:
                shards.append(
                    subprocess.Popen(
                        [*command, "--shard", f"{part}/{count}"],
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        while True:
            running = [shard for shard in shards if shard.poll() is None]
            for score in log.scores():
                if score.key not in told:
                    told.add(score.key)
                    tell(score, 0)
            if not running:
                break
            try:
                running[0].wait(_LOOK)
            except subprocess.TimeoutExpired:
                continue
    finally:
        for shard in shards:
            if shard.poll() is None:
                shard.send_signal(2)  # SIGINT, as Ctrl-C: it ends its environment
        for shard in shards:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shard.wait(_PATIENCE)
            shard.kill()
    failed = []
    for part, (shard, output) in enumerate(zip(shards, outputs, strict=True)):
        if shard.returncode:
            lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            failed.append(
                f"shard {part} exited with status {shard.returncode}: {lines[-1] if lines else 'no output'}"
            )
        else:
            output.unlink()
    return failed
