"""Runs episodes in simulated time: the node's control loop and an environment share a clock in this process."""

from vla_ros.config import Config
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.safety import State
from vla_ros.execution.source import ActionSource
from vla_ros_lab.sim.environment import Environment, Episode, EpisodeOptions
from vla_ros_lab.sim.one_process import START, OneProcess
from vla_ros_lab.sim.results import EpisodeResult


class SimulatedTime(OneProcess):
    """Runs episodes on a clock that stops while the machine computes, so its speed does not affect results.

    As in real time, the physics begins with the first command, unless ``options.waits`` is False.

    Args:
        environment: What the node drives.
        config: Options of the node.
        source: Moves the arm; loaded already.
        options: How episodes are run.
        speed: Simulated seconds that pass in a second of inference, besides ``control.inject_delay_ms``. 0: results
            do not depend on the machine.
    """

    _clock: SimulatedClock

    def __init__(
        self,
        environment: Environment,
        config: Config,
        source: ActionSource,
        options: EpisodeOptions,
        speed: float = 0.0,
    ) -> None:
        super().__init__(environment, config, source, options, SimulatedClock(START, speed=speed))
        self._next_frame = self._clock.steady()
        self._ended, self._ticks, self._shown = 0.0, 0, False
        self._clock.after(0.0, self._tick)

    def run(self, seed: int) -> EpisodeResult:
        """Run the episode of ``seed``.

        Raises PolicyFailedError if the node stopped, or holds and has sent no command within ``step_timeout``.
        """
        episode, self._shown = self._begin(seed), False
        until = self._clock.steady() + self._options.step_timeout
        while not episode.over and (self._has_begun(episode) or self._clock.steady() < until):
            self._node.loop.run_once()
            if self._node.safety.state is State.STOPPED:
                break
        self._check(waited=True)
        joints = self._config.arms[0].robot.joint_names
        return episode.result(joints, "timeout" if episode.received else "no_command", self._ended)

    def _has_begun(self, episode: Episode) -> bool:
        """Return True once a command came or, if the environment does not wait for one, once a frame was sent."""
        return bool(episode.received) or (self._shown and not self._options.waits)

    def _tick(self) -> None:
        """Advance the environment by a tick, and publish the measurements."""
        environment, episode = self._environment, self._episode
        self._clock.after(environment.step_seconds / environment.ticks, self._tick)
        if episode is not None and not episode.over and self._has_begun(episode):
            if not self._ticks % environment.ticks:
                self._hold_if_silent(episode)
            self._ticks += 1
            episode.tick()
            self._ended = self._clock.steady()
            self._instruct_anew()
        frame = self._clock.steady() >= self._next_frame
        if frame:
            self._next_frame += 1 / self._options.camera_hz
            self._shown = True
        self._publish(self._config.camera.topics if frame else ())
        self._node.gate.supervise()
