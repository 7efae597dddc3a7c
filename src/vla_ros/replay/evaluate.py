"""All bags, one after the other or in parallel, with partial results that survive an interruption."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_ros.config import Config, build, flatten
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Progress, create, no_progress
from vla_ros.replay import samples as samples_of
from vla_ros.replay.bag import Bag
from vla_ros.replay.play import Options, Player
from vla_ros.replay.prepare import LoadedOnce, fit, make_stepper
from vla_ros.replay.samples import Samples
from vla_ros.replay.topics import Ask, select
from vla_ros.types import ActionSpec

BagProgress = Callable[[str, int], None]
"""Called with a bag's name and how many of its frames are done."""


@dataclass(frozen=True)
class Job:
    """One bag and how to play it; sent to other processes.

    Attributes:
        path: The bag.
        config: Flat options.
        overrides: Role to topic.
        options: How to play it.
        partial: Folder of partial results, or None.
    """

    path: Path
    config: tuple[tuple[str, object], ...]
    overrides: tuple[tuple[str, str], ...]
    options: Options
    partial: Path | None

    def partial_file(self) -> Path | None:
        """File of this job's partial results; another configuration or a changed bag has another name."""
        if self.partial is None:
            return None
        modified = self.path.stat().st_mtime_ns
        key = [str(self.path.resolve()), modified, self.config, self.overrides, asdict(self.options)]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self.partial / f"{self.path.name}-{digest}.npz"


@dataclass(frozen=True)
class Outcome:
    """The samples of a bag, or the problem that left none."""

    samples: Samples | None
    spec: ActionSpec | None
    problem: str = ""
    note: str = ""


def make_jobs(
    paths: Sequence[Path], config: Config, overrides: dict[str, str], options: Options, partial: Path | None
) -> list[Job]:
    """One job per bag."""
    flat = tuple(flatten(config).items())
    return [Job(path, flat, tuple(overrides.items()), options, partial) for path in paths]


def play_all(
    jobs: Sequence[Job], policy: LoadedOnce, workers: int, ask: Ask | None, load: Progress, progress: BagProgress
) -> list[Outcome]:
    """Plays every job.

    Args:
        jobs: Bags.
        policy: Shared by all bags of this process; the caller closes it.
        workers: Processes; if there are several, each loads a policy of its own.
        ask: Asks a person about ambiguous topics (one process only).
        load: Called with the progress of loading.
        progress: Called with the progress of each bag.

    Returns:
        An outcome per job that was started; fewer after an interruption.
    """
    if workers > 1 and len(jobs) > 1:
        return _play_in_parallel(jobs, workers, progress)
    outcomes: list[Outcome] = []
    for job in jobs:
        outcome = play(job, policy, ask, load, progress)
        outcomes.append(outcome)
        if outcome.samples is not None and not outcome.samples.complete:
            break
    return outcomes


def _play_in_parallel(jobs: Sequence[Job], workers: int, progress: BagProgress) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        try:
            for job, outcome in zip(jobs, pool.map(_play_here, jobs), strict=True):
                outcomes.append(outcome)
                if outcome.samples is not None:
                    progress(job.path.name, len(outcome.samples.times))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    return outcomes


_kept: LoadedOnce | None = None


def _play_here(job: Job) -> Outcome:
    """In a worker: the policy stays for the next job."""
    global _kept
    if _kept is None:
        _kept = LoadedOnce(create(build(dict(job.config))))
    return play(job, _kept, None, no_progress, lambda name, count: None)


def play(job: Job, policy: LoadedOnce, ask: Ask | None, load: Progress, progress: BagProgress) -> Outcome:
    """Plays one bag. A bag that cannot be read is an outcome, a wrong configuration an error."""
    config = build(dict(job.config))
    partial = job.partial_file()
    resume = samples_of.load(partial) if partial is not None and partial.exists() else None
    try:
        bag = Bag(job.path)
    except VlaRosError as error:
        return Outcome(None, None, str(error))
    with bag:
        try:
            selection = select(bag.topics, config, dict(job.overrides), ask, bag.empty)
        except VlaRosError as error:
            return Outcome(None, None, f"{job.path}: {error}")
        fitted = fit(config, selection)
        stepper, note = make_stepper(fitted, policy, load)
        if resume is not None and resume.complete:
            return Outcome(resume, stepper.spec, note=note)
        player = Player(
            bag,
            selection,
            fitted,
            stepper,
            job.options,
            resume=resume,
            partial=partial,
            progress=lambda count: progress(job.path.name, count),
        )
        return Outcome(player.play(), stepper.spec, note=note)
