"""Runs episodes of an environment, which the node drives through a port.

As on a robot, a command goes through the node's receivers, contract, schedule, limits and safety, whatever the port
and its clock (:mod:`vla_ros_lab.eval.port`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_ros.control.clock import SimulatedClock
from vla_ros.errors import ConfigError
from vla_ros.types import UInt8Array
from vla_ros_lab.eval.port import LOCKSTEP, SIMULATED, Port
from vla_ros_lab.eval.results import Commands, Score, Trace
from vla_ros_lab.sim.environment import Environment, Measurements

_ROUNDING = 1e-6  # s; sums of a camera's period must not make a frame a tick late
_SCALARS = ("instruction", "reason", "touched", "metrics")  # fields of a score that an environment may state


@dataclass(frozen=True)
class EpisodeOptions:
    """How episodes are run."""

    max_steps: int = 80  # control steps after which an episode fails
    # Seconds to wait for each command (lockstep) or the first one.
    step_timeout: float = 30.0
    camera_hz: float = 10.0  # camera rate; in lockstep a frame is published at each control step
    waits: bool = True  # not in lockstep: the environment waits for the first command of an episode
    film: bool = False  # keep the first camera's image of every frame


class EpisodeRunner:
    """Runs episodes of ``environment`` through ``port``.

    Attributes:
        steps: Control steps of the episode so far.
        over: True once the task is decided or ``max_steps`` steps have run.
        held: Steps without a command.
        late: On the wall clock, how often the environment was too slow.
        film: Images of the first camera, as it sends them (``EpisodeOptions.film``).
    """

    steps, over, _shown = 0, True, False

    def __init__(self, environment: Environment, port: Port, options: EpisodeOptions) -> None:
        if unknown := set(port.cameras) - set(environment.cameras):
            known = ", ".join(environment.cameras)
            raise ConfigError(f"camera.topics: found {min(unknown)}; the simulation has {known}")
        self._environment, self._port, self._options = environment, port, options
        self._count: int | None = None  # of commands that were received before the end
        self._ended = 0.0
        self._next_frame = port.time.steady()  # the camera keeps its rate from one episode to the next
        if port.clock == SIMULATED:
            self._tick_after(0.0)

    def run(self, seed: int) -> Score:
        """Run the episode of ``seed``.

        Raises PolicyFailedError if the node exited, was stopped, or reports why it sends no commands.
        """
        environment, port = self._environment, self._port
        self._seed, self._reason, self._count, self._shown, self.over = seed, "", None, False, False
        self.held = self.late = self._ticks = self._obeyed = self._taken = self.steps = 0
        self.film: list[UInt8Array] = []
        environment.reset(seed)
        self._instruction = environment.instruction
        port.begin(self._instruction, self._measure)
        try:
            if port.clock == LOCKSTEP:
                self._in_lockstep()
            elif port.clock == SIMULATED:
                self._in_simulated_time()
            else:
                self._on_the_wall_clock()
        finally:
            port.end()
        return self.score()

    def _in_lockstep(self) -> None:
        """The environment waits for the commands of each frame, then advances by a control step."""
        port = self._port
        while not (self.over or port.failed or self._reason):
            self._instruct_anew()
            if not port.exchange(self._measure, self._environment.step_seconds):
                self._reason = "no_command"
            elif not port.failed:
                for _ in range(self._environment.ticks):
                    self._advance()

    def _in_simulated_time(self) -> None:
        """The environment advances on the node's clock, which stops while the machine computes."""
        until = self._port.time.steady() + self._options.step_timeout
        while not self.over and (self._has_begun() or self._port.time.steady() < until):
            if not self._port.run_once():
                break
        self._port.check(waited=True)

    def _tick_after(self, seconds: float) -> None:
        assert isinstance(self._port.time, SimulatedClock)
        self._port.time.after(seconds, self._tick)

    def _tick(self) -> None:
        self._tick_after(self._environment.step_seconds / self._environment.ticks)
        if not self.over and self._has_begun():
            self._advance()
            self._instruct_anew()
        self._show(self._port.time.steady())

    def _on_the_wall_clock(self) -> None:
        """The environment advances at its own rate, or slower if the machine is too slow for it."""
        port, step, timeout = self._port, self._environment.step_seconds, self._options.step_timeout
        began = due = port.time.steady()
        self._show(due)
        while not self.over and (self._has_begun() or due < began + timeout):
            due += step / self._environment.ticks
            left = due - port.time.steady()
            if left < -step:
                self.late += 1
                due = port.time.steady()
            port.wait(max(0.0, left))
            if self._has_begun():
                self._advance()
                self._instruct_anew()
            self._show(due)
            port.check(waited=due > began + timeout)

    def _has_begun(self) -> bool:
        """Return True once a command came or, if the environment does not wait for one, once a frame was sent."""
        return bool(self._port.received) or (self._shown and not self._options.waits)

    def _instruct_anew(self) -> None:
        if self._environment.instruction != self._instruction:
            self._instruction = self._environment.instruction
            self._port.instruct(self._instruction)

    def _show(self, now: float) -> None:
        """Publish the measurements, with images if a frame is due ``now``, seconds."""
        port, cameras = self._port, tuple[str, ...]()
        if now > self._next_frame - _ROUNDING:
            self._next_frame = max(self._next_frame + 1 / self._options.camera_hz, now)
            self._shown, cameras = True, port.cameras
        stamp = port.stamp()
        port.publish(self._measure(cameras, stamp), stamp)

    def _measure(self, cameras: Sequence[str], stamp: int) -> Measurements:
        measured = self._environment.observe(cameras, stamp)
        if cameras and self._options.film:
            self.film.append(np.asarray(measured.images[cameras[0]], np.uint8))
        return measured

    def _advance(self) -> None:
        """Obey the commands and advance by a tick; before a step without one, hold the arm where that needs one."""
        environment, port = self._environment, self._port
        commands = port.commands[self._taken :]
        self._taken += len(commands)
        if self._ticks % environment.ticks == 0:
            silent, self._obeyed = len(port.received) == self._obeyed, len(port.received)
            self.held += silent
            commands += port.hold() if silent else ()
        for command in commands:
            environment.apply(command)
        environment.step()
        self._ticks += 1
        self._ended = port.time.steady()
        if self._ticks % environment.ticks == 0:
            self.steps += 1
            self.over = environment.done or self.steps >= self._options.max_steps
            if self.over:
                self._count = len(port.received)

    def score(self) -> Score:
        """Return the result of the episode so far, without a task."""
        environment, port = self._environment, self._port
        stated = dict(environment.summary())
        otherwise = self._reason or ("timeout" if port.received else "no_command")
        spent = port.stats.get("latency_ms", {}).get("inference")
        facts = {
            "instruction": getattr(environment, "instruction", ""),
            "reason": "success" if environment.success else "failure" if environment.done else otherwise,
            **{name: stated.pop(name) for name in _SCALARS if name in stated},
        }
        actions = np.array(port.actions, dtype=np.float64) if port.actions else np.zeros((0, 0))
        facts |= {name: getattr(self, name) for name in ("steps", "held", "late")}
        facts |= {"limited": port.limited, "refused": port.refused}
        facts |= {"inference_ms": (spent["p50"], spent["p99"])} if spent else {}
        trace = Trace(actions=actions, commands=self._commands(), **stated)
        seconds = self.steps * environment.step_seconds
        return Score("", self._seed, environment.success, seconds=seconds, trace=trace, **facts)

    def _commands(self) -> Commands:
        """Return the commands to the joints of the first arm; velocities are integrated."""
        received, joints = self._port.received[: self._count], self._port.joints
        rows = [one.velocities or dict(zip(one.names, one.positions, strict=True)) for _, one in received]
        if not all(set(joints) <= row.keys() for row in rows):  # a twist
            joints = ()
        values = np.array([[row[name] for name in joints] for row in rows]).reshape(len(rows), len(joints))
        if rows and received[0][1].velocities:
            values = np.cumsum(values, axis=0) * self._environment.step_seconds
        times = [] if self._port.clock == LOCKSTEP else [*(when for when, _ in received), self._ended]
        return Commands(np.array(times), np.array([one.stamp for _, one in received], np.int64), values)
