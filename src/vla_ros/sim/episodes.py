"""Runs episodes over the ROS graph, in lockstep or in real time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vla_ros.errors import VlaRosError
from vla_ros.sim.node import IMAGE_TOPIC, ReceivedCommand, SimNode, wrist_topic
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.scene import Scene, shuffled_instruction, switched
from vla_ros.sim.status import PolicyFailedError
from vla_ros.sim.trace import Trace
from vla_ros.sim.world import TIMESTEP, TableTop
from vla_ros.types import FloatArray, UInt8Array

_RESEND = 3.0  # s of wall clock after which a frame that may be lost is sent again
_SETTLE = 0.3  # s to wait for the command of the first frame after a new instruction; doubled at each attempt
_SETTLE_ATTEMPTS = 4
_ACTION_WAIT = 0.2  # s that an action may arrive after its command
_TICK = 0.02  # s: joint states at 50 Hz or a little more
_RETURN_SPEED = 1.5  # rad/s, and m/s of the fingers
_MIN_SPIN = 0.002  # s: receive messages even when the simulation is late


@dataclass(frozen=True)
class EpisodeOptions:
    """How episodes are run."""

    max_steps: int = 80  # control steps after which an episode fails
    # Seconds of wall clock to wait for each command (lockstep) or the first one (real time).
    step_timeout: float = 30.0
    camera_hz: float = 10.0  # camera rate in real time; in lockstep it is that of control steps
    wrist: tuple[str, ...] = ()  # wrist cameras whose images are published too
    blank: bool = False  # publish black images; a policy that still succeeds ignores them
    # Ask for another object and judge by the original one; a policy that still succeeds ignores the instruction.
    shuffle: bool = False
    switch_at: int = 0  # step from which a distractor becomes the target; 0 for never


class Runner(ABC):
    """Runs episodes of ``world`` through ``node``; ``alive`` is false once the policy node has ended."""

    def __init__(self, world: TableTop, node: SimNode, options: EpisodeOptions, alive: Callable[[], bool]) -> None:
        self._world = world
        self._node = node
        self._options = options
        self._alive = alive

    @abstractmethod
    def run(self, seed: int) -> EpisodeResult:
        """Run the episode of ``seed``.

        Raises PolicyFailedError if the policy node ended, was stopped, or reports why it sends no commands.
        """

    def _begin(self, seed: int) -> tuple[Scene, str]:
        """Reset the world; returns the scene that counts and its instruction."""
        scene = self._world.reset(seed)
        return scene, shuffled_instruction(scene) if self._options.shuffle else scene.instruction

    def _switched(self, scene: Scene) -> Scene:
        """Make the first distractor the target; returns the new scene."""
        scene = switched(scene)
        self._world.judge_by(scene)
        return scene

    def _publish(self, stamp: int = 0) -> tuple[int, UInt8Array]:
        """Publish the state and then the images, so that a receiver of the image has everything.

        ``stamp`` 0 takes the time after rendering, as a camera stamps an image after read-out. Returns the stamp
        and the upright image.
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
        """Raise PolicyFailedError if the policy node ended or was stopped or, while ``waiting``, keeps holding."""
        if not self._alive():
            raise PolicyFailedError("the policy node ended during an episode; its last lines are above")
        why = self._node.policy.hopeless if waiting else self._node.policy.stopped
        if why:
            raise PolicyFailedError(f"the policy node does not move the arm: {why}; its last lines are above")


def obey(world: TableTop, command: ReceivedCommand) -> None:
    """Make the arm follow a command."""
    try:
        if command.is_velocity:
            world.command_velocities(command.names, command.values)
        else:
            world.command_named(command.names, command.values)
    except ValueError as error:
        raise VlaRosError(f"the simulated arm cannot follow the command: {error}") from None


def ticks_per_step(world: TableTop) -> int:
    """Joint states in a control step: 50 a second or a little more, each after a whole number of physics steps."""
    steps, longest = world.substeps, _TICK * 1.001 / TIMESTEP
    return next(count for count in range(1, steps + 1) if steps % count == 0 and steps / count <= longest)


