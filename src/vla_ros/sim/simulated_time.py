"""Runs episodes in simulated time: the node's control loop and the table-top share a clock in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_ros.config import Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.safety import State
from vla_ros.errors import ConfigError
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.simulated import SimulatedNode
from vla_ros.node.source import ActionSource
from vla_ros.sim.episode import Episode, EpisodeOptions, commands_of, obey
from vla_ros.sim.node import IMAGE_TOPIC, SECOND, wrist_topic
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.status import PolicyFailedError
from vla_ros.sim.world import TIMESTEP, TableTop
from vla_ros.types import UInt8Array
from vla_ros.vision.messages import encode_image


class SimulatedTime:
    """Runs episodes on a clock that stops while the machine computes, so its speed does not affect results.

    Each inference takes ``control.inject_delay_ms`` on this clock, and nothing else takes time. The node's control
    loop, watchdog and limits are used, without the graph and its threads. As in real time, the physics begins with
    the first command.

    Args:
        source: Moves the arm; loaded already.
    """

    def __init__(self, world: TableTop, config: Config, source: ActionSource, options: EpisodeOptions) -> None:
        self._world, self._config, self._options = world, config, options
        pipeline = build_pipeline(config, source.spec)
        self._controller = pipeline.controller
        self._clock = SimulatedClock(SECOND)
        self._node = SimulatedNode(config, source, pipeline, self._clock, self, self._obey)
        cameras = {IMAGE_TOPIC: "front"} | {wrist_topic(name): name for name in world.wrist_cameras}
        if unknown := set(config.camera.topics) - set(cameras):
            raise ConfigError(f"camera.topics: found {min(unknown)}; the simulation has {', '.join(cameras)}")
        self._cameras = [cameras[topic] for topic in config.camera.topics]
        self._next_frame = self._clock.steady()
        self._episode: Episode | None = None
        self._received: list[tuple[float, Command]] = []
        self._ended = 0.0
        self._clock.after(0.0, self._tick)

    @property
    def stats(self) -> dict[str, object]:
        """The same content as ``vla-ros run --stats``."""
        return self._node.stats.summary()

    def run(self, seed: int) -> EpisodeResult:
        """Run the episode of ``seed``.

        Raises PolicyFailedError if the node stopped, or holds and has sent no command within ``step_timeout``.
        """
        world, node = self._world, self._node
        self._episode = episode = Episode(world, seed, self._options)
        self._received = []
        self._instruct(episode.instruction)
        episode.record(world.render())
        node.states.forget()
        self._controller.reset()
        self._publish_joints()
        node.safety.arm()
        until = self._clock.steady() + self._options.step_timeout
        while not episode.over and (self._received or self._clock.steady() < until):
            node.loop.run_once()
            if node.safety.state is State.STOPPED:
                break
        if node.safety.state is State.STOPPED or not (self._received or node.safety.may_move):
            raise PolicyFailedError(f"the policy node does not move the arm: {node.safety.explain()}")
        episode.record(world.render())
        commands = commands_of(self._received, world, self._ended)
        return episode.result("timeout" if self._received else "no_command", commands)

    @property
    def _running(self) -> Episode | None:
        return None if self._episode is None or self._episode.over else self._episode

    def _instruct(self, instruction: str) -> None:
        self._node.inputs.set_instruction(instruction)
        self._node.inputs.new_epoch()

    # The world, as events of the clock

    def _tick(self) -> None:
        """Advance the physics by one tick, and publish the measurements."""
        world, episode, stepped = self._world, self._running, False
        self._clock.after(world.substeps * TIMESTEP / world.ticks, self._tick)
        if episode is not None and self._received:
            asked = episode.instruction
            stepped = episode.tick()
            self._ended = self._clock.steady()
            if episode.instruction != asked:
                self._instruct(episode.instruction)
        self._publish_joints()
        image = None
        if self._clock.steady() >= self._next_frame:
            self._next_frame += 1 / self._options.camera_hz
            image = self._publish_images()
        if stepped and self._running is not None:
            self._running.record(image)
        self._node.gate.supervise()

    def _publish_joints(self) -> None:
        world, stamp = self._world, self._clock.ros()
        for name, state in zip(self._node.arms, world.joint_states(stamp), strict=True):
            self._node.states.accept(state, stamp, name)
        for topic in self._config.robot.parsed_state_topics:
            self._node.inputs.set_state(topic.key, world.object_state(stamp))

    def _publish_images(self) -> UInt8Array:
        images = {camera: self._world.render(camera) for camera in {"front", *self._cameras}}
        for index, camera in enumerate(self._cameras):
            shown = np.zeros_like(images[camera]) if self._options.blank else images[camera]
            self._node.cameras.receive(index, encode_image(shown[::-1, ::-1], self._clock.ros(), camera))
        return images["front"]

    # The node's commands, steps and frames

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            obey(self._world, command)
            if command.arm == self._config.arms[0].name and self._running is not None:
                self._received.append((self._clock.steady(), command))

    def step(self, step: StepResult) -> None:
        """Record the action of a step."""
        if self._episode is not None:
            self._episode.actions.append(step.action)

    def frame(self, outcome: FrameOutcome) -> None:
        """Ignore the outcome of a frame; the node's statistics already count it."""
