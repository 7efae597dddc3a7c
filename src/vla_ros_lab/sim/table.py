"""The simulated table-top as an environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.control.command import Command
from vla_ros.errors import VlaRosError
from vla_ros.types import Float32Array, FloatArray, UInt8Array
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.environment import Environment, Measurements
from vla_ros_lab.sim.scene import shuffled_instruction, switched
from vla_ros_lab.sim.world import TIMESTEP, TableTop

IMAGE_TOPIC = "/camera/image_raw"
POINTS_TOPIC = "/camera/points"
"""Where the surface in each pixel of the front camera is."""

OBJECT_TOPIC = "/sim/objects"

MAX_IMAGES = 12
"""Maximum number of images kept per episode."""


def wrist_topic(camera: str) -> str:
    """Return the topic of a wrist camera."""
    return f"/{camera}_camera/image_raw"


@dataclass(frozen=True)
class TableOptions:
    """Control experiments, which show what a policy relies on."""

    blank: bool = False  # send black images; a policy that still succeeds ignores the images
    # Name another object in the instruction but judge by the original one; a policy that still succeeds ignores
    # the instruction.
    shuffle: bool = False
    switch_at: int = 0  # step at which a distractor becomes the target; 0: never
    points: bool = False  # whether the front camera measures depth (:data:`POINTS_TOPIC`)


class TableEnvironment(Environment):
    """Picking and pushing on ``world``; the front camera is mounted upside down, as LIBERO renders its images."""

    def __init__(self, world: TableTop, options: TableOptions | None = None) -> None:
        self.world, self._options = world, options or TableOptions()
        self._cameras = {IMAGE_TOPIC: "front"} | {wrist_topic(name): name for name in world.wrist_cameras}
        self.cameras = (*self._cameras, *((POINTS_TOPIC,) if self._options.points else ()))
        self.step_seconds, self.ticks = world.substeps * TIMESTEP, world.ticks

    def reset(self, seed: int) -> None:
        scene = self.world.reset(seed)
        self.instruction = shuffled_instruction(scene) if self._options.shuffle else scene.instruction
        self.done, self.success, self._ticks, self._shown = False, False, 0, -1
        self._images: list[UInt8Array] = []
        self._tips: list[list[FloatArray]] = []
        self._fingers: list[FloatArray] = []
        self._trace()

    def observe(self, cameras: Collection[str], stamp: int) -> Measurements:
        """Return joint states of all arms, the object positions and the images; see :class:`Environment`."""
        images: dict[str, UInt8Array] = {}
        points: dict[str, Float32Array] = {}
        if POINTS_TOPIC in cameras:
            images[IMAGE_TOPIC], points[POINTS_TOPIC] = self.world.render_points()
        for topic in (one for one in cameras if one in self._cameras and one not in images):
            images[topic] = self.world.render(self._cameras[topic])
        if images and self._shown != self._ticks:
            self._shown = self._ticks
            self.keep(images[IMAGE_TOPIC] if IMAGE_TOPIC in images else self.world.render())
        blank = self._options.blank
        sent: dict[str, UInt8Array | Float32Array] = {
            topic: np.zeros_like(one) if blank else one[::-1, ::-1] for topic, one in images.items()
        }
        sent |= {topic: one[::-1, ::-1] for topic, one in points.items()}
        return Measurements(self.world.joint_states(stamp), sent, {OBJECT_TOPIC: self.world.object_state(stamp)})

    def apply(self, command: Command) -> None:
        velocities = command.velocities or {}
        others = [row for row, name in enumerate(command.names) if name not in velocities]
        try:
            self.world.command_velocities(tuple(velocities), tuple(velocities.values()))
            self.world.command_named([command.names[row] for row in others], command.positions[others])
        except ValueError as error:
            raise VlaRosError(f"the simulated arm cannot follow the command: {error}") from None

    def step(self) -> None:
        self.world.advance(self.world.substeps // self.ticks)
        self._ticks += 1
        if self._ticks % self.ticks:
            return
        self.done = self.world.watch()
        self.success = self.world.judge.success
        self._trace()
        if self._ticks == self._options.switch_at * self.ticks and not self.done:
            self.world.judge_by(switched(self.world.scene))
            self.instruction = self.world.scene.instruction

    def keep(self, image: UInt8Array) -> None:
        """Keep an upright image for the report."""
        self._images.append(image)

    def summary(self) -> Mapping[str, Any]:
        """Return the task, images evenly spread over the episode, and the paths of tools and fingers."""
        world, judge = self.world, self.world.judge
        if self._images:
            self.keep(world.render())
        count = len(self._images)
        chosen = np.unique(np.linspace(0, count - 1, min(count, MAX_IMAGES)).round().astype(int))
        decided = {"reason": judge.reason} if judge.reason else {}
        return decided | {
            "instruction": world.scene.instruction,
            "images": tuple(self._images[index] for index in chosen),
            "tips": np.array(self._tips, dtype=np.float64),
            "fingers": np.array(self._fingers, dtype=np.float64),
            "target": " and ".join(world.scene.task.targets),
            "touched": judge.touched,
        }

    def close(self) -> None:
        self.world.close()

    def _trace(self) -> None:
        arms = len(self.world.mounts)
        self._tips.append([self.world.tool_position(index) for index in range(arms)])
        fingers = self.world.joint_positions().reshape(arms, -1)[:, len(arm.JOINT_NAMES) :]
        self._fingers.append(fingers.mean(axis=1))
