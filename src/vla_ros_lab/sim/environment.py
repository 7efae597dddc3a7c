"""What a simulator implements: a robot with cameras, joints and a task, which the policy node drives.

A command goes through the node's receivers, contract, schedule, limits and safety as on a robot
(``vla_ros_lab.eval.runner``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vla_ros.control.command import Command
from vla_ros.types import Float32Array, JointState, UInt8Array


@dataclass(frozen=True)
class Measurements:
    """What the robot's drivers publish at one time."""

    joints: Sequence[JointState]  # one per arm, in the order of ``robot.arms``
    # Topic to the image as its camera sends it (``camera.orientation`` turns it upright), uint8 [H, W, 3] RGB, or
    # to points, float32 [H, W, 3], metres in ``robot.base_frame``.
    images: Mapping[str, UInt8Array | Float32Array] = field(default_factory=lambda: MappingProxyType({}))
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
        """Return what the environment knows of the episode: fields of a ``Score`` or of its ``Trace``."""
        return {}
