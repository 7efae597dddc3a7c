"""Turns camera bytes into commands, for the live node and for replay.

:meth:`Stepper.infer` builds the observation and runs the policy, :meth:`Stepper.next_command` turns the next step
of its chunk into a command. The caller provides the frames and sends the commands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.binding import bind, make_arms, paced
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import Command
from vla_ros.control.inputs import Snapshot
from vla_ros.control.outcome import StepResult
from vla_ros.control.reasons import Reason, Refused, reason_of
from vla_ros.control.robot import ArmJoints, RobotController
from vla_ros.control.schedule import ChunkSchedule
from vla_ros.errors import VlaRosError
from vla_ros.node.observer import Observer
from vla_ros.node.trained import description
from vla_ros.policies.base import Lost, Policy, Progress, Session, no_progress
from vla_ros.types import ActionChunk, Observation, PreviousChunk
from vla_ros.vision.lazy_images import LazyImages
from vla_ros.vision.messages import CdrBytes


@dataclass(frozen=True, eq=False)
class Inference:
    """A chunk from the policy and its observation."""

    observation: Observation
    chunk: ActionChunk  # checked for shape and NaN
    # ``preprocess``, ``inference`` and the policy's own stages, as in :class:`StepResult`.
    stages_ms: Mapping[str, float]


class Stepper:
    """A loaded policy with the observer, schedule and controllers around it.

    One thread uses it, and a second one may call :meth:`ask`; any thread may call :meth:`hold` and
    :meth:`forget_commands`.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self._session = Session()
        self._arms = make_arms(config)
        self._lock = threading.Lock()  # guards the controller: a hold may come from another thread

    def load(self, progress: Progress = no_progress) -> None:
        """Load the policy and :meth:`bind` it."""
        self._policy.load(progress)
        self.bind()

    def bind(self) -> None:
        """Start a session of the loaded policy, and bind the policy to the robot and the options."""
        self._session = self._policy.start_session()
        self.fit(self._policy.spec)

    def fit(self, spec: PolicySpec) -> None:
        """Bind a policy's spec to the robot; the policy need not be loaded."""
        self.binding = bind(spec, self._config, self._arms)
        self._config = self.binding.config
        self.observer = Observer(self._config, self.binding)
        kinematics = {name: arm.kinematics for name, arm in self._arms.items() if arm.kinematics is not None}
        self.controller = RobotController(self._config, self.binding.spec, kinematics)
        self.schedule = ChunkSchedule(
            self._config.control, self.binding.spec, self.controller.binary, self.controller.rotations
        )

    def describe(self) -> str:
        """Return how the policy is bound to the robot, and how its actions will be executed."""
        doubts = [
            f"check features.joint_form: {doubt}" for state in self.binding.states for doubt in state.doubts()
        ]
        return "\n".join([self.binding.table(), description(self.binding, self._arms, self.schedule.kind), *doubts])

    def close(self) -> None:
        """Free the session's and the policy's resources."""
        self._session.close()
        self._policy.close()

    @property
    def spec(self) -> PolicySpec:
        """The policy's inputs and outputs; valid after :meth:`load`."""
        return self.binding.spec

    @property
    def lost(self) -> Lost | None:
        """The loss of the policy's server, or None."""
        return self._session.lost

    def configure(self, config: Config, *, inferring: bool = False) -> None:
        """Apply changed options to the next steps; the policy gets them only if it is not inferring."""
        self._config = config = paced(config, self.spec)
        with self._lock:
            self.controller.configure(config)
        self.schedule.control = config.control
        if inferring:
            return
        self.observer.timeouts = config.timeouts
        self._policy.configure(config.policy)

    def new_task(self) -> None:
        """Begin another task: forget the chunk and the session's state.

        The last command is kept, so that a hold does not drop a gripped object.
        """
        self._session.reset()
        self.schedule.reset()
        self.observer.begin()

    def reset(self) -> None:
        """Begin an episode: forget the chunk, the last command and the session state."""
        self.new_task()
        self.forget_commands()

    def forget_commands(self) -> None:
        """Forget the last command, because a person took over the arm. Thread-safe."""
        with self._lock:
            self.controller.reset()

    def hold(
        self, joints: ArmJoints, arms: Collection[str] | None = None
    ) -> tuple[tuple[Command, ...], tuple[Refused, ...]]:
        """Return hold commands and refusals (:meth:`RobotController.hold`). Any thread may call it."""
        with self._lock:
            return self.controller.hold(joints, arms)

    def infer(self, frames: Sequence[CdrBytes | None], inputs: Snapshot) -> Inference:
        """Infer on one set of frames (:meth:`Observer.observe`) and put the chunk into the schedule.

        Raises the errors of :meth:`Observer.observe`, and Refused if the policy fails or its answer has a wrong
        shape or NaN.
        """
        start = self.schedule.position
        answer = self.ask(frames, inputs)
        self.schedule.load(answer.chunk, start)
        return answer

    def ask(
        self, frames: Sequence[CdrBytes | None], inputs: Snapshot, previous: PreviousChunk | None = None
    ) -> Inference:
        """Like :meth:`infer`, without changing the schedule, which another thread may be executing.

        ``previous`` is the plan that the policy should continue.
        """
        began = time.perf_counter()
        observation = self.observer.observe(frames, inputs)
        if previous is not None:
            observation = replace(observation, previous=previous)
        asked = time.perf_counter()
        chunk = self._ask(observation)
        prepared = observation.images.spent_ms if isinstance(observation.images, LazyImages) else 0.0
        stages = {"preprocess": 1e3 * (asked - began) + prepared, "inference": _since(asked) - prepared}
        stages |= {f"policy/{name}": ms for name, ms in chunk.stages_ms.items()}
        return Inference(observation, chunk, stages)

    def _ask(self, observation: Observation) -> ActionChunk:
        chunk: Any  # a third-party policy may return anything
        try:
            chunk = self._policy.infer(self._session, observation)
        except Refused:
            raise
        except VlaRosError as error:
            raise Refused(reason_of(error), str(error)) from error
        except Exception as error:
            raise Refused(reason_of(error), f"{type(error).__name__}: {error}") from error
        if not isinstance(chunk, ActionChunk) or not isinstance(chunk.actions, np.ndarray):
            found = type(chunk.actions if isinstance(chunk, ActionChunk) else chunk).__name__
            raise Refused(Reason.ACTION_INVALID, f"the policy returned {found}, expected an ActionChunk of arrays")
        self.controller.check(chunk)
        return chunk

    def next_command(
        self,
        joints: ArmJoints,
        dt: float,
        reference: ArmJoints = None,
        answer: Inference | None = None,
    ) -> StepResult:
        """Return the commands for the next step of the chunk; call :meth:`executed` once they are sent.

        Limits are relative to ``joints``, the newest joint states; ``dt`` is the time until the next command in
        seconds. ``reference`` has the joint states at the frame's stamp and is used for the first step of a chunk;
        None means ``joints``. ``answer``, the inference made for this step, is added to the result.
        """
        # Overrun: changed options may have shortened the plan, but the step that is due remains valid.
        step = self.schedule.next(overrun=True)
        if step is None:
            raise RuntimeError("next_command() without a step: call infer() first")
        began = time.perf_counter()
        commands: tuple[Command, ...] = ()
        refusal = None
        try:
            with self._lock:
                commands = self.controller.command(
                    step.action, joints, step.stamp, dt, reference if step.index == 0 else None
                )
        except Refused as refused:
            refusal = refused
        took = {**(answer.stages_ms if answer else {}), "control": _since(began)}
        chunk, observation = (answer.chunk, answer.observation) if answer else (None, None)
        return StepResult(step.stamp, step.index, step.action, commands, refusal, chunk, observation, took)

    @property
    def is_moving(self) -> bool:
        """True if the arm needs further commands to decelerate."""
        with self._lock:
            return self.controller.is_moving

    def onward(self, joints: ArmJoints, dt: float, left: float, passed: float) -> tuple[Command, ...]:
        """Return the commands between two steps (:meth:`ArmController.onward`)."""
        with self._lock:
            return self.controller.onward(joints, dt, left, passed)

    def sent(self) -> None:
        """Record that the last commands were sent; the next ones start from them."""
        with self._lock:
            self.controller.executed()

    def executed(self) -> None:
        """Like :meth:`sent`, for a step of the plan: the schedule counts it as executed."""
        self.schedule.executed()
        self.sent()

    def step(
        self,
        frames: Sequence[CdrBytes | None],
        inputs: Snapshot,
        dt: float,
        reference: ArmJoints = None,
    ) -> StepResult:
        """Infer on one set of frames and return the first step, as if no time passed in between.

        Raises the errors of :meth:`infer`; the result contains the reason for a refused command.
        """
        answer = self.infer(frames, inputs)
        return self.next_command(inputs.arms or inputs.joints, dt, reference, answer)


def _since(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)
