"""The one step from camera bytes to a command, the same for the live node and replay.

``observe`` makes the observation, ``infer`` asks the policy, ``next_command`` turns the next step of the chunk into
a command. Only the two ends differ between uses: where frames come from and where commands go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.control.command import Command
from vla_ros.control.controller import Controller
from vla_ros.control.failures import reason_of
from vla_ros.control.inputs import Snapshot
from vla_ros.control.kinematics import Kinematics
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.schedule import ChunkSchedule
from vla_ros.errors import ConfigError, ImageError, VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress
from vla_ros.types import ActionChunk, ActionSpec, FloatArray, JointState, Observation
from vla_ros.vision.lazy_images import Pictures
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.preprocess import Preprocessor

_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step came to.

    Attributes:
        stamp: Stamp of the frame behind it, nanoseconds.
        index: Step of the chunk.
        action: Float64 [D], un-normalised, before limits and kinematics.
        command: What may be sent, or None where it was refused.
        refused: Why not, or None.
        chunk: The policy's answer where it was asked for this step, else None.
        observation: What the policy was asked, where it was.
        stages_ms: Milliseconds by stage: ``preprocess`` (also what of it was done while the policy looked, which
            ``inference`` does not count), the policy's own stages, ``inference``, ``control``.
    """

    stamp: int
    index: int = 0
    action: FloatArray | None = None
    command: Command | None = None
    refused: Refused | None = None
    chunk: ActionChunk | None = None
    observation: Observation | None = None
    stages_ms: Mapping[str, float] = field(default_factory=lambda: _NOTHING)


def make_kinematics(config: Config) -> Kinematics | None:
    """The arm that the options describe, or None where ``robot.urdf`` is empty.

    Raises:
        ConfigError: The URDF, a joint or a frame does not exist.
    """
    robot = config.robot
    if not robot.urdf:
        return None
    return Kinematics.from_urdf(robot.urdf, robot.joint_names, robot.base_frame, robot.tip_frame)


