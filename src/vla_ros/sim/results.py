"""What a run of the demo leaves behind: plain data for the terminal, the JSON file and the HTML report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.types import FloatArray, UInt8Array

MAX_PICTURES = 12
"""Most pictures that an episode's strip keeps."""


@dataclass(frozen=True)
class EpisodeResult:
    """One episode: what was asked, what happened, and enough to show it.

    Attributes:
        seed: Seed of the scene; the same seed gives the same scene and instruction.
        instruction: The command that the policy was given.
        success: True where the named object ended as the instruction says.
        steps: Control steps (0.1 s of simulated time each) until success or the end.
        reason: ``success``, ``wrong_object``, ``timeout`` or ``no_command``.
        pictures: At most :data:`MAX_PICTURES` upright frames, uint8 [H, W, 3] RGB, in order of time.
        picture_steps: The step at which each picture was taken.
        actions: Float64 [T, 7], the policy's actions before limits and kinematics; empty [0, 7] if not heard.
        tips: Float64 [T, 3], measured position of the frame ``tool`` in the base frame, metres.
        fingers: Float64 [T], measured opening of one finger, metres (0 closed, 0.04 open).
        target: Name of the object that was asked for, for example ``red_cube``.
        touched: Name of the object that was moved in its stead, or "".
    """

    seed: int
    instruction: str
    success: bool
    steps: int
    reason: str
    pictures: tuple[UInt8Array, ...] = ()
    picture_steps: tuple[int, ...] = ()
    actions: FloatArray = field(default_factory=lambda: np.zeros((0, 7)))
    tips: FloatArray = field(default_factory=lambda: np.zeros((0, 3)))
    fingers: FloatArray = field(default_factory=lambda: np.zeros(0))
    target: str = ""
    touched: str = ""


@dataclass(frozen=True)
class DemoResult:
    """All episodes of one run, with the latency and the frame counters of the policy node.

    Attributes:
        policy: Name of the policy.
        checkpoint: Its folder, or "".
        mode: ``lockstep`` or ``real_time``.
        rate_hz: Rate of the camera in hertz of simulated time.
        seed: Seed of the first episode; the others follow by one.
        episodes: One result each.
        latency_ms: Stage of the policy node to ``{"p50": ms, "p99": ms}``.
        frames: ``received``, ``used`` and ``dropped`` (reason to number), as the policy node counted them.
        latency_samples_ms: Stage to single measurements in milliseconds, for histograms; may be empty.
        controls: Options that were set to spoil or harden the run (dimmed camera, pushes, ...), for the report.
        wall_s: Seconds that the episodes took.
    """

    policy: str
    checkpoint: str
    mode: str
    rate_hz: float
    seed: int
    episodes: tuple[EpisodeResult, ...]
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    frames: Mapping[str, Any] = field(default_factory=dict)
    latency_samples_ms: Mapping[str, FloatArray] = field(default_factory=dict)
    controls: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def success_rate(self) -> float:
        """Share of episodes that succeeded, 0 to 1; 0 where there were none."""
        if not self.episodes:
            return 0.0
        return sum(episode.success for episode in self.episodes) / len(self.episodes)

    @property
    def wrong_object_rate(self) -> float:
        """Share of episodes that ended because another object was picked or pushed, 0 to 1."""
        if not self.episodes:
            return 0.0
        return sum(episode.reason == "wrong_object" for episode in self.episodes) / len(self.episodes)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values; pictures and traces are left to the report."""
        return {
            "policy": self.policy,
            "checkpoint": self.checkpoint,
            "mode": self.mode,
            "rate_hz": self.rate_hz,
            "seed": self.seed,
            "success_rate": self.success_rate,
            "wrong_object_rate": self.wrong_object_rate,
            "episodes": [
                {
                    "seed": episode.seed,
                    "instruction": episode.instruction,
                    "success": episode.success,
                    "steps": episode.steps,
                    "reason": episode.reason,
                    "touched": episode.touched,
                }
                for episode in self.episodes
            ],
            "latency_ms": {stage: dict(values) for stage, values in self.latency_ms.items()},
            "frames": dict(self.frames),
            "controls": dict(self.controls),
            "wall_s": self.wall_s,
        }

    def write_json(self, path: Path) -> None:
        """Write :meth:`to_json` to a file; its folder is made if need be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
