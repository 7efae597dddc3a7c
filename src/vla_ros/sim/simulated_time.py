"""Runs episodes in simulated time: the node's control loop and the table-top share a clock in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vla_ros.config import Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command, split
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.safety import State
from vla_ros.errors import ConfigError
from vla_ros.node.simulated import SimulatedNode
from vla_ros.node.stepper import Stepper
from vla_ros.sim.arm import JOINT_NAMES
from vla_ros.sim.episodes import EpisodeOptions, obey, ticks_per_step
from vla_ros.sim.node import IMAGE_TOPIC, SECOND, ReceivedCommand, commands_of, wrist_topic
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.scene import shuffled_instruction, switched
from vla_ros.sim.status import PolicyFailedError
from vla_ros.sim.trace import Trace
from vla_ros.sim.world import TIMESTEP, TableTop
from vla_ros.types import JointState, UInt8Array
from vla_ros.vision.messages import encode_image


class SimulatedTime:
    """A clock that stands still while the policy infers: results depend on no machine's speed and load.

    Each answer comes ``control.inject_delay_ms`` after its question, and nothing else takes time. The control loop,
    the watchdog and all limits are those of the node; the graph and its threads are left out. As in real time, an
    episode begins with the first command.

    Args:
        stepper: With a loaded policy.
    """

    def __init__(self, world: TableTop, config: Config, stepper: Stepper, options: EpisodeOptions) -> None:
        self._world, self._config, self._stepper, self._options = world, config, stepper, options
        self._ticks = ticks_per_step(world)
        self._clock = SimulatedClock(SECOND)
        self._node = SimulatedNode(config, stepper, self._clock, self, self._prepare)
        self._arms = {arm.name: arm for arm in config.arms}
        cameras = {IMAGE_TOPIC: "front"} | {wrist_topic(name): name for name in world.wrist_cameras}
        if unknown := set(config.camera.topics) - set(cameras):
            raise ConfigError(f"camera.topics: found {min(unknown)}, the simulation has {', '.join(cameras)}")
        self._cameras = [cameras[topic] for topic in config.camera.topics]
        self._next_frame = self._clock.steady()
        self._trace, self._received, self._tick_count = Trace(), list[tuple[float, ReceivedCommand]](), 0
        self._runs, self._ended = False, 0.0
        self._clock.after(0.0, self._tick)

    @property
    def stats(self) -> dict[str, object]:
        """The same content as ``vla-ros run --stats``."""
        return self._node.stats.summary()

    def run(self, seed: int) -> EpisodeResult:
        """Run the episode of ``seed``.

        Raises PolicyFailedError if the node stopped, or holds and has sent no command within ``step_timeout``.
        """
        world, node, options = self._world, self._node, self._options
        self._scene = world.reset(seed)
        self._instruct(shuffled_instruction(self._scene) if options.shuffle else self._scene.instruction)
        self._trace, self._received, self._tick_count, self._runs = Trace(), [], 0, True
        self._trace.add(world, world.render())
        node.states.forget()
        self._stepper.forget_commands()
        self._publish_joints()
        node.safety.arm()
        until = self._clock.steady() + options.step_timeout
        while self._runs and (self._received or self._clock.steady() < until):
            node.loop.run_once()
            self._runs = self._runs and node.safety.state is not State.STOPPED
        if node.safety.state is State.STOPPED or not (self._received or node.safety.may_move):
            raise PolicyFailedError(f"the policy node does not move the arm: {node.safety.explain()}")
        self._runs = False
        trace = self._trace
        joints = world.joint_names[: len(JOINT_NAMES)]
        trace.commands = commands_of(self._received, joints, world.options.rate_hz, self._ended)
        trace.add(world, world.render())
        steps = -(-self._tick_count // self._ticks)
        return trace.result(world, seed, self._scene, steps, "timeout" if self._received else "no_command")

    def _instruct(self, instruction: str) -> None:
        self._node.inputs.set_instruction(instruction)
        self._node.inputs.new_epoch()

    # The world, as events of the clock

    def _tick(self) -> None:
        """Advance the physics by the tick that has passed, and publish what is measured now."""
        world, options = self._world, self._options
        self._clock.after(world.substeps * TIMESTEP / self._ticks, self._tick)
        if self._runs and self._received:
            world.advance(world.substeps // self._ticks)
            self._tick_count += 1
            if self._tick_count % self._ticks == 0:
                step = self._tick_count // self._ticks
                self._runs = not world.watch() and step < options.max_steps
                self._ended = self._clock.steady()
                if step == options.switch_at and self._runs:
                    self._scene = switched(self._scene)
                    world.judge_by(self._scene)
                    self._instruct(self._scene.instruction)
        self._publish()

    def _publish(self) -> None:
        self._publish_joints()
        image = None
        if self._clock.steady() >= self._next_frame:
            self._next_frame += 1 / self._options.camera_hz
            image = self._publish_images()
        if self._runs and self._tick_count and self._tick_count % self._ticks == 0:
            self._trace.add(self._world, image)
        self._node.supervise()

    def _publish_joints(self) -> None:
        world, stamp = self._world, self._clock.ros()
        names, positions, speeds = world.joint_names, world.joint_positions(), world.joint_velocities()
        for name, rows in zip(self._node.arms, np.split(np.arange(len(names)), len(world.mounts)), strict=True):
            joints = tuple(names[row] for row in rows)
            self._node.states.accept(JointState(joints, positions[rows], stamp, speeds[rows]), stamp, name)
        for feed in self._config.robot.feeds:
            self._node.inputs.set_state(feed.key, world.object_state(stamp))

    def _publish_images(self) -> UInt8Array:
        images = {camera: self._world.render(camera) for camera in {"front", *self._cameras}}
        for index, camera in enumerate(self._cameras):
            shown = np.zeros_like(images[camera]) if self._options.blank else images[camera]
            self._node.cameras.receive(index, encode_image(shown[::-1, ::-1], self._clock.ros(), camera))
        return images["front"]

    # What the node sends and shows

    def _prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        def send() -> None:
            for command in commands:
                arm = self._arms[command.arm]
                body, fingers = split(command, arm.robot.gripper_joint_names if arm.gripper_topic else ())
                for part in filter(None, (body, fingers)):
                    received = _received(part)
                    obey(self._world, received)
                    if part is body and command.arm == self._config.arms[0].name and self._runs:
                        self._received.append((self._clock.steady(), received))

        return send

    def step(self, step: StepResult) -> None:
        """The control loop made a step."""
        self._trace.actions.append(step.action)

    def frame(self, outcome: FrameOutcome) -> None:
        """The control loop has finished with a frame."""


def _received(command: Command) -> ReceivedCommand:
    if command.velocities is not None:
        return ReceivedCommand(tuple(command.velocities), tuple(command.velocities.values()), True, command.stamp)
    return ReceivedCommand(command.names, tuple(map(float, command.positions)), False, command.stamp)
