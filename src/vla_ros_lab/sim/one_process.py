"""Runs episodes with the node's control loop in this process: in lockstep, or on the wall clock.

The node's receivers, control loop, watchdog and limits are used, without the graph. A third way is a simulated
clock on which an inference takes time (:mod:`vla_ros_lab.sim.simulated_time`).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from vla_ros.config import Config
from vla_ros.config.control import ENVIRONMENT
from vla_ros.control.clock import Clock, SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import State
from vla_ros.errors import ConfigError
from vla_ros.execution.source import ActionSource
from vla_ros.node.pipeline import build_pipeline
from vla_ros.node.simulated import SimulatedNode
from vla_ros.types import UInt8Array
from vla_ros.vision.messages import encode_image
from vla_ros.vision.preprocess import TURNS
from vla_ros_lab.sim.environment import Environment, Episode, EpisodeOptions, Measurements, PolicyFailedError
from vla_ros_lab.sim.results import EpisodeResult

START = 1_000_000_000
"""Nanoseconds at which a simulated clock begins."""
_MOMENT = 1_000_000  # ns; what is due at a stamp may be due this much later, because times are rounded
_PATIENCE = 10  # steps in lockstep after which a node that sent nothing will not
_FAILED = (Reason.INFERENCE_ERROR, Reason.SERVER_LOST, Reason.DEVICE_ERROR)


class OneProcess(ABC):
    """Runs episodes of ``environment``, which the node drives with ``config`` and a loaded ``source``.

    ``run(seed)`` runs an episode. It raises PolicyFailedError if the node stopped or sends no commands.

    Attributes:
        binding: The table of the policy's inputs and outputs, and how its actions are executed.
        failed: Why the policy first failed to infer, or "".
        limited: Number of steps whose action a limit changed.
        refused: Number of steps that were refused.
        held: Number of steps of the environment to which no command belongs: the arm is held.
        film: Upright images of the first camera (``EpisodeOptions.film``).
    """

    def __init__(
        self,
        environment: Environment,
        config: Config,
        source: ActionSource,
        options: EpisodeOptions,
        clock: Clock,
    ) -> None:
        self._environment, self._config, self._options, self._clock = environment, config, options, clock
        pipeline = build_pipeline(config, source.spec)
        self.binding, self._controller = pipeline.describe(), pipeline.controller
        self._node = SimulatedNode(config, source, pipeline, clock, self, self._obey)
        if unknown := set(config.camera.topics) - set(environment.cameras):
            raise ConfigError(
                f"camera.topics: found {min(unknown)}; the simulation has {', '.join(environment.cameras)}"
            )
        self._episode: Episode | None = None
        self._instruction = self.failed = ""
        self.limited = self.refused = self.held = self._changes = self._obeyed = 0
        self._holds = any(arm.output == ENVIRONMENT for arm in config.arms)
        self.film: list[UInt8Array] = []

    @property
    def steps(self) -> int:
        """Control steps of the episode so far."""
        return self._episode.steps if self._episode is not None else 0

    @property
    def stats(self) -> dict[str, object]:
        """The same content as ``vla-ros run --stats``."""
        return self._node.stats.summary()

    @abstractmethod
    def run(self, seed: int) -> EpisodeResult: ...

    def _begin(self, seed: int) -> Episode:
        """Reset the environment, tell the node that an episode begins, and arm."""
        self._episode = episode = Episode(self._environment, seed, self._options)
        self._instruct()
        self._node.states.forget()
        self._controller.reset()
        self._publish(())
        self._node.safety.arm()
        return episode

    def _instruct(self) -> None:
        self._instruction = self._environment.instruction
        self._node.inputs.set_instruction(self._instruction)
        self._node.inputs.new_epoch()

    def _hold_if_silent(self, episode: Episode) -> None:
        """Before a step: if no command came since the last one, hold in an environment that takes actions."""
        silent, self._obeyed = len(episode.received) == self._obeyed, len(episode.received)
        self.held += silent
        if silent and self._holds:
            commands, _ = self._controller.hold({})
            for command in commands:
                self._environment.apply(command)

    def _instruct_anew(self) -> None:
        if self._environment.instruction != self._instruction:
            self._instruct()

    def _publish(self, cameras: Sequence[str]) -> Measurements:
        stamp = self._clock.ros()
        measured = self._environment.observe(cameras, stamp)
        for name, state in zip(self._node.arms, measured.joints, strict=True):
            self._node.states.accept(state, stamp, name)
        for topic_state in self._config.robot.parsed_state_topics:
            self._node.inputs.set_state(topic_state.name, measured.state[topic_state.topic])
        for index, topic in enumerate(cameras):
            self._node.cameras.receive(index, encode_image(measured.images[topic], stamp, topic.split("/")[1]))
        if cameras and self._options.film:
            self.film.append(TURNS[self._config.camera.each[0].orientation](measured.images[cameras[0]]))
        return measured

    def _check(self, *, waited: bool) -> None:
        """Raise PolicyFailedError if the node stopped or, once it was ``waited`` for, sent no command."""
        safety, episode = self._node.safety, self._episode
        silent = waited and episode is not None and not episode.received
        if safety.state is State.STOPPED or (silent and not safety.may_move):
            raise PolicyFailedError(f"the policy node does not move the arm: {safety.explain()}")

    # The node's commands, steps and frames

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._environment.apply(command)
            if command.arm == self._config.arms[0].name and self._episode is not None and not self._episode.over:
                self._episode.received.append((self._clock.steady(), command))

    def on_step(self, step: StepResult) -> None:
        before, self._changes = self._changes, sum(self._controller.counters.values())
        self.limited += self._changes > before
        self.refused += step.refused is not None
        if self._episode is not None and not step.by_person:
            self._episode.actions.append(step.action)

    def on_outcome(self, outcome: FrameOutcome) -> None:
        """Remember why the first inference failed."""
        if outcome.reason in _FAILED and not self.failed:
            self.failed = f"{outcome.reason.value}: {outcome.detail}"


class InLockstep(OneProcess):
    """The environment waits for each command, then advances by a control step: as over the graph (``Lockstep``)."""

    _clock: SimulatedClock

    def __init__(
        self, environment: Environment, config: Config, source: ActionSource, options: EpisodeOptions
    ) -> None:
        super().__init__(environment, config, source, options, SimulatedClock(START))

    def run(self, seed: int) -> EpisodeResult:
        episode, stamp = self._begin(seed), self._clock.ros()
        while not episode.over and not self.failed:
            self._instruct_anew()
            stamp += round(1e9 * self._environment.step_seconds)
            self._clock.jump(stamp)
            self._publish(self._config.camera.topics)
            self._node.gate.supervise()
            self._clock.limit = stamp + _MOMENT
            while self._clock.ros() < self._clock.limit:
                self._node.loop.run_once()
            self._check(waited=episode.steps >= _PATIENCE)
            if not self.failed:
                self._hold_if_silent(episode)
                episode.step()
        return episode.result(self._config.arms[0].robot.joint_names)


class OnTheWallClock(OneProcess):
    """The environment advances at its own rate on the wall clock, and never waits for the policy.

    ``late`` is the number of steps for which the environment itself was too slow; its time then falls behind.
    """

    def __init__(
        self, environment: Environment, config: Config, source: ActionSource, options: EpisodeOptions
    ) -> None:
        super().__init__(environment, config, source, options, Clock())
        self.late, self._lock, self._waiting = 0, threading.Lock(), list[Command]()

    def run(self, seed: int) -> EpisodeResult:
        episode, period = self._begin(seed), self._environment.step_seconds
        self._publish(self._config.camera.topics)
        self._node.loop.start()
        due = self._clock.steady()
        try:
            while not episode.over:
                due += period
                left = due - self._clock.steady()
                self.late += left < -0.5 * period
                due = max(due, self._clock.steady())
                self._clock.sleep(max(0.0, left))
                self._obey_waiting()
                self._hold_if_silent(episode)
                episode.step()
                self._instruct_anew()
                self._publish(self._config.camera.topics)
                self._node.gate.supervise()
                self._check(waited=episode.steps * period > self._options.step_timeout)
        finally:
            self._node.loop.stop()
        return episode.result(self._config.arms[0].robot.joint_names, end=self._clock.steady())

    def _obey(self, commands: Sequence[Command]) -> None:
        """Keep what the control thread sends until the environment's next step: one thread uses it."""
        with self._lock:
            self._waiting.extend(commands)

    def _obey_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        super()._obey(waiting)
