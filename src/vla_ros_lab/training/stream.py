"""The samples of a run in their order, prepared by workers.

Position p of a run determines everything random about its sample: which one it is, its noise, and how its images
are augmented. So a run that resumes, or runs in several processes, sees what an unbroken one sees.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from vla_ros.errors import VlaRosError
from vla_ros.types import IntArray
from vla_ros_lab.training.samples import Samples
from vla_ros_models.training import Augment, Prepared, SampleInputs, as_it_is


@lru_cache(maxsize=2)
def _order(chosen: tuple[range, ...], seed: int, epoch: int) -> IntArray:
    every = np.concatenate([np.asarray(one) for one in chosen])
    return np.random.default_rng((seed, epoch)).permutation(every)


@dataclass(frozen=True, eq=False)
class SampleStream(Dataset[Prepared]):
    """Prepared samples by their position in the run; each epoch has all samples of ``episodes`` once."""

    samples: Samples
    episodes: Sequence[range]
    inputs: SampleInputs
    seed: int
    augment: Augment = as_it_is

    def __getitem__(self, position: int) -> Prepared:
        chosen = tuple(self.episodes)
        epoch, place = divmod(position, sum(map(len, chosen)))
        sample = self.samples[int(_order(chosen, self.seed, epoch)[place])]
        parts = {"its actions": sample.actions, **sample.observation.state}
        if wrong := [name for name, values in parts.items() if not np.isfinite(values).all()]:
            raise VlaRosError(
                f"episode {sample.episode}, frame {sample.frame}: {', '.join(wrong)} contain NaN or Inf; leave the "
                "episode out"
            )
        random = np.random.default_rng((self.seed, 1, position))
        return self.inputs.prepare(sample.observation, sample.actions, sample.is_pad, random, self.augment)

    def batches(
        self,
        start: int,
        steps: int,
        batch: int,
        accumulation: int = 1,
        process: tuple[int, int] = (0, 1),
        workers: int = 0,
        pin: bool = False,
    ) -> Iterator[Any]:
        """Yield the batches of the steps from ``start``; ``process`` is its number and how many there are."""
        rank, world = process

        def positions() -> Iterator[list[int]]:
            for micro in range(start * accumulation, steps * accumulation):
                first = (micro * world + rank) * batch
                yield list(range(first, first + batch))

        loader: DataLoader[Any] = DataLoader(
            self,
            batch_sampler=list(positions()),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,  # a tokenizer cannot be pickled
            collate_fn=self.inputs.collate,
            pin_memory=pin,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_ignore_interrupts,
        )
        try:
            yield from loader
        except VlaRosError as error:  # a worker's comes with its traceback as text
            last = str(error).strip().splitlines()[-1]
            raise VlaRosError(re.sub(r"^[\w.]+: ", "", last)) from None


def _ignore_interrupts(worker: int) -> None:
    """Leave Ctrl+C to the process that saves the state."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
