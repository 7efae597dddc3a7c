"""Proof before promotion: what a trained checkpoint does on held-out episodes beside the one it comes from.

Errors on recordings say nothing about success, so they can only speak against a checkpoint; ``better`` needs scores
of ``vla-ros eval`` in closed loop, of the same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.policies.base import Policy
from vla_ros.types import FloatArray
from vla_ros_lab.eval.intervals import paired
from vla_ros_lab.eval.results import read_results
from vla_ros_lab.training.samples import Samples

BOOTSTRAPS = 2000
HELD_OUT_FRAMES = 40
"""Frames of each held-out episode that both policies infer from."""

LEAST = 5
"""Episodes without which no interval says anything."""

BETTER, WORSE, NO_CONTRADICTION, UNDECIDED = "better", "worse", "no contradiction", "unknown"


@dataclass(frozen=True)
class Proof:
    """What speaks for or against a trained checkpoint."""

    verdict: str  # :data:`BETTER`, :data:`WORSE`, :data:`NO_CONTRADICTION` or :data:`UNDECIDED`
    basis: str  # ``closed_loop``, ``recordings`` or ``none``
    difference: float = 0.0  # of the success rate, or of the error; of the new checkpoint minus the old one
    low: float = 0.0  # 95 % interval of the difference
    high: float = 0.0
    pairs: int = 0  # episodes
    old: float = 0.0
    new: float = 0.0

    def __str__(self) -> str:
        what = {"closed_loop": "success rate in closed loop", "recordings": "error on held-out episodes"}
        if self.basis == "none":
            return "unknown: no episode was held out and no scores were given"
        return (
            f"{self.verdict}: {what[self.basis]} {self.old:.4g} -> {self.new:.4g}, difference "
            f"{self.difference:+.4g} ({self.low:+.4g} to {self.high:+.4g}, {self.pairs} pairs)"
        )


def errors_of(policy: Policy, samples: Samples, episodes: Sequence[range], scale: FloatArray) -> FloatArray:
    """Return each episode's mean error, in deviations of the recorded actions; ``policy`` is loaded.

    Every frame's chunk is compared with the recorded actions; what is after the episode's end does not count.
    """
    found = []
    for episode in episodes:
        session, total, count = policy.start_session(), 0.0, 0
        for index in np.unique(np.linspace(episode.start, episode.stop - 1, HELD_OUT_FRAMES).astype(int)).tolist():
            sample = samples[index]
            session.reset()
            chunk = policy.infer(session, sample.observation).actions
            steps = min(len(chunk), len(sample.actions))
            free = ~sample.is_pad[:steps]
            error = np.abs(chunk[:steps] - sample.actions[:steps])[free] / scale
            total, count = total + float(error.sum()), count + error.size
        session.close()
        found.append(total / max(1, count))
    return np.array(found)


def scale_of(samples: Samples, episodes: Sequence[range]) -> FloatArray:
    """Return the deviation of each number of the recorded actions [D]; 1 where it never changes."""
    every = np.concatenate([np.asarray(episode) for episode in episodes])
    some = every[np.unique(np.linspace(0, len(every) - 1, 1000).astype(int))]
    first = [samples[index].actions[0] for index in some.tolist()]
    deviation = np.std(first, axis=0)
    found: FloatArray = np.where(deviation > 1e-9, deviation, 1.0)
    return found


def compare_errors(old: FloatArray, new: FloatArray, seed: int = 0) -> Proof:
    """Compare the errors of both checkpoints on the same episodes."""
    if not len(old):
        return Proof(UNDECIDED, "none")
    difference = new - old
    draws = np.random.default_rng(seed).integers(0, len(old), (BOOTSTRAPS, len(old)))
    low, high = np.quantile(difference[draws].mean(axis=1), [0.025, 0.975]).tolist()
    verdict = UNDECIDED if len(old) < LEAST else WORSE if low > 0 else NO_CONTRADICTION
    mean = float(difference.mean())
    return Proof(verdict, "recordings", mean, low, high, len(old), float(old.mean()), float(new.mean()))


def compare_scores(first: Path, second: Path) -> Proof:
    """Compare results of ``vla-ros eval`` of the old and the new checkpoint, paired by task and initial state."""
    a, b = read_results(first), read_results(second)
    pairs = [
        (one, other) for key in a.keys() & b.keys() if (one := a[key]) is not None and (other := b[key]) is not None
    ]
    if not pairs:
        return Proof(UNDECIDED, "none")
    lost = sum(one and not other for one, other in pairs)
    gained = sum(other and not one for one, other in pairs)
    low, high = paired(lost, gained, len(pairs))
    old, new = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    verdict = BETTER if low > 0 else WORSE if high < 0 else NO_CONTRADICTION
    return Proof(verdict, "closed_loop", new - old, low, high, len(pairs), old, new)


def hold_out(episodes: Sequence[range], share: float, seed: int) -> tuple[list[range], list[range]]:
    """Divide episodes into those to train on and those to hold out; few are not divided."""
    count = round(share * len(episodes))
    count = max(count, 1) if share and len(episodes) >= 5 else count
    count = min(count, len(episodes) - 1)
    chosen = set(np.random.default_rng((seed, 2)).permutation(len(episodes))[:count].tolist())
    parts: tuple[list[range], list[range]] = ([], [])
    for number, episode in enumerate(episodes):
        if len(episode):
            parts[number in chosen].append(episode)
    return parts


def as_json(proof: Proof) -> dict[str, Any]:
    return {**vars(proof)}
