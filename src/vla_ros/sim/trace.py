"""What is written down while an episode runs."""

from __future__ import annotations

import numpy as np

from vla_ros.sim.results import MAX_PICTURES, EpisodeResult
from vla_ros.sim.scene import Scene
from vla_ros.sim.world import TableTop
from vla_ros.types import FloatArray, UInt8Array


class Trace:
    """Pictures, poses and actions of one episode.

    Attributes:
        actions: The policy's actions so far, each float64 [D].
    """

    def __init__(self) -> None:
        self.actions: list[FloatArray] = []
        self._pictures: list[tuple[int, UInt8Array]] = []
        self._tips: list[FloatArray] = []
        self._fingers: list[float] = []

    def add(self, world: TableTop, picture: UInt8Array | None) -> None:
        """Note where the arm is, and the upright picture of it if there is one."""
        if picture is not None:
            self._pictures.append((len(self._tips), picture))
        self._tips.append(world.tool_position())
        self._fingers.append(float(world.joint_positions()[7:].mean()))

    def result(self, world: TableTop, seed: int, scene: Scene, steps: int, otherwise: str) -> EpisodeResult:
        """The episode as the judge saw it; ``otherwise`` is the reason where the judge has not decided."""
        chosen = np.unique(np.linspace(0, len(self._pictures) - 1, MAX_PICTURES).round().astype(int))
        strip = [self._pictures[index] for index in chosen] if self._pictures else []
        return EpisodeResult(
            seed=seed,
            instruction=scene.instruction,
            success=world.judge.success,
            steps=steps,
            reason=world.judge.reason or otherwise,
            pictures=tuple(picture for _, picture in strip),
            picture_steps=tuple(step for step, _ in strip),
            actions=np.array(self.actions, dtype=np.float64) if self.actions else np.zeros((0, 7)),
            tips=np.array(self._tips, dtype=np.float64).reshape(-1, 3),
            fingers=np.array(self._fingers, dtype=np.float64),
            target=scene.task.target,
            touched=world.judge.touched,
        )
