"""Runs episodes over the ROS graph, in lockstep or in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vla_ros.control.command import Command
from vla_ros.types import JointState
from vla_ros_lab.sim.environment import Environment, Episode, EpisodeOptions, PolicyFailedError
from vla_ros_lab.sim.node import SimNode
from vla_ros_lab.sim.results import EpisodeResult

_RESEND = 3.0  # s of wall clock after which a frame that may be lost is sent again
_RESET = 3.0  # s of simulated time between two episodes, so that the arm may be elsewhere
_ACTION_WAIT = 0.2  # s to wait for the action of a command
_TICK = 0.02  # s: joint states at 50 Hz or a little more
_RETURN_SPEED = 1.5  # rad/s, and m/s of the fingers
_MIN_SPIN = 0.002  # s to receive messages even if the simulation is late


class EpisodeRunner:
    """Runs episodes of an environment over ``node``; ``alive()`` is False once the policy node has exited.

    ``run(seed)`` runs an episode. It raises PolicyFailedError if the policy node exited, was stopped, or reports
    why it sends no commands.
    """

    def __init__(
        self, environment: Environment, node: SimNode, options: EpisodeOptions, alive: Callable[[], bool]
    ) -> None:
        self._environment, self._node, self._options, self._alive = environment, node, options, alive

    def _publish(self, stamp: int) -> None:
        """Publish all measurements and images with this stamp, nanoseconds."""
        self._node.publish(self._environment.observe(self._node.cameras, stamp), stamp)

    def _hopeless(self) -> bool:
        """Return True if waiting for a command is pointless."""
        return not self._alive() or bool(self._node.policy.hopeless)

    def _check(self, *, waiting: bool = True) -> None:
        """Raise PolicyFailedError if the policy node exited or was stopped or, while ``waiting``, keeps holding."""
        if not self._alive():
            raise PolicyFailedError("the policy node exited during an episode")
        why = self._node.policy.hopeless if waiting else self._node.policy.stopped
        if why:
            raise PolicyFailedError(f"the policy node does not move the arm: {why}")


class Lockstep(EpisodeRunner):
    """Waits for the commands of each frame, then advances by a control step; ``node.clock`` is ``inputs``.

    Stamps are simulated time, so results do not depend on the machine's speed.
    """

    def run(self, seed: int) -> EpisodeResult:
        environment, node, instruction, reason = self._environment, self._node, "", "timeout"
        episode = Episode(environment, seed, self._options)
        stamp = self._first = node.next_stamp(_RESET)
        while not episode.over:
            if environment.instruction != instruction:
                instruction = environment.instruction
                self._instruct(instruction)
            if not episode.steps:
                node.publish_episode(runs=True)
                node.forget_commands()
            node.actions = []
            self._publish(stamp)
            commands = self._wait_for_commands(stamp)
            if not commands:
                reason = "no_command"
                break
            node.spin(lambda: bool(node.actions), _ACTION_WAIT)
            episode.actions.extend(node.actions[-1:])
            for command in commands:
                environment.apply(command)
            episode.step()
            stamp = node.next_stamp(environment.step_seconds)
        node.publish_episode(runs=False)
        episode.received = node.received
        return episode.result(node.joints, reason)

    def _instruct(self, instruction: str) -> None:
        """Publish the instruction and wait until the node reports it, because a frame could overtake it."""
        self._node.publish_instruction(instruction)

        def received() -> bool:
            return self._node.policy.instruction == instruction or self._hopeless()

        self._node.spin(received, self._options.step_timeout)

    def _wait_for_commands(self, stamp: int) -> list[Command]:
        """Wait until every driver has a command for the frame ``stamp``; return [] after ``step_timeout``."""
        deadline = time.monotonic() + self._options.step_timeout
        dropped, commands = self._node.policy.dropped, dict[str, Command]()

        def complete() -> bool:
            return len(commands) == len(self._node.command_topics)

        def answered() -> bool:
            taken = self._node.take_commands().items()
            commands.update({topic: command for topic, command in taken if command.stamp >= self._first})
            return complete() or self._hopeless()

        while not self._node.spin(answered, min(_RESEND, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return []
            # The frame may be lost. If the node has dropped it, it needs another one.
            if self._node.policy.dropped > dropped:
                dropped = self._node.policy.dropped
                stamp = self._node.next_stamp(self._environment.step_seconds)
            self._publish(stamp)
        if not complete():
            self._check()
        return list(commands.values()) if complete() else []


class RealTime(EpisodeRunner):
    """Advances with the wall clock, or slower if the machine cannot keep up; never waits for the policy."""

    _next_frame = 0.0  # s of the monotonic clock; the camera keeps its rate from one episode to the next
    _joints: Sequence[JointState] = ()  # at the end of the last episode

    def run(self, seed: int) -> EpisodeResult:
        node = self._node
        episode = Episode(self._environment, seed, self._options)
        self._return(self._joints)
        node.take_commands()
        node.publish_instruction(self._environment.instruction)
        began = node.next_stamp()
        if not self._is_answered(began):
            return episode.result(otherwise="no_command")
        self._drive(episode, began)
        self._joints = self._environment.observe((), 0).joints
        episode.actions.extend(node.actions)
        episode.received = node.received
        return episode.result(node.joints, end=time.monotonic())

    def _return(self, before: Sequence[JointState]) -> None:
        """Publish the arm's motion back to the start; the node would mistake a jump for a second driver."""
        node, after = self._node, self._environment.observe((), 0).joints
        ways = [end.positions - start.positions for start, end in zip(before, after, strict=False)]
        ticks = int(np.ceil(max((np.abs(way).max() for way in ways), default=0.0) / (_RETURN_SPEED * _TICK)))
        for tick in range(1, ticks):
            stamp, left = node.next_stamp(), 1 - tick / ticks
            moving = zip(after, ways, strict=True)
            node.publish_joints(
                [replace(end, positions=end.positions - left * way, stamp=stamp) for end, way in moving]
            )
            node.spin(lambda: False, _TICK)
        self._joints = after

    def _is_answered(self, began: int) -> bool:
        """Publish frames of the world at rest until a command arrives; return False if none arrives in time."""
        deadline = time.monotonic() + self._options.step_timeout
        answered = False

        def check() -> bool:
            nonlocal answered
            answered = answered or any(command.stamp > began for command in self._node.take_commands().values())
            return answered

        while time.monotonic() < deadline and not answered:
            self._check()
            self._next_frame = time.monotonic() + 1 / self._options.camera_hz
            self._publish(self._node.next_stamp())
            self._node.spin(check, 1 / self._options.camera_hz)
        return answered

    def _drive(self, episode: Episode, began: int) -> None:
        environment, node, camera_period = self._environment, self._node, 1 / self._options.camera_hz
        node.actions = []
        node.forget_commands()
        node.publish_episode(runs=True)
        due, instruction = time.monotonic(), environment.instruction
        while not episode.over:
            if environment.instruction != instruction:
                instruction = environment.instruction
                node.publish_instruction(instruction)
            if time.monotonic() >= self._next_frame:
                self._publish(node.next_stamp())
                self._next_frame = max(self._next_frame + camera_period, time.monotonic())
            else:
                node.publish_joints(environment.observe((), node.next_stamp()).joints)
            due += environment.step_seconds / environment.ticks
            left = due - time.monotonic()
            if left < -environment.step_seconds:  # too slow: let simulated time fall behind
                due = time.monotonic()
            self._listen(began, max(0.0, left))
            episode.tick()
        node.publish_episode(runs=False)
        self._check(waiting=False)

    def _listen(self, began: int, seconds: float) -> None:
        """Run callbacks for ``seconds`` and make the arms follow each command as it arrives."""

        def obeyed() -> bool:
            for command in self._node.take_commands().values():
                if command.stamp > began:
                    self._environment.apply(command)
            return False

        self._node.spin(obeyed, max(_MIN_SPIN, seconds))
        self._check(waiting=False)
