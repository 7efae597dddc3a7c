"""Samples whose actions are those of a policy on the recorded observations."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy
from vla_ros_lab.training.samples import Sample, Samples

_BATCH = 16  # samples of an inference
_SHOWN = 10.0  # seconds between lines of progress


@dataclass(frozen=True, eq=False)
class TeacherSamples:
    """Samples with other actions; picklable, so that workers can read them."""

    samples: Samples
    file: Path  # float32 [N, H, D], the actions of each sample

    @property
    def episodes(self) -> Sequence[range]:
        return self.samples.episodes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample, actions = self.samples[index], np.load(self.file, mmap_mode="r")[index].astype(np.float64)
        return replace(sample, actions=actions, is_pad=np.zeros(len(actions), np.bool_))


def act(policy: Policy, samples: Samples, file: Path, say: Callable[[str], None]) -> TeacherSamples:
    """Let a policy infer a chunk for every sample, each from other noise; keeps them in ``file`` and resumes there.

    Raises VlaRosError if the policy cannot infer from a sample.
    """
    policy.load()
    shape = len(samples), policy.spec.horizon, policy.spec.dimension
    if not file.exists():
        new = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
        new.fill(np.nan)
        new.flush()
    chunks = np.lib.format.open_memmap(file, mode="r+")
    if chunks.shape != shape:
        raise VlaRosError(f"{file}: chunks of {list(chunks.shape)}, expected {list(shape)}; name another --output")
    missing = np.flatnonzero(np.isnan(chunks).any(axis=(1, 2)))
    told = time.monotonic()
    for part in np.array_split(missing, -(-len(missing) // _BATCH)) if len(missing) else ():
        asked = []
        for index in part.tolist():
            noise = np.random.default_rng((1, index)).standard_normal(policy.spec.noise)
            asked.append((policy.start_session(), replace(samples[index].observation, noise=noise)))
        for index, answer in zip(part.tolist(), policy.infer_batch(asked), strict=True):
            if isinstance(answer, VlaRosError):
                raise answer
            chunks[index] = answer.actions
        if time.monotonic() - told > _SHOWN:
            told = time.monotonic()
            chunks.flush()
            say(f"the checkpoint acts: sample {part[-1] + 1} of {len(samples)}")
    chunks.flush()
    policy.close()
    return TeacherSamples(samples, file)
