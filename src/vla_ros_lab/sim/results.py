"""Results of a demo run: plain data for the terminal, the JSON file and the HTML report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.files import save_text
from vla_ros.telemetry.execution import Steadiness
from vla_ros.types import FloatArray, IntArray, UInt8Array
from vla_ros_lab.sim.expert import RATE_HZ, ExpertPolicy

MAX_IMAGES = 12
"""Maximum number of images kept per episode."""

_EPISODE_FIGURES = ("seed", "instruction", "success", "steps", "reason", "touched")


@dataclass(frozen=True)
class Commands:
    """The commands to the first arm in an episode."""

    # Times of arrival and end of the episode, seconds, float64 [T + 1]; empty in lockstep.
    times: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Stamp of each command's frame, nanoseconds, int64 [T]; the same for all commands of a chunk.
    stamps: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Joint positions, float64 [T, N], radians.
    positions: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))


def steadiness(episodes: Iterable[Commands], rate_hz: float) -> dict[str, float]:
    """Return gaps and seams of the commands (:meth:`Steadiness.figures`), which are due at ``rate_hz``."""
    statistics, period = Steadiness(), 1 / rate_hz
    for commands in episodes:
        statistics.interrupted()
        for at in commands.times:
            statistics.waited(float(at), period)
        begins = np.diff(commands.stamps, prepend=commands.stamps[:1]) != 0
        for positions, begins_chunk in zip(commands.positions, begins, strict=True):
            statistics.moved(positions, None, period, begins_chunk=bool(begins_chunk))
    return statistics.figures()


@dataclass(frozen=True)
class EpisodeResult:
    """Result and traces of one episode."""

    seed: int  # seed of the scene; the same seed yields the same scene and instruction
    instruction: str  # the instruction by which the episode was judged
    success: bool  # True if the named objects ended up as instructed
    steps: int  # control steps until success or the end
    reason: str  # ``success``, ``wrong_object``, ``timeout`` or ``no_command``
    # At most :data:`MAX_IMAGES` upright images, uint8 [H, W, 3] RGB, in order of time.
    images: tuple[UInt8Array, ...] = ()
    # Float64 [T, D], the policy's actions before limits and kinematics; [0, 0] if none was received.
    actions: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    # Float64 [T, arms, 3], measured position of each arm's ``tool`` in the table's frame, metres.
    tips: FloatArray = field(default_factory=lambda: np.zeros((0, 1, 3)))
    # Float64 [T, arms], measured opening of one finger, metres (0 closed, 0.04 open).
    fingers: FloatArray = field(default_factory=lambda: np.zeros((0, 1)))
    target: str = ""  # names of the requested objects, for example ``red_cube and blue_ball``
    touched: str = ""  # name of the object that was moved instead, or ""
    commands: Commands = field(default_factory=Commands)  # commands to the first arm


@dataclass(frozen=True)
class DemoResult:
    """All episodes of a run, with latency and frame counters of the policy node."""

    config: Config  # options of the policy node
    mode: str  # ``lockstep``, ``real_time`` or ``simulated_time``
    seed: int  # seed of the first episode; each further episode adds one
    episodes: tuple[EpisodeResult, ...]
    # Stage of the policy node to ``{"p50": ms, "p99": ms}``.
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Frames ``received``, ``used`` and ``dropped`` (by reason) by the policy node.
    frames: Mapping[str, Any] = field(default_factory=dict)
    # Steps, stalls and seams of the policy node's plan (``ExecutionStats.summary``); may be empty.
    execution: Mapping[str, float] = field(default_factory=dict)
    # Stage to individual measurements in milliseconds; may be empty.
    latency_samples_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # Options that made the task harder (dimmed camera, bumps, ...).
    controls: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0  # seconds that the episodes took

    @property
    def rate_hz(self) -> float:
        """Control steps per second of simulated time."""
        return max(self.config.control.rate_hz, 0.0) or RATE_HZ

    @property
    def checkpoint(self) -> str:
        return str(getattr(self.config.policy, "checkpoint", ""))

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.config.arms)

    @property
    def action(self) -> tuple[Component, ...]:
        if self.config.policy.name == "expert":
            return ExpertPolicy(self.config).spec.action
        stated = self.config.features.action
        return parse_components(" + ".join(stated), action=True) if stated else PolicySpec().action

    @property
    def success_rate(self) -> float:
        """Share of successful episodes, 0 to 1; 0 if there are no episodes."""
        return sum(episode.success for episode in self.episodes) / max(1, len(self.episodes))

    @property
    def wrong_object_rate(self) -> float:
        """Share of episodes that moved another object, 0 to 1; 0 if there are no episodes."""
        return sum(episode.reason == "wrong_object" for episode in self.episodes) / max(1, len(self.episodes))

    @property
    def seconds_to_success(self) -> float | None:
        """Mean duration of the successful episodes, seconds of simulated time; None if all failed."""
        steps = [episode.steps for episode in self.episodes if episode.success]
        return float(np.mean(steps)) / self.rate_hz if steps else None

    @property
    def motion(self) -> dict[str, float | None]:
        """``stalled_share``, ``longest_gap_ms`` and ``seam_ratio``; None if a figure does not apply."""
        figures = steadiness((episode.commands for episode in self.episodes), self.rate_hz)
        return {name: figures.get(name) for name in ("stalled_share", "longest_gap_ms", "seam_ratio")}

    def with_stats(self, stats: Mapping[str, Any]) -> DemoResult:
        """Return the results with the policy node's statistics (``vla-ros run --stats``).

        Stages that a simulated clock measured took no time, and are left out.
        """
        names = ("latency_ms", "frames", "execution", "latency_samples_ms")
        found = replace(self, **{name: stats[name] for name in names if name in stats})
        spent = {stage: times for stage, times in found.latency_ms.items() if times["p99"] > 0}
        samples = {stage: times for stage, times in found.latency_samples_ms.items() if stage in spent}
        return replace(found, latency_ms=spent, latency_samples_ms=samples)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain JSON values, without images and traces."""
        plain = ("checkpoint", "mode", "rate_hz", "seed", "wall_s")
        rates = ("success_rate", "wrong_object_rate", "seconds_to_success")
        return {
            "policy": self.config.policy.name,
            "schedule": self.config.control.schedule,
            "delay_ms": self.config.control.inject_delay_ms,
            **{name: getattr(self, name) for name in (*plain, *rates)},
            **self.motion,
            "arms": list(self.arms),
            "action": " + ".join(map(str, self.action)),
            "episodes": [{name: getattr(episode, name) for name in _EPISODE_FIGURES} for episode in self.episodes],
            "latency_ms": {stage: dict(values) for stage, values in self.latency_ms.items()},
            "frames": dict(self.frames),
            "execution": dict(self.execution),
            "controls": dict(self.controls),
        }

    def write_json(self, path: Path) -> None:
        """Write :meth:`to_json` to a file and create its folder; ``-`` is standard output."""
        save_text(path, json.dumps(self.to_json(), indent=2) + "\n")
