"""An episode: its task, its steps, and the record of images, poses and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.control.command import Command
from vla_ros.errors import VlaRosError
from vla_ros.sim import arm
from vla_ros.sim.results import MAX_IMAGES, Commands, EpisodeResult
from vla_ros.sim.scene import shuffled_instruction, switched
from vla_ros.sim.world import TableTop
from vla_ros.types import FloatArray, UInt8Array


@dataclass(frozen=True)
class EpisodeOptions:
    """How episodes are run."""

    max_steps: int = 80  # control steps after which an episode fails
    # Seconds of wall clock to wait for each command (lockstep) or the first one (real time).
    step_timeout: float = 30.0
    camera_hz: float = 10.0  # camera rate; in lockstep a frame is published at each control step
    wrist: tuple[str, ...] = ()  # wrist cameras whose images are published, too
    blank: bool = False  # publish black images; a policy that still succeeds ignores the images
    # Name another object in the instruction but judge by the original one; a policy that still succeeds ignores
    # the instruction.
    shuffle: bool = False
    switch_at: int = 0  # step at which a distractor becomes the target; 0: never


class Episode:
    """An episode in ``world``, which is reset to the scene of ``seed``.

    Attributes:
        instruction: The instruction to follow; it changes at step ``switch_at``.
        steps: Number of control steps so far.
        over: True once the judge has decided or ``max_steps`` steps have run.
        actions: The policy's actions so far, each float64 [D].
    """

    def __init__(self, world: TableTop, seed: int, options: EpisodeOptions) -> None:
        self._world, self._seed, self._options = world, seed, options
        scene = world.reset(seed)
        self.instruction = shuffled_instruction(scene) if options.shuffle else scene.instruction
        self.steps, self.over, self._ticks = 0, False, 0
        self.actions: list[FloatArray] = []
        self._images: list[UInt8Array] = []
        self._tips: list[list[FloatArray]] = []
        self._fingers: list[FloatArray] = []

    def record(self, image: UInt8Array | None) -> None:
        """Record the poses of the arms, and the upright image if there is one."""
        world, arms = self._world, len(self._world.mounts)
        if image is not None:
            self._images.append(image)
        self._tips.append([world.tool_position(index) for index in range(arms)])
        self._fingers.append(world.joint_positions().reshape(arms, -1)[:, len(arm.JOINT_NAMES) :].mean(axis=1))

    def tick(self) -> bool:
        """Advance the physics by one of the world's ticks; returns True at the end of a control step."""
        world, options = self._world, self._options
        world.advance(world.substeps // world.ticks)
        self._ticks += 1
        if self._ticks % world.ticks:
            return False
        self.steps += 1
        self.over = world.watch() or self.steps >= options.max_steps
        if self.steps == options.switch_at and not self.over:
            world.judge_by(switched(world.scene))
            self.instruction = world.scene.instruction
        return True

    def step(self) -> bool:
        """Advance the physics by a control step; returns :attr:`over`."""
        while not self.tick():
            pass
        return self.over

    def result(self, otherwise: str = "timeout", commands: Commands | None = None) -> EpisodeResult:
        """Return the result; ``otherwise`` is the reason if the judge has not decided."""
        judge, scene, count = self._world.judge, self._world.scene, len(self._images)
        chosen = np.unique(np.linspace(0, count - 1, min(count, MAX_IMAGES)).round().astype(int))
        return EpisodeResult(
            seed=self._seed,
            instruction=scene.instruction,
            success=judge.success,
            steps=self.steps,
            reason=judge.reason or otherwise,
            images=tuple(self._images[index] for index in chosen),
            actions=np.array(self.actions, dtype=np.float64) if self.actions else np.zeros((0, 0)),
            tips=np.array(self._tips, dtype=np.float64),
            fingers=np.array(self._fingers, dtype=np.float64),
            target=" and ".join(scene.task.targets),
            touched=judge.touched,
            commands=commands or Commands(),
        )


def obey(world: TableTop, command: Command) -> None:
    """Make an arm and its fingers follow a command."""
    velocities = command.velocities or {}
    others = [row for row, name in enumerate(command.names) if name not in velocities]
    try:
        world.command_velocities(tuple(velocities), tuple(velocities.values()))
        world.command_named([command.names[row] for row in others], command.positions[others])
    except ValueError as error:
        raise VlaRosError(f"the simulated arm cannot follow the command: {error}") from None


def commands_of(received: Sequence[tuple[float, Command]], world: TableTop, end: float | None = None) -> Commands:
    """Return the commands to the first arm as joint positions; velocities are integrated.

    ``received`` holds (arrival time in seconds, command). The result has times only if ``end``, the time at which
    the episode ended, is given.
    """
    joints = world.joint_names[: len(arm.JOINT_NAMES)]
    rows = [one.velocities or dict(zip(one.names, one.positions, strict=True)) for _, one in received]
    values = np.array([[row[name] for name in joints] for row in rows]).reshape(-1, len(joints))
    if received and received[0][1].velocities:
        values = np.cumsum(values, axis=0) / world.options.rate_hz
    times = [] if end is None else [when for when, _ in received] + [end]
    return Commands(np.array(times), np.array([one.stamp for _, one in received], np.int64), values)
