"""The node as an environment meets it: measurements go in, commands come out.

A port is in this process (:class:`NodePort`) or on the graph (:class:`~vla_ros_lab.eval.graph.GraphPort`), on one
of three clocks: in lockstep, the environment waits for the node's commands; on a simulated clock, which stops while
the machine computes, and on the wall clock it does not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_ros.config import ArmConfig, Config
from vla_ros.config.control import ENVIRONMENT
from vla_ros.control.clock import Clock, SimulatedClock
from vla_ros.control.command import Command
from vla_ros.control.outcome import FrameOutcome, StepResult
from vla_ros.control.reasons import Reason
from vla_ros.control.safety import State
from vla_ros.errors import VlaRosError
from vla_ros.execution.context import Sink
from vla_ros.execution.source import ActionSource
from vla_ros.node.control_loop import LoopResult
from vla_ros.node.lockstep import run_due
from vla_ros.node.pipeline import ActionPipeline, build_pipeline
from vla_ros.node.simulated import SimulatedNode
from vla_ros.types import Float32Array, FloatArray, UInt8Array
from vla_ros.vision.messages import encode_image, encode_points
from vla_ros_lab.sim.environment import Measurements

LOCKSTEP, SIMULATED, WALL = "lockstep", "simulated", "wall"

Measure = Callable[[Sequence[str], int], Measurements]
"""Measures an environment; takes the cameras whose images are wanted, and the stamp in nanoseconds."""

_START = 1_000_000_000  # ns at which a simulated clock begins
_PATIENCE = 10  # steps in lockstep after which a node that sent nothing will not
_FAILED = (Reason.INFERENCE_ERROR, Reason.SERVER_LOST, Reason.DEVICE_ERROR)


def camera_message(image: UInt8Array | Float32Array, stamp: int, topic: str, arm: ArmConfig) -> bytes:
    """Return an image, or points in the arm's base frame, as the camera of a topic sends it."""
    if image.dtype == np.float32:
        return encode_points(image.astype(np.float32), stamp, arm.robot.base_frame)
    return encode_image(image.astype(np.uint8, copy=False), stamp, topic.split("/")[1])


class PolicyFailedError(VlaRosError):
    """The policy node exited, was stopped or does not move the arm."""


class Port(ABC):
    """Connects an environment to the node that drives it. Used from one thread.

    Attributes:
        clock: ``lockstep``, ``simulated`` or ``wall``.
        time: What the node and the environment read the time from.
        cameras: Topics of the images that are published.
        joints: Joints of the first arm.
        actions: The policy's actions in this episode, each float64 [D].
        commands: All commands in this episode.
        received: (Arrival time in seconds, command) of the first arm's.
        failed: Why the policy first failed to infer, or "".
        limited: Number of steps of this episode whose action a limit changed.
        refused: Number of steps of this episode that were refused.
    """

    failed = ""

    def __init__(self, clock: str, time: Clock, cameras: Sequence[str], joints: Sequence[str]) -> None:
        self.clock, self.time, self.cameras, self.joints = clock, time, tuple(cameras), tuple(joints)
        self.forget()

    def forget(self) -> None:
        """Begin to count and collect anew."""
        self.actions: list[FloatArray] = []
        self.received: list[tuple[float, Command]] = []
        self.commands: list[Command] = []
        self.limited = self.refused = 0

    def hold(self) -> Sequence[Command]:
        """Return the commands that hold the arms of an environment which needs one for each step."""
        return ()

    @property
    def stats(self) -> Mapping[str, Any]:
        """The same content as ``vla-ros run --stats``; empty if the node keeps it."""
        return {}

    @abstractmethod
    def begin(self, instruction: str, measure: Measure) -> None:
        """Begin an episode, in an environment that was reset."""

    @abstractmethod
    def instruct(self, text: str) -> None:
        """Give the node a new instruction."""

    @abstractmethod
    def stamp(self) -> int:
        """Return the stamp of measurements that are made now, nanoseconds."""

    @abstractmethod
    def publish(self, measured: Measurements, stamp: int) -> None: ...

    @abstractmethod
    def exchange(self, measure: Measure, seconds: float) -> bool:
        """In lockstep: publish what is measured ``seconds`` later, and wait for commands; False if none came.

        ``measure`` reads the environment, at a stamp in nanoseconds.
        """

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """On the wall clock: let time pass."""

    def run_once(self) -> bool:
        """On the simulated clock: run the node until something happens; False if it stopped or runs elsewhere."""
        return False

    @abstractmethod
    def check(self, *, waited: bool) -> None:
        """Raise PolicyFailedError if the node stopped or, once it was ``waited`` for, sent no command."""

    def end(self) -> None:  # noqa: B027 (most ports have nothing to end)
        """End the episode."""


