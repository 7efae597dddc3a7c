"""Runs episodes over the ROS graph, in lockstep or in real time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from vla_ros.control.command import Command
from vla_ros.sim.episode import Episode, EpisodeOptions, commands_of, obey
from vla_ros.sim.node import IMAGE_TOPIC, SimNode, wrist_topic
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.status import PolicyFailedError
from vla_ros.sim.world import TIMESTEP, TableTop
from vla_ros.types import FloatArray, UInt8Array

_RESEND = 3.0  # s of wall clock after which a frame that may be lost is sent again
_RESET = 3.0  # s of simulated time between two episodes, so that the arm may be elsewhere
_ACTION_WAIT = 0.2  # s to wait for the action of a command
_TICK = 0.02  # s: joint states at 50 Hz or a little more
_RETURN_SPEED = 1.5  # rad/s, and m/s of the fingers
_MIN_SPIN = 0.002  # s to receive messages even if the simulation is late


class Runner:
    """Runs episodes of ``world`` over ``node``; ``alive()`` is False once the policy node has exited.

    ``run(seed)`` runs an episode. It raises PolicyFailedError if the policy node exited, was stopped, or reports
    why it sends no commands.
    """

    def __init__(self, world: TableTop, node: SimNode, options: EpisodeOptions, alive: Callable[[], bool]) -> None:
        self._world, self._node, self._options, self._alive = world, node, options, alive

    def _publish(self, stamp: int = 0) -> tuple[int, UInt8Array]:
        """Publish the state and then the images, so that receivers of an image already have the state.

        ``stamp`` 0 means the time after rendering. Returns the stamp and the front camera's upright image.
        """
        image = self._world.render()
        wrists = {wrist_topic(camera): self._world.render(camera) for camera in self._options.wrist}
        stamp = stamp or self._node.next_stamp()
        self._node.publish_state(self._world, stamp)
        for topic, shown in {**wrists, IMAGE_TOPIC: image}.items():
            self._node.publish_image(np.zeros_like(shown) if self._options.blank else shown, stamp, topic)
        return stamp, image

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


class Lockstep(Runner):
    """Waits for the commands of each frame, then advances by a control step; ``node.clock`` is ``inputs``.

    Stamps are simulated time, so results do not depend on the machine's speed.
    """

    def run(self, seed: int) -> EpisodeResult:
        """Run the episode of ``seed``."""
        world, node, options = self._world, self._node, self._options
        episode, period = Episode(world, seed, options), world.substeps * TIMESTEP
        stamp = self._first = node.next_stamp(_RESET)
        self._instruct(episode.instruction)
        node.publish_episode(runs=True)
        node.forget_commands()
        reason, asked = "timeout", episode.instruction
        while not episode.over:
            if episode.instruction != asked:
                asked = episode.instruction
                self._instruct(asked)
            node.actions = []
            _, image = self._publish(stamp)
            episode.record(image)
            commands = self._wait_for_commands(stamp, period)
            if not commands:
                reason = "no_command"
                break
            node.spin(lambda: bool(node.actions), _ACTION_WAIT)
            episode.actions.extend(node.actions[-1:])
            for command in commands:
                obey(world, command)
            episode.step()
            stamp = node.next_stamp(period)
        node.publish_episode(runs=False)
        episode.record(world.render())
        return episode.result(reason, commands_of(node.received, world))

    def _instruct(self, instruction: str) -> None:
        """Publish the instruction and wait until the node reports it, because a frame could overtake it."""
        self._node.publish_instruction(instruction)

        def received() -> bool:
            return self._node.policy.instruction == instruction or self._hopeless()

        self._node.spin(received, self._options.step_timeout)

    def _wait_for_commands(self, stamp: int, period: float) -> list[Command]:
        """Wait until every driver has a command for the frame ``stamp``; return [] after ``step_timeout``."""
        deadline = time.monotonic() + self._options.step_timeout
        dropped, found = self._node.policy.dropped, dict[str, Command]()

        def complete() -> bool:
            return len(found) == len(self._node.command_topics)

        def answered() -> bool:
            taken = self._node.take_commands().items()
            found.update({topic: command for topic, command in taken if command.stamp >= self._first})
            return complete() or self._hopeless()

        while not self._node.spin(answered, min(_RESEND, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return []
            # The frame may be lost. If the node has dropped it, it needs another one.
            if self._node.policy.dropped > dropped:
                stamp, dropped = self._node.next_stamp(period), self._node.policy.dropped
            self._publish(stamp)
        if not complete():
            self._check()
        return list(found.values()) if complete() else []


class RealTime(Runner):
    """Advances with the wall clock, or slower if the machine cannot keep up; never waits for the policy."""

    _next_frame = 0.0  # s of the monotonic clock; the camera keeps its rate from one episode to the next

    def run(self, seed: int) -> EpisodeResult:
        """Run the episode of ``seed``."""
        before = self._world.joint_positions()
        episode = Episode(self._world, seed, self._options)
        self._return(before)
        self._node.take_commands()
        self._node.publish_instruction(episode.instruction)
        began = self._node.next_stamp()
        if not self._is_answered(began):
            episode.record(self._world.render())
            return episode.result("no_command")
        return self._drive(episode, began)

    def _return(self, before: FloatArray) -> None:
        """Publish the arm's motion back to the start; the node would mistake a jump for a second driver."""
        after = self._world.joint_positions()
        ticks = int(np.ceil(np.abs(after - before).max() / (_RETURN_SPEED * _TICK)))
        for tick in range(1, ticks):
            self._node.publish_joints(
                self._world, self._node.next_stamp(), before + (after - before) * (tick / ticks)
            )
            self._node.spin(lambda: False, _TICK)

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
            self._publish()
            self._node.spin(check, 1 / self._options.camera_hz)
        return answered

    def _drive(self, episode: Episode, began: int) -> EpisodeResult:
        world, node, camera_period = self._world, self._node, 1 / self._options.camera_hz
        node.actions = []
        node.forget_commands()
        node.publish_episode(runs=True)
        step_seconds = world.substeps * TIMESTEP
        due, stepped, asked = time.monotonic(), True, episode.instruction
        while not episode.over:
            if episode.instruction != asked:
                asked = episode.instruction
                node.publish_instruction(asked)
            image = None
            if time.monotonic() >= self._next_frame:
                _, image = self._publish()
                self._next_frame = max(self._next_frame + camera_period, time.monotonic())
            else:
                node.publish_joints(world, node.next_stamp())
            if stepped:
                episode.record(world.render() if image is None else image)
            due += step_seconds / world.ticks
            left = due - time.monotonic()
            if left < -step_seconds:  # too slow: let simulated time fall behind
                due = time.monotonic()
            self._listen(began, max(0.0, left))
            stepped = episode.tick()
        node.publish_episode(runs=False)
        self._check(waiting=False)
        episode.actions.extend(node.actions)
        commands = commands_of(node.received, world, time.monotonic())
        episode.record(world.render())
        return episode.result(commands=commands)

    def _listen(self, began: int, seconds: float) -> None:
        """Run callbacks for ``seconds`` and make the arms follow each command as it arrives."""

        def obeyed() -> bool:
            for command in self._node.take_commands().values():
                if command.stamp > began:
                    obey(self._world, command)
            return False

        self._node.spin(obeyed, max(_MIN_SPIN, seconds))
        self._check(waiting=False)
