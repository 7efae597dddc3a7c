"""Plays all bags, sequentially or in parallel; partial results survive an interruption."""

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
from vla_ros.config.checkpoints import folder_of
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.policies.base import Policy, create
from vla_ros_lab.replay import samples as samples_of
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.play import Player, ReplayOptions
from vla_ros_lab.replay.prepare import build_pipeline_for, fit
from vla_ros_lab.replay.samples import Samples
from vla_ros_lab.replay.storage import BagError
from vla_ros_lab.replay.topics import Ask, topics_of

BagProgress = Callable[[str, int], None]
"""Called with the name of a bag and the number of its frames that are done."""


@dataclass(frozen=True)
class BagJob:
    """One bag, how to play it, and the folder for partial results."""

    path: Path
    config: Config
    options: ReplayOptions
    partial: Path | None = None

    def partial_file(self) -> Path | None:
        """Return the file of partial results; its name depends on the bag, the checkpoint and the configuration."""
        if self.partial is None:
            return None
        named = (getattr(self.config.policy, name, "") for name in ("checkpoint", "view"))
        files = [file for one in named if one for file in (folder_of(one), *sorted(folder_of(one).rglob("*")))]
        modified = [file.stat().st_mtime_ns for file in (self.path, *filter(Path.is_file, files))]
        key = [str(self.path.resolve()), modified, flatten(self.config), asdict(self.options)]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self.partial / f"{self.path.name}-{digest}.npz"


@dataclass(frozen=True)
class Outcome:
    """The samples of a bag, or the problem that prevented them."""

    samples: Samples | None
    spec: PolicySpec | None
    problem: str = ""
    note: str = ""


def play_all(
    jobs: Sequence[BagJob],
    policy: Callable[[], Policy],
    workers: int = 1,
    ask: Ask | None = None,
    progress: BagProgress = lambda bag, frames: None,
) -> list[Outcome]:
    """Play the jobs; return an outcome for each, or fewer after an interruption.

    ``policy`` returns the loaded policy, which all bags share. With several ``workers``, each worker process loads
    its own policy. ``ask`` asks a person about ambiguous topics (only without worker processes).
    """
    outcomes: list[Outcome] = []
    if workers > 1 and len(jobs) > 1:
        # ReplayOptions are sent as JSON, because pickle may not find the class of a policy's options.
        flat = [(job.path, json.dumps(flatten(job.config)), job.options, job.partial) for job in jobs]
        with _pool(min(workers, len(jobs))) as run, contextlib.suppress(KeyboardInterrupt):
            for job, outcome in zip(jobs, run(_play_here, flat), strict=True):
                outcomes.append(outcome)
                if outcome.samples is not None:
                    progress(job.path.name, len(outcome.samples.times))
        return outcomes
    for job in jobs:
        outcomes.append(outcome := play(job, policy, ask, progress))
        if outcome.samples is not None and not outcome.samples.complete:
            break
    return outcomes


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Iterator[Outcome]]]:
    """Yield the ``map`` of a process pool: Ray's if Ray is installed, otherwise a local one.

    Ray distributes the processes over its cluster (``RAY_ADDRESS``, otherwise this machine) and its GPUs.
    """
    try:
        import ray
        from ray.util.multiprocessing import Pool
    except ImportError:
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // workers)
        with ProcessPoolExecutor(workers, context, _limit_threads, (threads,)) as pool:
            yield pool.map
            pool.shutdown(cancel_futures=True)
        return
    ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
    try:
        resources = ray.cluster_resources()
        shares = {"num_cpus": "CPU", "num_gpus": "GPU"}
        share = {name: min(1.0, resources.get(kind, 0) / workers) for name, kind in shares.items()}
        yield Pool(workers, ray_remote_args=share).imap
    finally:
        ray.shutdown()


def _limit_threads(count: int) -> None:
    """Limit the threads of libraries loaded later, because workers on one core block each other."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


@functools.cache
def _load(flat: str) -> tuple[Config, Policy]:
    config = build(json.loads(flat))
    policy = create(config)
    policy.load()
    return config, policy


def _play_here(job: tuple[Path, str, ReplayOptions, Path | None]) -> Outcome:
    path, flat, options, partial = job
    config, policy = _load(flat)
    return play(BagJob(path, config, options, partial), lambda: policy)


def play(
    job: BagJob,
    policy: Callable[[], Policy],
    ask: Ask | None = None,
    progress: BagProgress = lambda bag, frames: None,
) -> Outcome:
    """Play one bag; if the bag cannot be read, the outcome contains the problem.

    Raises ConfigError if the configuration is wrong.
    """
    partial = job.partial_file()
    resume = samples_of.load_samples(partial) if partial is not None and partial.exists() else None
    with contextlib.ExitStack() as stack:
        try:
            bag = stack.enter_context(Bag(job.path))
            selection = topics_of(bag, job.config, job.options.topics, ask)
        except VlaRosError as error:
            where = "" if str(job.path) in str(error) else f"{job.path}: "
            return Outcome(None, None, f"{where}{error}")
        config = fit(job.config, selection)
        source = PolicySource(policy()).start()
        pipeline, note = build_pipeline_for(config, source.spec)
        spec = pipeline.binding.spec
        if resume is not None and resume.complete:
            return Outcome(resume, spec, note=note)
        named = functools.partial(progress, job.path.name)
        try:
            player = Player(bag, selection, config, source, pipeline, job.options, resume, partial, named)
            samples = player.play()
        except BagError as error:
            return Outcome(None, None, f"{job.path}: {error}")
        return Outcome(samples, spec, note="; ".join((note, *player.remarks) if note else player.remarks))