class Lockstep(Runner):
    """Waits for the commands of each frame, then advances by a control step, whatever the machine's speed."""

    def run(self, seed: int) -> EpisodeResult:
        """See :class:`Runner`."""
        scene, instruction = self._begin(seed)
        self._chunks: dict[str, int] = {}  # by driver, the stamp of the command that was obeyed last
        self._instruct(instruction)
        self._node.publish_episode(runs=True)
        trace = Trace()
        step, decided, silent = 0, False, False
        self._node.forget_commands()
        while step < self._options.max_steps and not decided:
            if self._options.switch_at and step == self._options.switch_at:
                scene = self._switched(scene)
                self._instruct(scene.instruction)
            self._node.forget_actions()
            stamp, image = self._publish()
            trace.add(self._world, image)
            commands = self._wait_for_commands(stamp, self._options.step_timeout)
            if not commands:
                silent = True
                break
            self._node.spin(lambda: bool(self._node.actions), _ACTION_WAIT)
            trace.actions.extend(self._node.actions[-1:])
            for command in commands:
                obey(self._world, command)
            decided = self._world.step()
            step += 1
        self._node.publish_episode(runs=False)
        trace.add(self._world, self._world.render())
        trace.commands = self._node.commands(self._world)
        return trace.result(self._world, seed, scene, step, "no_command" if silent else "timeout")

    def _instruct(self, instruction: str) -> None:
        """Publish the instruction, then frames until one is answered; their commands are discarded.

        Messages on different topics may overtake each other, so only a command proves that the instruction has
        arrived. The node may drop the frame it was processing when the instruction changed.
        """
        self._node.publish_instruction(instruction)
        first = self._instructed = self._node.next_stamp()
        for attempt in range(_SETTLE_ATTEMPTS):
            self._publish()
            if self._wait_for_commands(first, _SETTLE * 2**attempt, resend=False):
                return

    def _wait_for_commands(self, stamp: int, timeout: float, *, resend: bool = True) -> list[ReceivedCommand]:
        """Wait until every driver has a command for the frame ``stamp``; return none if they do not come in time.

        The command has this stamp or a later one, or is the next step of the chunk executed last. After a frame had
        to be sent again, a chunk for an earlier frame of this instruction is accepted.
        """
        deadline = time.monotonic() + timeout
        found: dict[str, ReceivedCommand] = {}

        def complete() -> bool:
            return len(found) == len(self._node.command_topics)

        def answered() -> bool:
            taken = self._node.take_commands()
            found.update(
                {
                    topic: command
                    for topic, command in taken.items()
                    if command.stamp >= oldest or command.stamp == self._chunks.get(topic)
                }
            )
            return complete() or self._hopeless()

        again = oldest = stamp
        while not self._node.spin(answered, min(_RESEND, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return []
            if resend:
                # The frame may be lost, and the node uses no frame twice. If it was not lost, the node dropped its
                # result, for example in a short hold; then a frame with a new stamp helps.
                self._publish(again)
                again, oldest = 0, self._instructed
        if not complete():
            self._check()
        self._chunks.update({topic: command.stamp for topic, command in found.items()})
        return list(found.values()) if complete() else []


class RealTime(Runner):
    """Advances with the wall clock, regardless of the policy; slower if the machine cannot keep up."""

    _next_frame = 0.0  # s of the monotonic clock; the camera keeps its rate from one episode to the next

    def run(self, seed: int) -> EpisodeResult:
        """See :class:`Runner`."""
        before = self._world.joint_positions()
        scene, instruction = self._begin(seed)
        self._return(before)
        self._node.take_commands()
        self._node.publish_instruction(instruction)
        began = self._node.next_stamp()
        if not self._is_answered(began):
            trace = Trace()
            trace.add(self._world, self._world.render())
            return trace.result(self._world, seed, scene, 0, "no_command")
        return self._drive(seed, scene, began)

    def _return(self, before: FloatArray) -> None:
        """Publish the arm's motion back to the start, because the node would take a jump for a second driver."""
        after = self._world.joint_positions()
        ticks = int(np.ceil(np.abs(after - before).max() / (_RETURN_SPEED * _TICK)))
        for tick in range(1, ticks):
            self._node.publish_joints(
                self._world, self._node.next_stamp(), before + (after - before) * (tick / ticks)
            )
            self._node.spin(lambda: False, _TICK)

    def _is_answered(self, began: int) -> bool:
        """Publish frames of the world at rest until the policy reacts to one; False if it does not in time."""
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

    def _drive(self, seed: int, scene: Scene, began: int) -> EpisodeResult:
        options, world, node = self._options, self._world, self._node
        trace = Trace()
        node.forget_actions()
        node.forget_commands()
        node.publish_episode(runs=True)
        step_seconds, ticks = world.substeps * TIMESTEP, ticks_per_step(world)
        tick_seconds = step_seconds / ticks
        tick, decided, due = 0, False, time.monotonic()
        while tick < options.max_steps * ticks and not decided:
            if options.switch_at and tick == options.switch_at * ticks:
                scene = self._switched(scene)
                node.publish_instruction(scene.instruction)
            if time.monotonic() >= self._next_frame:
                _, image = self._publish()
                self._next_frame = max(self._next_frame + 1 / options.camera_hz, time.monotonic())
            else:
                image = None
                node.publish_joints(world, node.next_stamp())
            if tick % ticks == 0:
                trace.add(world, world.render() if image is None else image)
            due += tick_seconds
            left = due - time.monotonic()
            if left < -step_seconds:  # too slow: let simulated time fall behind
                due = time.monotonic()
            self._listen(began, max(0.0, left))
            world.advance(world.substeps // ticks)
            tick += 1
            if tick % ticks == 0:
                decided = world.watch()
        node.publish_episode(runs=False)
        self._check(waiting=False)
        trace.actions.extend(node.actions)
        trace.commands = node.commands(world, time.monotonic())
        trace.add(world, world.render())
        return trace.result(world, seed, scene, -(-tick // ticks), "timeout")

    def _listen(self, began: int, seconds: float) -> None:
        """Run callbacks for ``seconds``; the arms follow each command as it arrives."""

        def obeyed() -> bool:
            for command in self._node.take_commands().values():
                if command.stamp > began:
                    obey(self._world, command)
            return False

        self._node.spin(obeyed, max(_MIN_SPIN, seconds))
        self._check(waiting=False)
