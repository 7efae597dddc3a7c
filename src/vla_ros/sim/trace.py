"""Records an episode while it runs."""

from __future__ import annotations

import numpy as np

from vla_ros.sim import arm
from vla_ros.sim.results import MAX_IMAGES, Commands, EpisodeResult
from vla_ros.sim.scene import Scene
from vla_ros.sim.world import TableTop
from vla_ros.types import FloatArray, UInt8Array


class Trace:
    """Images, poses of the arms, and actions of one episode.

    Attributes:
        actions: The policy's actions so far, each float64 [D].
        commands: The commands to the first arm.
    """

    def __init__(self) -> None:
        self.actions: list[FloatArray] = []
        self.commands = Commands()
        self._images: list[UInt8Array] = []
        self._tips: list[list[FloatArray]] = []
        self._fingers: list[FloatArray] = []

    def add(self, world: TableTop, image: UInt8Array | None) -> None:
        """Record the poses of the arms, and the upright image if there is one."""
        if image is not None:
            self._images.append(image)
        arms = len(world.mounts)
        self._tips.append([world.tool_position(index) for index in range(arms)])
        self._fingers.append(world.joint_positions().reshape(arms, -1)[:, len(arm.JOINT_NAMES) :].mean(axis=1))

    def result(self, world: TableTop, seed: int, scene: Scene, steps: int, otherwise: str) -> EpisodeResult:
        """Return the episode's result; ``otherwise`` is the reason if the judge has not decided."""
        count = len(self._images)
        chosen = np.unique(np.linspace(0, count - 1, min(count, MAX_IMAGES)).round().astype(int))
        return EpisodeResult(
            seed=seed,
            instruction=scene.instruction,
            success=world.judge.success,
            steps=steps,
            reason=world.judge.reason or otherwise,
            images=tuple(self._images[index] for index in chosen),
            actions=np.array(self.actions, dtype=np.float64) if self.actions else np.zeros((0, 0)),
            tips=np.array(self._tips, dtype=np.float64),
            fingers=np.array(self._fingers, dtype=np.float64),
            target=" and ".join(scene.task.targets),
            touched=world.judge.touched,
            commands=self.commands,
        )
