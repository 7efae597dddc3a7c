"""Proof before promotion: what a trained checkpoint does on held-out episodes beside the one it comes from.

Errors on recordings say nothing about success, so they can only speak against a checkpoint; ``better`` needs scores
of ``vla-ros eval`` in closed loop, of the same episodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Policy
from vla_ros_lab.eval.intervals import paired
from vla_ros_lab.eval.results import read_results, weights_of
from vla_ros_lab.replay.evaluate import Outcome
from vla_ros_lab.replay.figures import Comparer
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.prepare import step_seconds
from vla_ros_lab.replay.result import Result, make_result
from vla_ros_lab.replay.samples import Samples as Played
from vla_ros_lab.training.samples import Samples

MOST_FRAMES = 1000
"""Frames of all held-out episodes from which both policies infer, at most."""

LEAST = 5
"""Episodes without which no interval says anything."""

BETTER, WORSE, NO_CONTRADICTION, UNDECIDED = "better", "worse", "no contradiction", "unknown"

_SENSES = {"mae": -1, "direction_cosine": 1, "gripper_f1": 1}
"""Figures of a replay with intervals over episodes: 1 if higher is better, -1 if lower is better."""


@dataclass(frozen=True)
class Difference:
    """A figure of both checkpoints on the same episodes."""

    figure: str  # ``success``, or one of replay's
    old: float
    new: float
    low: float  # 95 % interval of new - old
    high: float
    sense: int = 1  # 1 if higher is better, -1 if lower is better

    @property
    def is_worse(self) -> bool:
        return self.high < 0 if self.sense > 0 else self.low > 0

    def __str__(self) -> str:
        name = self.figure.replace("_", " ")
        return f"{name} {self.old:.4g} -> {self.new:.4g} (difference {self.low:+.4g} to {self.high:+.4g})"


@dataclass(frozen=True)
class Proof:
    """What speaks for or against a trained checkpoint."""

    verdict: str  # :data:`BETTER`, :data:`WORSE`, :data:`NO_CONTRADICTION` or :data:`UNDECIDED`
    basis: str  # ``closed_loop``, ``recordings`` or ``none``
    pairs: int = 0  # episodes
    differences: tuple[Difference, ...] = ()
    reason: str = ""  # what decided, beside the differences

    def __str__(self) -> str:
        if self.basis == "none":
            return f"{self.verdict}: no episode was held out and no scores were given"
        what = {"closed_loop": "in closed loop", "recordings": "replay of held-out episodes"}[self.basis]
        told = [*map(str, self.differences), *([self.reason] if self.reason else [])]
        return f"{self.verdict}: {what}, {self.pairs} pairs: {'; '.join(told)}"


def replay_held_out(policy: Policy, samples: Samples, episodes: Sequence[range], config: Config) -> Result:
    """Return what ``vla-ros replay`` says of a loaded policy on some episodes, in open loop.

    The first action of each chunk is compared with the recorded one. If there are more than :data:`MOST_FRAMES`
    frames, every k-th is used.
    """
    every = math.ceil(sum(map(len, episodes)) / MOST_FRAMES)
    period, start = round(1e9 * step_seconds(config, samples.spec)), 1_000_000_000
    columns: dict[str, list[Any]] = {
        name: [] for name in ("times", "episodes", "predicted", "recorded", "normalized")
    }
    instructions, spent, began = [], list[float](), time.perf_counter()
    for number, episode in enumerate(episodes):
        session = policy.start_session()
        for index in episode[::every]:
            sample, asked = samples[index], time.perf_counter()
            chunk = policy.infer(session, sample.observation)
            spent.append(1e3 * (time.perf_counter() - asked))
            unknown = np.full(chunk.actions.shape[1], math.nan)
            normalized = unknown if chunk.normalized is None else chunk.normalized[0]
            row = (start + sample.frame * period, number, chunk.actions[0], sample.actions[0], normalized)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        session.close()
        instructions.append(sample.observation.instruction)
        start = columns["times"][-1] + 1_000_000_000
    count = len(spent)
    arrays: dict[str, Any] = {name: np.array(column) for name, column in columns.items()}
    played = Played(
        bag="held-out episodes",
        stamps=arrays["times"],
        openings=np.full((count, len(samples.spec.grippers)), math.nan),
        commands={},
        stages_ms={"total": np.array(spent)},
        age_ms=np.full(count, math.nan),
        instructions=tuple(instructions),
        rule="stamp",
        received=sum(map(len, episodes)),
        skipped=sum(map(len, episodes)) - count,
        topics={"camera": "", "truth": "the data's actions"},
        wall_s=time.perf_counter() - began,
        **arrays,
    )
    return make_result([Outcome(played, samples.spec)], config, ReplayOptions(every=every))


def compare_replays(old: Result, new: Result) -> Proof:
    """Compare the replays of both checkpoints on the same episodes, by the figures that have an interval."""
    episodes = len(old.frames.instructions)
    compare = Comparer(old.spec, old.config)
    between = compare.differences(*(one.frames.take(one.frames.compared) for one in (old, new)))
    differences = tuple(
        Difference(name, old.figures[name], new.figures[name], ends[0], ends[1], _SENSES[name])
        for name, ends in between.items()
        if ends is not None and all(map(math.isfinite, (old.figures[name], new.figures[name])))
    )
    levels = [one.verdict.level for one in (old, new)]
    if levels[1] == "bad" and levels[0] != "bad":
        return Proof(WORSE, "recordings", episodes, differences, f"replay says: {new.verdict.reasons[0]}")
    if episodes < LEAST:
        return Proof(UNDECIDED, "recordings", episodes, differences, f"fewer than {LEAST} episodes were held out")
    verdict = WORSE if any(one.is_worse for one in differences) else NO_CONTRADICTION
    return Proof(verdict, "recordings", episodes, differences)


def compare_scores(scores: Mapping[Path, str]) -> Proof:
    """Compare results of ``vla-ros eval`` of the old and the new checkpoint, paired by task and initial state.

    ``scores`` maps both files, the old one first, to the digest of the checkpoint's weights. Raises ConfigError if
    a file is of other weights, or does not say of which.
    """
    compared = paired_scores(*scores)
    for path, digest in scores.items():
        if (found := weights_of(path)) != digest:
            what = "is of another checkpoint" if found else "does not say which weights were scored"
            expected = "expected vla-ros eval --checkpoint of the old one, then of the new one"
            raise ConfigError(f"--scores {path}: {what}; {expected}")
    return compared


def paired_scores(first: Path, second: Path) -> Proof:
    """Compare results of ``vla-ros eval``, whatever was scored."""
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
    return Proof(verdict, "closed_loop", len(pairs), (Difference("success", old, new, low, high),))


def hold_out(episodes: Sequence[range], share: float, seed: int) -> tuple[list[range], list[range]]:
    """Divide episodes into those to train on and those to hold out; few are not divided."""
    count = round(share * len(episodes))
    count = max(count, 1) if share and len(episodes) >= LEAST else count
    count = min(count, len(episodes) - 1)
    chosen = set(np.random.default_rng((seed, 2)).permutation(len(episodes))[:count].tolist())
    parts: tuple[list[range], list[range]] = ([], [])
    for number, episode in enumerate(episodes):
        if len(episode):
            parts[number in chosen].append(episode)
    return parts


def as_json(proof: Proof) -> dict[str, Any]:
    return asdict(proof)
