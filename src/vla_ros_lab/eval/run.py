"""Runs the episodes of an evaluation, in this process or in several shards."""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.policies.base import create
from vla_ros.types import UInt8Array
from vla_ros.vision.preprocess import TURNS
from vla_ros_lab.eval.command import CommandProcess
from vla_ros_lab.eval.environment import Case
from vla_ros_lab.eval.port import LOCKSTEP, NodePort
from vla_ros_lab.eval.progress import ProgressList
from vla_ros_lab.eval.results import Log, Score
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.eval.suites import Suite, open_suite

_LOOK = 1.0  # s between two looks at the shards' log
_UNSAFE = re.compile(r"[^\w-]+")


class NothingToDoError(ConfigError):
    """All episodes that were asked for are in the log already."""


def _choose(
    arguments: argparse.Namespace, log: Log, progress: ProgressList, cases: Sequence[Case]
) -> Sequence[Case]:
    """Return the cases of ``--tasks`` and of this shard that the log does not have."""
    wanted = _wanted(arguments.tasks, list(dict.fromkeys(case.task for case in cases)))
    cases = [case for case in cases if case.task in wanted]
    progress.expect(len(cases))
    if arguments.shard:  # whole tasks where possible: an environment is built for each
        part, parts = map(int, arguments.shard.split("/"))
        cases = cases[len(cases) * part // parts : len(cases) * (part + 1) // parts]
    done = {score.key for score in log.scores() if score.success is not None}
    left = [case for case in cases if (case.task, case.state) not in done]
    if not left:
        raise NothingToDoError("every episode has been run already")
    return left


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


def run_here(arguments: argparse.Namespace, log: Log, progress: ProgressList) -> None:
    """Run the episodes that the log does not have, in this process."""
    suite = open_suite(arguments, partial(_choose, arguments, log, progress))
    with closing(suite), closing(PolicySource(create(suite.config))) as source:
        source.load()
        for position, case in enumerate(suite.cases):
            why = suite.impossible.get(position)
            impossible = Score(case.task, case.state, None, why or "")
            score = impossible if why else _episode(suite, position, source, arguments, progress)
            log.append(score)
            progress.add(score)


def _episode(
    suite: Suite, position: int, source: PolicySource, arguments: argparse.Namespace, progress: ProgressList
) -> Score:
    """Run one case, on a node that is made anew: no episode depends on those before it."""
    case, began, environment = suite.cases[position], time.monotonic(), suite.environment
    source.start()
    rate, film = 1 / environment.step_seconds, bool(arguments.report)
    options = EpisodeOptions(suite.max_steps[position], arguments.step_timeout, rate, waits=False, film=film)
    port = NodePort(suite.config, source, LOCKSTEP if arguments.live is None else arguments.clock)
    runner, error = EpisodeRunner(environment, port, options), ""
    if progress.config is None:
        progress.config = suite.config
        progress.say(*suite.notes, *port.binding.splitlines())
    try:
        runner.run(suite.keys[position])
    except VlaRosError as raised:
        error = str(raised)
    error = error or ("" if environment.success else port.failed)
    score = replace(runner.score(), task=case.task, state=case.state, error=error)
    images = [TURNS[suite.config.camera.each[0].orientation](image) for image in runner.film]
    video, seconds = _film(images, case, arguments.report, round(rate)), round(time.monotonic() - began, 3)
    return replace(score, success=None if error else score.success, elapsed_s=seconds, video=video)


def _film(images: Sequence[UInt8Array], case: Case, report: Path | None, rate: int) -> str:
    """Write the video of an episode beside the report; return its file, or "" without PyAV."""
    if not images or report is None:
        return ""
    try:
        from vla_ros_lab.report.video import encode
    except ImportError:
        return ""
    folder = report.with_name(report.stem + "_videos")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_UNSAFE.sub('_', case.task)[:80]}_{case.state}.mp4"
    encode(path, images, max(rate, 1), 28)
    return str(path)


def run_shards(arguments: argparse.Namespace, log: Log, progress: ProgressList) -> list[str]:
    """Run the episodes in ``arguments.shards`` processes, which append to the log; return why some failed."""
    words = [*sys.argv[1:], "--log", str(log.path), "--shard"]
    outputs = [log.path.with_suffix(f".shard{part}.log") for part in range(arguments.shards)]
    shards: list[CommandProcess] = []
    try:
        for part, output in enumerate(outputs):
            shards.append(CommandProcess([*words, f"{part}/{arguments.shards}"], output))
        running = shards
        while running:
            running[0].wait(_LOOK)
            running = [shard for shard in running if shard.alive()]
            for score in log.scores():
                if progress.scores.get(score.key) != score:
                    progress.add(score)
    finally:
        statuses = [shard.end() for shard in shards]
    failed = []
    for part, (shard, status, output) in enumerate(zip(shards, statuses, outputs, strict=True)):
        if status:
            failed.append(f"shard {part} exited with status {status}: {shard.last_lines(1) or 'no output'}")
        else:
            output.unlink()
    return failed
