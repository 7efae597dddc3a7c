"""Plays all bags, one after another or in parallel; partial results survive an interruption."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_ros.config import Config, build, flatten
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy, create
from vla_ros.replay import samples as samples_of
from vla_ros.replay.bag import Bag
from vla_ros.replay.play import Options, Player
from vla_ros.replay.prepare import fit, make_stepper
from vla_ros.replay.samples import Samples
from vla_ros.replay.topics import Ask, select

BagProgress = Callable[[str, int], None]
"""Called with a bag's name and how many of its frames are done."""


def no_progress(bag: str, frames: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Job:
    """One bag, how to play it, and the folder of partial results."""

    path: Path
    config: Config
    options: Options
    partial: Path | None = None

    def partial_file(self) -> Path | None:
        """File of this job's partial results; a different configuration or a changed bag gives a different name."""
        if self.partial is None:
            return None
        modified = self.path.stat().st_mtime_ns
        key = [str(self.path.resolve()), modified, flatten(self.config), asdict(self.options)]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self.partial / f"{self.path.name}-{digest}.npz"


@dataclass(frozen=True)
class Outcome:
    """The samples of a bag, or why there are none."""

    samples: Samples | None
    spec: PolicySpec | None
    problem: str = ""
    note: str = ""


def play_all(
    jobs: Sequence[Job],
    policy: Callable[[], Policy],
    workers: int = 1,
    ask: Ask | None = None,
    progress: BagProgress = no_progress,
) -> list[Outcome]:
    """Play every job; returns an outcome per job that was started, fewer after an interruption.

    ``policy`` returns the loaded policy, shared by all bags of this process; each of several ``workers``
    (processes) loads its own. ``ask`` asks a person about ambiguous topics (one process only).
    """
    if workers > 1 and len(jobs) > 1:
        return _play_in_parallel(jobs, workers, progress)
    outcomes: list[Outcome] = []
    for job in jobs:
        outcomes.append(outcome := play(job, policy, ask, progress))
        if outcome.samples is not None and not outcome.samples.complete:
            break
    return outcomes


def _play_in_parallel(jobs: Sequence[Job], workers: int, progress: BagProgress) -> list[Outcome]:
    flat = [(job.path, json.dumps(flatten(job.config)), job.options, job.partial) for job in jobs]
    outcomes: list[Outcome] = []
    with _pool(min(workers, len(jobs))) as play_each, contextlib.suppress(KeyboardInterrupt):
        for job, outcome in zip(jobs, play_each(flat), strict=True):
            outcomes.append(outcome)
            if outcome.samples is not None:
                progress(job.path.name, len(outcome.samples.times))
    return outcomes


Flat = tuple[Path, str, Options, Path | None]
"""A job as it is sent to another process: the options as JSON, because a policy's own are a class of its own."""


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[[list[Flat]], Iterator[Outcome]]]:
    """Play jobs in several processes, in Ray's if Ray is installed, and yield outcomes in order.

    Ray distributes them over its cluster (``RAY_ADDRESS``, otherwise this machine) and its GPUs.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ImportError:
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // workers)
        with ProcessPoolExecutor(workers, context, _limit_threads, (threads,)) as pool:
            yield lambda jobs: pool.map(_play_here, jobs)
            pool.shutdown(cancel_futures=True)
        return
    ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
    try:
        resources = ray.cluster_resources()
        share = {name: min(1.0, resources.get(kind, 0) / workers) for name, kind in _SHARES.items()}
        remote = ray.remote(**share)(_RayWorker)
        actors = ActorPool([remote.remote() for _ in range(workers)])
        yield lambda jobs: actors.map(lambda actor, job: actor.play.remote(job), jobs)
    finally:
        ray.shutdown()


def _limit_threads(count: int) -> None:
    """Limit the threads of libraries loaded from now on: workers that share a core block each other."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


_SHARES = {"num_cpus": "CPU", "num_gpus": "GPU"}


class _RayWorker:
    """One of Ray's processes."""

    def play(self, job: Flat) -> Outcome:
        return _play_here(job)


@functools.cache
def _load(flat: str) -> tuple[Config, Policy]:
    """Return the options from JSON and the worker's policy; both are cached for the next job."""
    config = build(json.loads(flat))
    policy = create(config)
    policy.load()
    return config, policy


def _play_here(job: Flat) -> Outcome:
    path, flat, options, partial = job
    config, policy = _load(flat)
    return play(Job(path, config, options, partial), lambda: policy)


def play(
    job: Job, policy: Callable[[], Policy], ask: Ask | None = None, progress: BagProgress = no_progress
) -> Outcome:
    """Play one bag. An unreadable bag is an outcome; a wrong configuration is an error."""
    partial = job.partial_file()
    resume = samples_of.load(partial) if partial is not None and partial.exists() else None
    try:
        bag = Bag(job.path)
    except VlaRosError as error:
        return Outcome(None, None, str(error))
    with bag:
        try:
            selection = select(bag.topics, job.config, job.options.topics, ask, bag.empty)
        except VlaRosError as error:
            return Outcome(None, None, f"{job.path}: {error}")
        config = fit(job.config, selection)
        stepper, note = make_stepper(config, policy())
        if resume is not None and resume.complete:
            return Outcome(resume, stepper.spec, note=note)
        named = functools.partial(progress, job.path.name)
        player = Player(bag, selection, config, stepper, job.options, resume, partial, named)
        return Outcome(player.play(), stepper.spec, note=note)