class NodePort(Port):
    """The node's receivers, control loop, watchdog and limits in this process, around a loaded ``source``.

    Another ``time``, ``pipeline``, ``sink`` or options ``watched`` by the watchdog replace its own.

    Attributes:
        node: The node.
        binding: The table of the policy's inputs and outputs, and how its actions are executed.
        idle: True if :meth:`run_once` only waited.
    """

    idle = False

    def __init__(
        self,
        config: Config,
        source: ActionSource,
        clock: str = LOCKSTEP,
        *,
        time: Clock | None = None,
        pipeline: ActionPipeline | None = None,
        sink: Sink | None = None,
        watched: Config | None = None,
    ) -> None:
        time = time or (Clock() if clock == WALL else SimulatedClock(_START))
        super().__init__(clock, time, config.camera.topics, config.arms[0].robot.joint_names)
        pipeline = pipeline or build_pipeline(config, source.spec)
        self.binding, self._controller, self._config = pipeline.describe(), pipeline.controller, config
        self.node = SimulatedNode(config, source, pipeline, self.time, sink or self, self.obey, watched)
        self._holds = any(arm.output == ENVIRONMENT for arm in config.arms)
        self._changes = self._last = 0

    @property
    def stats(self) -> Mapping[str, Any]:
        return self.node.stats.summary()

    def begin(self, instruction: str, measure: Measure) -> None:
        self.forget()
        self._began = self._last = self.time.ros()
        self.instruct(instruction)
        self.node.states.forget()
        self._controller.reset()
        self.receive(measure((), self._last), self._last)
        self.node.safety.arm()
        if self.clock == WALL:
            self.node.loop.start()

    def instruct(self, text: str) -> None:
        self.node.inputs.set_instruction(text)
        self.node.inputs.new_epoch()

    def hold(self) -> Sequence[Command]:
        return self._controller.hold({})[0] if self._holds else ()

    def stamp(self) -> int:
        return self.time.ros()

    def publish(self, measured: Measurements, stamp: int) -> None:
        self.receive(measured, stamp)
        self.node.gate.supervise()

    def receive(self, measured: Measurements, stamp: int) -> None:
        """Pass measurements to the node's receivers."""
        for name, state in zip(self.node.arms, measured.joints, strict=True):
            self.node.states.accept(state, stamp, name)
        for topic_state in self._config.robot.parsed_state_topics:
            self.node.inputs.set_state(topic_state.name, measured.state[topic_state.topic])
        for index, topic in enumerate(self.cameras):
            if topic in measured.images:
                message = camera_message(measured.images[topic], stamp, topic, self._config.arms[0])
                self.node.cameras.receive(index, message)

    def exchange(self, measure: Measure, seconds: float) -> bool:
        assert isinstance(self.time, SimulatedClock)
        self._last += round(1e9 * seconds)
        self.time.jump(self._last)
        self.publish(measure(self.cameras, self._last), self._last)
        run_due(self.time, self.node.loop.run_once)
        self.check(waited=self._last - self._began > 1e9 * _PATIENCE * seconds)
        return True

    def wait(self, seconds: float) -> None:
        self.time.sleep(seconds)

    def run_once(self) -> bool:
        self.idle = self.node.loop.run_once() is LoopResult.WAITED
        return self.node.safety.state is not State.STOPPED

    def check(self, *, waited: bool) -> None:
        safety = self.node.safety
        if safety.state is State.STOPPED or (waited and not self.received and not safety.may_move):
            raise PolicyFailedError(f"the policy node does not move the arm: {safety.explain()}")

    def end(self) -> None:
        if self.clock == WALL:
            self.node.loop.stop()

    # What the node sends and reports; on the wall clock from another thread

    def obey(self, commands: Sequence[Command]) -> None:
        """Keep commands until the environment takes them."""
        self.commands.extend(commands)
        first = self._config.arms[0].name
        moves = [command for command in commands if command.arm == first and not command.hold]
        self.received.extend((self.time.steady(), command) for command in moves)

    def on_step(self, step: StepResult) -> None:
        before, self._changes = self._changes, sum(self._controller.counters.values())
        self.limited += self._changes > before
        self.refused += step.refused is not None
        if not step.by_person:
            self.actions.append(step.action)

    def on_outcome(self, outcome: FrameOutcome) -> None:
        """Remember why the first inference failed."""
        if outcome.reason in _FAILED and not self.failed:
            self.failed = f"{outcome.reason.value}: {outcome.detail}"
