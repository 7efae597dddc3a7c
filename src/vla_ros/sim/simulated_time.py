"""Runs episodes in simulated time: the node's control loop and an environment share a clock in this process."""

from __future__ import annotations

from collections.abc import Sequence

from vla_ros.config import Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.safety import State
from vla_ros.errors import ConfigError
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.simulated import SimulatedNode
from vla_ros.node.source import ActionSource
from vla_ros.sim.environment import Environment, Episode, EpisodeOptions, PolicyFailedError
from vla_ros.sim.results import EpisodeResult
from vla_ros.vision.messages import encode_image

_START = 1_000_000_000  # ns


class SimulatedTime:
    """Runs episodes on a clock that stops while the machine computes, so its speed does not affect results.

    The node's receivers, control loop, watchdog and limits are used, without the graph and its threads. As in real
    time, the physics begins with the first command.

    Args:
        environment: What the node drives.
        config: Options of the node.
        source: Moves the arm; loaded already.
        options: How episodes are run.
        speed: Simulated seconds that pass in a second of inference, besides ``control.inject_delay_ms``. 0: results
            do not depend on the machine.
    """

    def __init__(
        self,
        environment: Environment,
        config: Config,
        source: ActionSource,
        options: EpisodeOptions,
        speed: float = 0.0,
    ) -> None:
        self._environment, self._config, self._options = environment, config, options
        pipeline = build_pipeline(config, source.spec)
        self._controller = pipeline.controller
        self._clock = SimulatedClock(_START, speed=speed)
        self._node = SimulatedNode(config, source, pipeline, self._clock, self, self._obey)
        if unknown := set(config.camera.topics) - set(environment.cameras):
            raise ConfigError(
                f"camera.topics: found {min(unknown)}; the simulation has {', '.join(environment.cameras)}"
            )
        self._next_frame = self._clock.steady()
        self._episode: Episode | None = None
        self._instruction = ""
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
        node = self._node
        self._episode = episode = Episode(self._environment, seed, self._options)
        self._instruct()
        node.states.forget()
        self._controller.reset()
        self._publish(())
        node.safety.arm()
        until = self._clock.steady() + self._options.step_timeout
        while not episode.over and (episode.received or self._clock.steady() < until):
            node.loop.run_once()
            if node.safety.state is State.STOPPED:
                break
        if node.safety.state is State.STOPPED or not (episode.received or node.safety.may_move):
            raise PolicyFailedError(f"the policy node does not move the arm: {node.safety.explain()}")
        joints = self._config.arms[0].robot.joint_names
        return episode.result(joints, "timeout" if episode.received else "no_command", self._ended)

    @property
    def _running(self) -> Episode | None:
        return None if self._episode is None or self._episode.over else self._episode

    def _instruct(self) -> None:
        self._instruction = self._environment.instruction
        self._node.inputs.set_instruction(self._instruction)
        self._node.inputs.new_epoch()

    # The environment, as events of the clock

    def _tick(self) -> None:
        """Advance the environment by a tick, and publish the measurements."""
        environment, episode = self._environment, self._running
        self._clock.after(environment.step_seconds / environment.ticks, self._tick)
        if episode is not None and episode.received:
            episode.tick()
            self._ended = self._clock.steady()
            if environment.instruction != self._instruction:
                self._instruct()
        frame = self._clock.steady() >= self._next_frame
        if frame:
            self._next_frame += 1 / self._options.camera_hz
        self._publish(self._config.camera.topics if frame else ())
        self._node.gate.supervise()

    def _publish(self, cameras: Sequence[str]) -> None:
        stamp = self._clock.ros()
        measured = self._environment.observe(cameras, stamp)
        for name, state in zip(self._node.arms, measured.joints, strict=True):
            self._node.states.accept(state, stamp, name)
        for each in self._config.robot.parsed_state_topics:
            self._node.inputs.set_state(each.key, measured.state[each.name])
        for index, topic in enumerate(cameras):
            self._node.cameras.receive(index, encode_image(measured.images[topic], stamp, topic.split("/")[1]))

    # The node's commands, steps and frames

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._environment.apply(command)
            if command.arm == self._config.arms[0].name and self._running is not None:
                self._running.received.append((self._clock.steady(), command))

    def step(self, step: StepResult) -> None:
        if self._episode is not None:
            self._episode.actions.append(step.action)

    def frame(self, outcome: FrameOutcome) -> None:
        """Ignore the outcome of a frame; the node's statistics already count it."""