class Stepper:
    """A loaded policy with everything around it.

    One thread uses it; any thread may call `configure`, `hold` and `forget_commands`.

    Args:
        config: The whole tree.
        policy: Loaded or not; :meth:`load` loads it.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self._session = Session()
        self._kinematics = make_kinematics(config)
        self._waiting: Config | None = None
        self._lock = threading.Lock()  # the controller: a hold may come from another thread

    def load(self, progress: Progress = no_progress) -> None:
        """Load the policy and fit everything to what it expects.

        Raises:
            VlaRosError: The policy does not load, or policy, robot and options do not belong together.
        """
        self._policy.load(progress)
        self._session = self._policy.start_session()
        spec = self._policy.spec
        unknown = [key for key in spec.image_keys if key not in self._config.camera.keys]
        if unknown:
            raise ConfigError(
                f"camera.keys: the policy needs pictures {list(spec.image_keys)}, and the cameras give "
                f"{list(self._config.camera.keys)}; set camera.topics and camera.keys"
            )
        self._preprocessor = Preprocessor(self._config.camera, spec.image_size)
        self._cameras = tuple(self._config.camera.keys.index(key) for key in spec.image_keys)
        self.controller = Controller(self._config, spec, self._kinematics)
        binary = self._config.gripper.mode == "binary"
        self.schedule = ChunkSchedule.from_config(self._config.control, spec, binary)

    def close(self) -> None:
        """Free what session and policy hold."""
        self._session.close()
        self._policy.close()

    @property
    def spec(self) -> ActionSpec:
        """What the policy expects and returns."""
        return self._policy.spec

    @property
    def wants_frame(self) -> bool:
        """True where the next step needs an answer of the policy, and so a frame."""
        return self.schedule.wants_chunk

    def configure(self, config: Config) -> None:
        """Take options that may change while running, from the next step on. From any thread."""
        self._waiting = config

    def new_task(self) -> None:
        """Another instruction: forget the chunk and what the policy remembers.

        What was commanded stays known, for the arm and its fingers do not change with the words: a hold that comes
        now must not let go of what is gripped.
        """
        self._session.reset()
        self.schedule.reset()

    def reset(self) -> None:
        """A new episode: forget chunk, what was commanded, and what the policy remembers."""
        self.new_task()
        self.forget_commands()

    def forget_commands(self) -> None:
        """A person has taken over: what was commanded before says nothing any more. From any thread."""
        with self._lock:
            self.controller.reset()

    def hold(self, joints: JointState | None) -> Command:
        """Keep the last measured position; from any thread.

        Raises:
            Refused: There is no usable measurement.
        """
        with self._lock:
            return self.controller.hold(joints)

    def observe(self, frames: Sequence[CdrBytes | None], inputs: Snapshot) -> Observation:
        """Decode what the policy needs; turned, cropped and resized it is when the policy looks, or by the policy.

        Args:
            frames: One serialised camera message per ``camera.topics``; None where none has come yet.
            inputs: Joint state, further feeds and instruction at that moment.

        Raises:
            ImageError: A message is no picture; the camera's topic is named.
            Refused: A camera, feed, joint state or instruction that the policy needs is missing.
        """
        spec, topics = self._policy.spec, self._config.camera.topics
        if not inputs.instruction:
            raise Refused(Reason.NO_INSTRUCTION, "set policy.instruction or publish on topics.instruction")
        if spec.needs_joints and inputs.joints is None:
            raise Refused(Reason.INPUT_MISSING, "no usable joint state within timeouts.joint_state")
        absent = [key for key in spec.state_keys if key not in inputs.state]
        if absent:
            raise Refused(Reason.INPUT_MISSING, f"no message yet on the feeds {absent} (robot.state_topics)")
        makers, unprepared, stamp = {}, {}, None
        for key, index in zip(spec.image_keys, self._cameras, strict=True):
            data = frames[index]
            if data is None:
                raise Refused(Reason.INPUT_MISSING, f"no frame yet on {topics[index]}")
            try:
                frame = self._preprocessor.decode(data)
            except ImageError as error:
                raise ImageError(f"{topics[index]}: {error}") from None
            makers[key] = partial(self._preprocessor.prepare, frame.image, index)
            unprepared[key] = self._preprocessor.unprepared(frame.image, index)
            stamp = frame.stamp if stamp is None else stamp
        assert stamp is not None, "every policy looks at one picture at least"
        self._check_feeds(inputs, stamp)
        return Observation(
            Pictures(makers), inputs.instruction, stamp, inputs.joints, inputs.state, frames=unprepared
        )

    def _check_feeds(self, inputs: Snapshot, stamp: int) -> None:
        """Refuse feeds that fell silent: the watchdog knows cameras and the joint state alone."""
        allowed = self._config.timeouts.joint_state_age
        for key in self._policy.spec.state_keys:
            age = (stamp - inputs.state[key].stamp) / 1e9
            if allowed and age > allowed:
                raise Refused(
                    Reason.INPUT_MISSING,
                    f"the feed '{key}' is {age:.3g} s older than the frame, allowed {allowed:g} s "
                    "(timeouts.joint_state_age)",
                )

    def infer(self, observation: Observation) -> ActionChunk:
        """Ask the policy, check its answer and put it into the schedule.

        Raises:
            Refused: The policy failed, or its answer has a wrong shape or holds NaN.
        """
        self.schedule.observed(observation.stamp)
        chunk: Any  # whatever a third party's policy gives
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
            raise Refused(
                Reason.ACTION_INVALID, f"the policy answered with {found}, expected an ActionChunk of arrays"
            )
        self.controller.check(chunk)
        answer: ActionChunk = chunk
        self.schedule.load(answer)
        return answer

    def next_command(self, joints: JointState | None, dt: float, reference: JointState | None = None) -> StepResult:
        """The command for the next step of the chunk.

        Args:
            joints: Newest joint state.
            dt: Seconds until the next command.
            reference: Joint state at the frame's stamp, for the first step of a chunk; None takes ``joints``.
        """
        self._take_options()
        # Overrun: options taken just now may have shortened the plan; the step that was due is still a right one.
        step = self.schedule.next(overrun=True)
        if step is None:
            raise RuntimeError("next_command() without a step: call infer() first")
        began = time.perf_counter()
        try:
            first = reference if step.index == 0 else None
            with self._lock:
                command = self.controller.command(step.action, joints, step.stamp, dt, first)
        except Refused as refused:
            return StepResult(step.stamp, step.index, step.action, refused=refused)
        took = {"control": _since(began)}
        return StepResult(step.stamp, step.index, step.action, command, stages_ms=took)

    def executed(self) -> None:
        """The command of the last step was sent: it counts, for the schedule and for what follows from it."""
        self.schedule.executed()
        with self._lock:
            self.controller.executed()

    def step(
        self,
        frames: Sequence[CdrBytes | None],
        inputs: Snapshot,
        dt: float,
        reference: JointState | None = None,
        newest: Callable[[], JointState | None] | None = None,
    ) -> StepResult:
        """Observe, think and act on one set of frames: the whole step.

        The step is not yet counted as executed: call :meth:`executed` once the command was sent.

        Args:
            frames: As :meth:`observe`.
            inputs: As :meth:`observe`.
            dt: Seconds until the next command.
            reference: Joint state at the frame's stamp.
            newest: Gives the joint state against which limits count, once the policy has answered; None takes
                that of ``inputs``.

        Raises:
            ImageError: As :meth:`observe`.
            Refused: As :meth:`observe` and :meth:`infer`; what only the command lacks is in the answer.
        """
        self._take_options()
        began = time.perf_counter()
        observation = self.observe(frames, inputs)
        seen = time.perf_counter()
        chunk = self.infer(observation)
        looked = observation.images.spent_ms if isinstance(observation.images, Pictures) else 0.0
        took = {"preprocess": 1e3 * (seen - began) + looked, "inference": _since(seen) - looked}
        done = self.next_command(newest() if newest else inputs.joints, dt, reference)
        stages = {**took, **{f"policy/{name}": ms for name, ms in chunk.stages_ms.items()}, **done.stages_ms}
        return StepResult(
            done.stamp, done.index, done.action, done.command, done.refused, chunk, observation, stages
        )

    def _take_options(self) -> None:
        """Options that another thread left here."""
        config, self._waiting = self._waiting, None
        if config is not None:
            self._config = config
            with self._lock:
                self.controller.configure(config)
            self.schedule.configure(config.control)
            self._policy.configure(config.policy)


def _since(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)
