"""Episodes over the graph, in lockstep or in real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_ros.errors import VlaRosError
from vla_ros.sim.node import WRIST_TOPIC, ReceivedCommand, SimNode
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.scene import Scene, shuffled_instruction, switched
from vla_ros.sim.status import PolicyFailedError
from vla_ros.sim.trace import Trace
from vla_ros.sim.world import SUBSTEPS, TIMESTEP, TableTop
from vla_ros.types import UInt8Array

_RESEND = 3.0  # s of wall clock after which a frame that was lost on the way is sent again
_SETTLE = 0.3  # s to wait for the answer to the first frame that follows a new instruction; then doubled
_SETTLE_ATTEMPTS = 4
_ACTION_WAIT = 0.2  # s that an action may come after its command
_TICK = 0.02  # s: joint states at 50 Hz
_LEAST_SPIN = 0.002  # s: also a simulation that is late must hear


@dataclass(frozen=True)
class EpisodeOptions:
    """How episodes are run.

    Attributes:
        max_steps: Control steps of 0.1 s simulated time after which an episode has failed.
        step_timeout: Seconds of wall clock to wait for one command (lockstep) or for the first one (real time).
        camera_hz: Rate of the camera in real time; in lockstep it is 10 Hz of simulated time.
        wrist: Publish the wrist camera too.
        blank: Publish black pictures: a policy that still succeeds does not look.
        shuffle: Give the instruction of another object's task, and judge by the original one: a policy that still
            succeeds does not listen.
        switch_at: Step at which the command switches to a distractor, by which the episode is then judged; 0
            never.
    """

    max_steps: int = 80
    step_timeout: float = 30.0
    camera_hz: float = 10.0
    wrist: bool = False
    blank: bool = False
    shuffle: bool = False
    switch_at: int = 0


class Runner(Protocol):
    """Runs one episode."""

    def run(self, seed: int) -> EpisodeResult:
        """The episode of ``seed``.

        Raises:
            PolicyFailedError: The policy node has ended, was stopped, or does not answer and says why.
            VlaRosError: A command that the arm cannot follow.
        """


class _Episodes:
    """What both ways of running have in common."""

    def __init__(self, world: TableTop, node: SimNode, options: EpisodeOptions, alive: Callable[[], bool]) -> None:
        self._world = world
        self._node = node
        self._options = options
        self._alive = alive

    def _begin(self, seed: int) -> tuple[Scene, str]:
        """Reset the world; the scene to be judged and the instruction to be given."""
        scene = self._world.reset(seed)
        return scene, shuffled_instruction(scene) if self._options.shuffle else scene.instruction

    def _switched(self, scene: Scene) -> Scene:
        """The same scene with the first distractor as target; the world is judged by it from now on."""
        scene = switched(scene)
        self._world.judge_by(scene)
        return scene

    def _publish(self, stamp: int = 0) -> tuple[int, UInt8Array]:
        """State first, then the pictures: whoever has the picture has everything.

        Args:
            stamp: Send again with this stamp; 0 takes the present, once the pictures are drawn (drawing takes
                the place of a camera's read-out, which is over when the stamp is given).

        Returns:
            The stamp, nanoseconds, and the upright picture.
        """
        picture = self._world.render()
        wrist = self._world.render("wrist") if self._options.wrist else None
        stamp = stamp or self._node.next_stamp()
        shown = np.zeros_like(picture) if self._options.blank else picture
        self._node.publish_state(self._world, stamp)
        if wrist is not None:
            self._node.publish_picture(np.zeros_like(wrist) if self._options.blank else wrist, stamp, WRIST_TOPIC)
        self._node.publish_picture(shown, stamp)
        return stamp, picture

    def _given_up(self) -> bool:
        """True where no command will come, whatever is waited for."""
        return not self._alive() or bool(self._node.policy.hopeless)

    def _check(self, *, waiting: bool = True) -> None:
        """Give up where the policy node cannot go on.

        Args:
            waiting: A command is waited for: also a hold that lasts is a reason then.

        Raises:
            PolicyFailedError: With the reason that the node gives.
        """
        if not self._alive():
            raise PolicyFailedError("the policy node ended in the middle of an episode; its last lines are above")
        why = self._node.policy.hopeless if waiting else self._node.policy.stopped
        if why:
            raise PolicyFailedError(f"the policy node does not move the arm: {why}; its last lines are above")

    def _obey(self, command: ReceivedCommand) -> None:
        try:
            self._world.command_named(command.names, command.positions)
        except ValueError as error:
            raise VlaRosError(f"a command that the simulated arm cannot follow: {error}") from None


class Lockstep(_Episodes):
    """The simulation waits for the command that answers each frame, then lets 0.1 s pass.

    Results do not depend on how fast the machine is.
    """

    def run(self, seed: int) -> EpisodeResult:
        """See :class:`Runner`."""
        scene, words = self._begin(seed)
        self._instruct(words)
        trace = Trace()
        step, decided, silent = 0, False, False
        while step < self._options.max_steps and not decided:
            if self._options.switch_at and step == self._options.switch_at:
                scene = self._switched(scene)
                self._instruct(scene.instruction)
            self._node.forget_actions()
            stamp, picture = self._publish()
            trace.add(self._world, picture)
            command = self._answer(stamp, self._options.step_timeout)
            if command is None:
                silent = True
                break
            self._node.spin(lambda: bool(self._node.actions), _ACTION_WAIT)
            trace.actions.extend(self._node.actions[-1:])
            self._obey(command)
            decided = self._world.step()
            step += 1
        trace.add(self._world, self._world.render())
        return trace.result(self._world, seed, scene, step, "no_command" if silent else "timeout")

    def _instruct(self, words: str) -> None:
        """Give the instruction, and frames whose answers are thrown away until the first one is answered.

        Topics are not ordered among each other: only once such a frame was answered is it certain that the words
        arrived before the frames that count. A node may drop a frame that it took up when the words changed.
        """
        self._node.publish_instruction(words)
        first = self._node.next_stamp()
        for attempt in range(_SETTLE_ATTEMPTS):
            self._publish()
            if self._answer(first, _SETTLE * 2**attempt, resend=False) is not None:
                return

    def _answer(self, stamp: int, timeout: float, *, resend: bool = True) -> ReceivedCommand | None:
        """The command with this stamp or a later one, or None where it does not come."""
        deadline = time.monotonic() + timeout
        found: ReceivedCommand | None = None

        def answered() -> bool:
            nonlocal found
            command = self._node.take_command()
            if command is not None and command.stamp >= stamp:
                found = command
            return found is not None or self._given_up()

        again = stamp
        while not self._node.spin(answered, min(_RESEND, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return None
            if resend:
                # The frame may be lost, being best effort; the node uses none twice. If that is not it, the node
                # dropped its answer (an arm that held for a moment): then the resting table with a new stamp.
                self._publish(again)
                again = 0
        if found is None:
            self._check()
        return found


class RealTime(_Episodes):
    """Physics at the pace of the wall clock, whatever the policy does; slower where the machine is too slow."""

    _next_frame = 0.0  # of the steady clock: a camera keeps its pace from one scene to the next

    def run(self, seed: int) -> EpisodeResult:
        """See :class:`Runner`."""
        scene, words = self._begin(seed)
        self._node.take_command()
        self._node.publish_instruction(words)
        began = self._node.next_stamp()
        if self._first_command(began) is None:
            trace = Trace()
            trace.add(self._world, self._world.render())
            return trace.result(self._world, seed, scene, 0, "no_command")
        return self._drive(seed, scene, began)

    def _first_command(self, began: int) -> ReceivedCommand | None:
        """Show frames of the resting world until the policy answers one of them."""
        deadline = time.monotonic() + self._options.step_timeout
        while time.monotonic() < deadline:
            self._check()
            self._next_frame = time.monotonic() + 1 / self._options.camera_hz
            self._publish()
            command: list[ReceivedCommand] = []

            def heard(command: list[ReceivedCommand] = command) -> bool:
                found = self._node.take_command()
                if found is not None and found.stamp > began:
                    command.append(found)
                return bool(command)

            if self._node.spin(heard, 1 / self._options.camera_hz):
                return command[0]
        return None

    def _drive(self, seed: int, scene: Scene, began: int) -> EpisodeResult:
        options, world, node = self._options, self._world, self._node
        trace = Trace()
        node.forget_actions()
        ticks_per_step = round(SUBSTEPS * TIMESTEP / _TICK)
        tick, decided, due = 0, False, time.monotonic()
        while tick < options.max_steps * ticks_per_step and not decided:
            if options.switch_at and tick == options.switch_at * ticks_per_step:
                scene = self._switched(scene)
                node.publish_instruction(scene.instruction)
            if time.monotonic() >= self._next_frame:
                _, picture = self._publish()
                self._next_frame = max(self._next_frame + 1 / options.camera_hz, time.monotonic())
            else:
                picture = None
                node.publish_joints(world, node.next_stamp())
            if tick % ticks_per_step == 0:
                trace.add(world, picture if picture is not None else world.render())
            due += _TICK
            left = due - time.monotonic()
            if left < -SUBSTEPS * TIMESTEP:  # too slow for real time: let simulated time fall behind
                due = time.monotonic()
            self._listen(began, max(0.0, left))
            world.advance(round(_TICK / TIMESTEP))
            tick += 1
            if tick % ticks_per_step == 0:
                decided = world.watch()
        self._check(waiting=False)
        trace.actions.extend(node.actions)
        trace.add(world, world.render())
        return trace.result(world, seed, scene, -(-tick // ticks_per_step), "timeout")

    def _listen(self, began: int, seconds: float) -> None:
        """Run callbacks for so long, and let the arm follow each command as it comes."""

        def obeyed() -> bool:
            command = self._node.take_command()
            if command is not None and command.stamp > began:
                self._obey(command)
            return False

        self._node.spin(obeyed, max(_LEAST_SPIN, seconds))
        self._check(waiting=False)
