"""What a simulator implements: a robot with cameras, joints and a task, which the policy node drives.

A command goes through the node's receivers, contract, schedule, limits and safety as on a robot
(:mod:`vla_ros_lab.sim.simulated_time` in this process, :mod:`vla_ros_lab.sim.episodes` over the ROS graph).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from vla_ros.control.command import Command
from vla_ros.errors import VlaRosError
from vla_ros.types import FloatArray, JointState, UInt8Array
from vla_ros_lab.sim.results import Commands, EpisodeResult


class PolicyFailedError(VlaRosError):
    """The policy node exited, was stopped or does not move the arm."""


@dataclass(frozen=True)
class Measurements:
    """What the robot's drivers publish at one time."""

    joints: Sequence[JointState]  # one per arm, in the order of ``robot.arms``
    # Topic to the image as its camera sends it (``camera.orientation`` turns it upright), uint8 [H, W, 3] RGB.
    images: Mapping[str, UInt8Array] = field(default_factory=lambda: MappingProxyType({}))
    # Topic to its message (``robot.state_topics``).
    state: Mapping[str, JointState] = field(default_factory=lambda: MappingProxyType({}))


class Environment(ABC):
    """A simulated robot with a task. Used from one thread; times are simulated.

    Attributes:
        cameras: Topics of its cameras.
        step_seconds: Duration of a control step.
        ticks: Parts of a control step: :meth:`step` advances by one, and joint states are published after each.
        instruction: The instruction of the episode; it may change during the episode.
        done: True once the task is decided.
        success: True if the task was done as instructed.
    """

    cameras: Sequence[str] = ("/camera/image_raw",)
    step_seconds: float
    ticks: int = 1
    instruction: str
    done: bool = False
    success: bool = False

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Begin an episode; the same seed and commands give the same measurements."""

    @abstractmethod
    def observe(self, cameras: Collection[str], stamp: int) -> Measurements:
        """Measure all joints and state topics, and render the images of ``cameras`` (topics).

        ``stamp``, nanoseconds, is that of the joint states.
        """

    @abstractmethod
    def apply(self, command: Command) -> None:
        """Take a command of the node; it stays in force until the next one. Raises VlaRosError if it cannot be."""

    @abstractmethod
    def step(self) -> None:
        """Advance by a tick; keep the robot where it is if no command is in force."""

    def summary(self) -> Mapping[str, Any]:
        """Return further fields of the episode's result, such as ``images``."""
        return {}


@dataclass(frozen=True)
class EpisodeOptions:
    """How episodes are run."""

    max_steps: int = 80  # control steps after which an episode fails
    # Seconds of wall clock to wait for each command (lockstep) or the first one (real time).
    step_timeout: float = 30.0
    camera_hz: float = 10.0  # camera rate; in lockstep a frame is published at each control step
    waits: bool = True  # without lockstep: the environment waits for the first command of an episode
    film: bool = False  # keep the first camera's image of every frame


class Episode:
    """An episode in an environment, which is reset to ``seed``.

    Attributes:
        steps: Number of control steps so far.
        over: True once the task is decided or ``max_steps`` steps have run.
        actions: The policy's actions so far, each float64 [D].
        received: (Arrival time in seconds, command) of the first arm's commands so far.
    """

    def __init__(self, environment: Environment, seed: int, options: EpisodeOptions) -> None:
        self._environment, self._seed, self._options = environment, seed, options
        environment.reset(seed)
        self.steps, self.over, self._ticks = 0, False, 0
        self.actions: list[FloatArray] = []
        self.received: list[tuple[float, Command]] = []

    def tick(self) -> bool:
        """Advance by a tick; return True at the end of a control step."""
        self._environment.step()
        self._ticks += 1
        if self._ticks % self._environment.ticks:
            return False
        self.steps += 1
        self.over = self._environment.done or self.steps >= self._options.max_steps
        return True

    def step(self) -> bool:
        while not self.tick():
            pass
        return self.over

    def result(
        self, joints: Sequence[str] = (), otherwise: str = "timeout", end: float | None = None
    ) -> EpisodeResult:
        """Return the result with the commands to ``joints``; velocities are integrated.

        ``otherwise`` is the reason if the task is not decided. The commands have times only if ``end``, the time at
        which the episode ended, is given.
        """
        environment = self._environment
        measured = {
            "instruction": environment.instruction,
            "reason": "success" if environment.success else "failure" if environment.done else otherwise,
            "actions": np.array(self.actions, dtype=np.float64) if self.actions else np.zeros((0, 0)),
            "commands": self._commands(joints, end),
        }
        return EpisodeResult(
            seed=self._seed, success=environment.success, steps=self.steps, **{**measured, **environment.summary()}
        )

    def _commands(self, joints: Sequence[str], end: float | None) -> Commands:
        rows = [one.velocities or dict(zip(one.names, one.positions, strict=True)) for _, one in self.received]
        if not all(set(joints) <= row.keys() for row in rows):  # a twist
            joints = ()
        values = np.array([[row[name] for name in joints] for row in rows]).reshape(len(rows), len(joints))
        if rows and self.received[0][1].velocities:
            values = np.cumsum(values, axis=0) * self._environment.step_seconds
        times = [] if end is None else [when for when, _ in self.received] + [end]
        return Commands(np.array(times), np.array([one.stamp for _, one in self.received], np.int64), values)
