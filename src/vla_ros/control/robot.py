"""Commands all arms together: if the command of one arm is refused, none is sent."""

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from vla_ros.config import Config
from vla_ros.config.control import ENVIRONMENT
from vla_ros.contract.binding import make_arms
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.arm import ArmController
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.command import Command
from vla_ros.control.environment_arm import EnvironmentArm
from vla_ros.control.outcome import Inference, StepResult
from vla_ros.control.plausibility import Plausibility
from vla_ros.control.reasons import Level, Reason, Refused
from vla_ros.control.schedule import Step
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import ActionChunk, FloatArray, JointState

Result = TypeVar("Result", bound=Command | None)

AnyArm = ArmController | EnvironmentArm
"""Makes the commands of one arm."""

ArmJoints = JointState | Mapping[str, JointState] | None
"""Joint states by arm, for the arms that have one, or one joint state with the joints of all arms."""


def make_kinematics(config: Config) -> dict[str, Kinematics]:
    """Return the kinematics of the arms that have a URDF, by arm."""
    return {name: arm.kinematics for name, arm in make_arms(config).items() if arm.kinematics is not None}


class RobotController:
    """Makes the commands of all arms that are sent together.

    One thread makes and executes motions; any thread may call :meth:`hold`, :meth:`reset` and :meth:`check`.

    Args:
        config: All options.
        spec: The policy's actions, checked by :func:`vla_ros.contract.binding.bind`.
        kinematics: Kinematics by arm; an arm without a URDF has none.
        collision: Checks the commands of all arms together; another controller may share it. None: no check.

    Attributes:
        arms: The arms' controllers, in the order of ``config.arms``.
        kinematics: Kinematics by arm, as given.
        rotations: Columns of an action that are an absolute rotation, with the form of that rotation.

    Raises:
        ConfigError: The options, the URDFs and the policy do not fit together.
    """

    def __init__(
        self,
        config: Config,
        spec: PolicySpec,
        kinematics: Mapping[str, Kinematics],
        collision: CollisionCheck | None = None,
    ) -> None:
        counts = {
            arm.name: len(kinematics[arm.name].joint_names if arm.name in kinematics else arm.robot.joint_names)
            for arm in config.arms
        }
        self._lock = threading.RLock()
        self._spec, self.kinematics, self.collision = spec, kinematics, collision
        columns = self._columns = spec.columns(counts)
        self.rotations = tuple((place, part.form) for part, place in columns if part.quantity == "tip_rotation")
        self.arms: tuple[AnyArm, ...] = tuple(
            EnvironmentArm(config, columns, arm.name)
            if arm.output == ENVIRONMENT
            else ArmController(
                config, [each for each in columns if each[0].arm == arm.name], kinematics.get(arm.name), arm.name
            )
            for arm in config.arms
        )
        # Joint state by arm: of the last command that was sent, and of those made since then.
        self._known: dict[str, JointState | None] = {}
        self._used: dict[str, JointState | None] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Apply changed options; raises ConfigError if a joint has no range left."""
        with self._lock:
            self._hold_alone = config.control.arms_hold_alone
            self._plausible = Plausibility(config, self._columns, self.kinematics, config.control.max_overshoot)
            for arm in self.arms:
                arm.configure(config)

    @property
    def binary(self) -> tuple[int, ...]:
        """Columns of grippers that only open and close."""
        return tuple(column for arm in self.arms for column in arm.binary)

    @property
    def joint_names(self) -> tuple[str, ...]:
        """Joints of all arms in command order."""
        return tuple(name for arm in self.arms for name in arm.joint_names)

    @property
    def counters(self) -> Counter[str]:
        """Sum of :attr:`ArmController.counters` over all arms."""
        return sum((arm.counters for arm in self.arms), Counter())

    def reset(self) -> None:
        """Forget previous commands, because an episode begins or a person took over the arm."""
        with self._lock:
            for arm in self.arms:
                arm.reset()

    def restart(self) -> None:
        """Begin the next commands at rest, at the measured positions, because a person has armed the robot."""
        with self._lock:
            for arm in self.arms:
                arm.restart()

    def settle(self, joints: ArmJoints) -> None:
        """Begin the next commands of arms that rest, and were moved by somebody, at the measured positions."""
        with self._lock:
            for arm in self.arms:
                if isinstance(arm, ArmController):
                    self._call(arm, arm.settle, of_arm(joints, arm.name))

    def assume(self, joints: ArmJoints) -> None:
        """Take the measured positions for the last commands: in a recording, others moved the arms there."""
        with self._lock:
            for arm in self.arms:
                self._call(arm, arm.assume, of_arm(joints, arm.name))

    def continue_from(self, other: "RobotController") -> None:
        """Continue after the last commands of ``other``, which commanded the same arms with other actions."""
        with other._lock, self._lock:
            for arm, before in zip(self.arms, other.arms, strict=True):
                if isinstance(arm, ArmController) and isinstance(before, ArmController):
                    arm.continue_from(before)
            self._known, self._used = dict(other._known), {}

    def next_start(self, joints: ArmJoints) -> dict[str, tuple[FloatArray, float]]:
        """Return :meth:`ArmController.next_start` of each arm; raises Refused."""
        with self._lock:
            return {
                arm.name: arm.next_start(of_arm(joints, arm.name))
                for arm in self.arms
                if isinstance(arm, ArmController)
            }

    def check(self, chunk: ActionChunk) -> None:
        """Raise Refused (``action_invalid``) if a chunk has a wrong shape, NaN, infinity or absurd numbers."""
        shape, spec = chunk.actions.shape, self._spec
        if len(shape) != 2 or shape[1] != spec.dimension or not 1 <= shape[0] <= spec.horizon:
            raise Refused(
                Reason.ACTION_INVALID,
                f"actions have shape {list(shape)}, expected [1 to {spec.horizon}, {spec.dimension}]",
            )
        if not np.isfinite(chunk.actions).all():
            step, number = np.argwhere(~np.isfinite(chunk.actions))[0]
            raise Refused(Reason.ACTION_INVALID, f"number {number} of step {step} is {chunk.actions[step, number]}")
        if absurd := self._plausible.absurd(chunk):
            raise Refused(Reason.ACTION_INVALID, absurd)

    def make_step(
        self,
        step: Step,
        joints: ArmJoints,
        dt: float,
        reference: ArmJoints = None,
        inference: Inference | None = None,
    ) -> StepResult:
        """Return the commands for a step of the schedule, or why there are none.

        ``joints`` are the newest joint states; ``dt`` is the time until the next command in
        seconds. ``reference`` has the joint states at the frame's stamp and is used for the first step of a chunk;
        None means ``joints``. ``inference``, made for this step, is added to the result. Call :meth:`sent`
        once the commands have been sent.
        """
        began = time.perf_counter()
        commands: tuple[Command, ...] = ()
        refusal = None
        try:
            commands = self.command(step.action, joints, step.stamp, dt, None if step.index else reference)
        except Refused as refused:
            refusal = refused.with_traceback(None)  # whose frames would keep the camera's image
        control_ms = 1e3 * (time.perf_counter() - began)
        stages = {**(inference.stages_ms if inference else {}), "control": control_ms}
        chunk, observation = (inference.chunk, inference.observation) if inference else (None, None)
        return StepResult(step.stamp, step.index, step.action, commands, refusal, chunk, observation, stages)

    def command(
        self, action: FloatArray, joints: ArmJoints, stamp: int, dt: float, reference: ArmJoints = None
    ) -> tuple[Command, ...]:
        """Return the commands of all arms for one action.

        The arguments are those of :meth:`ArmController.command`. Call :meth:`sent` once the commands have been
        sent.

        Raises:
            Refused: No command may be sent. With ``control.arms_hold_alone``, an arm that must hold does so
                (:attr:`Command.refused`) as long as another arm moves.
        """
        if not (math.isfinite(dt) and dt > 0):
            raise Refused(Reason.CLOCK_JUMP, f"{dt} s until the next command, expected more than 0")
        if action.shape != (self._spec.dimension,) or not all(map(math.isfinite, action.tolist())):
            raise Refused(
                Reason.ACTION_INVALID,
                f"found {np.array2string(action, precision=4)}, expected {self._spec.dimension} finite numbers",
            )
        with self._lock:
            tried = [
                self._call(
                    arm, arm.command, action, of_arm(joints, arm.name), stamp, dt, of_arm(reference, arm.name)
                )
                for arm in self.arms
            ]
            self._used = {}
            return self._all_or_none(tried, joints)

    def _all_or_none(self, tried: Sequence[Command | Refused | None], joints: ArmJoints) -> tuple[Command, ...]:
        """Return what can be sent together; raise a refusal that concerns all arms."""
        refused = [each for each in tried if isinstance(each, Refused)]
        stops = [each for each in refused if each.reason.level is Level.STOP]
        alone = self._hold_alone and any(isinstance(each, Command) for each in tried)
        if stops or (refused and not alone):
            raise (stops or refused)[0]
        made = [self._command_or_hold(arm, each, joints) for arm, each in zip(self.arms, tried, strict=True)]
        clear = self._keep_clear([each for each in made if isinstance(each, Command)], joints)
        return tuple(_limited_by(each, self._used.get(each.arm) or self._known.get(each.arm)) for each in clear)

    def _keep_clear(self, commands: Sequence[Command], joints: ArmJoints) -> tuple[Command, ...]:
        """Return the commands, shortened if the arms come near something; raise Refused if they come too near."""
        if self.collision is None or not commands:
            return tuple(commands)
        known = {arm.name: of_arm(joints, arm.name) or self._known.get(arm.name) for arm in self.arms}
        share = self.collision.limit(commands, known)
        if share == 1.0:
            return tuple(commands)
        moving = {arm.name: arm.shortened(share) for arm in self.arms if isinstance(arm, ArmController)}
        return tuple(each if each.hold else moving.get(each.arm) or each for each in commands)

    def _command_or_hold(
        self, arm: AnyArm, made: Command | Refused | None, joints: ArmJoints
    ) -> Command | Refused | None:
        """Return the arm's command, or a hold at the joint state of its last command, once."""
        self._used[arm.name] = of_arm(joints, arm.name)
        if not isinstance(made, Refused):
            return made
        self._used[arm.name] = None
        held = self._call(arm, arm.hold, self._known.get(arm.name))
        return replace(held, refused=made) if isinstance(held, Command) else held

    def outside_boxes(self, joints: ArmJoints) -> str:
        """Return which tips are outside their workspace boxes, and where, or ""; an unmeasured arm is left out."""
        found = []
        with self._lock:
            for arm in self.arms:
                with contextlib.suppress(Refused):
                    if isinstance(arm, ArmController) and (text := arm.outside_box(of_arm(joints, arm.name))):
                        found.append(f"the tip of '{arm.name}' is {text}")
        return "; ".join(found)

    @property
    def is_moving(self) -> bool:
        """True if any arm needs further commands to come to rest."""
        with self._lock:
            return any(arm.is_moving for arm in self.arms)

    def interpolate(self, joints: ArmJoints, dt: float, remaining: float, elapsed: float) -> tuple[Command, ...]:
        """Return the commands of :meth:`ArmController.interpolate` for all arms that have one."""
        with self._lock:
            tried = [
                self._call(arm, arm.interpolate, of_arm(joints, arm.name), dt, remaining, elapsed)
                for arm in self.arms
            ]
            return self._all_or_none(tried, joints)

    def sent(self, arms: Collection[str] | None = None) -> None:
        """Record that the last commands of ``arms`` (None: all) were sent; later commands start from them."""
        with self._lock:
            for arm in self.arms:
                if arms is None or arm.name in arms:
                    self._known |= {name: used for name, used in self._used.items() if name == arm.name}
                    arm.sent()

    def hold(
        self, joints: ArmJoints, arms: Collection[str] | None = None
    ) -> tuple[tuple[Command, ...], tuple[Refused, ...]]:
        """Return the hold command of each of ``arms`` (None: all) that can hold, and the refusals of the others."""
        chosen = [arm for arm in self.arms if arms is None or arm.name in arms]
        with self._lock:
            for arm in chosen:
                self._known[arm.name] = self._used[arm.name] = None
            tried = [self._call(arm, arm.hold, of_arm(joints, arm.name)) for arm in chosen]
        commands = tuple(_limited_by(each, of_arm(joints, each.arm)) for each in tried if isinstance(each, Command))
        return commands, tuple(each for each in tried if isinstance(each, Refused))

    def _call(self, arm: AnyArm, make: Callable[..., Result], *arguments: Any) -> Result | Refused:
        """Return the result of ``make``, or its refusal with the name of the arm if there are several."""
        try:
            return make(*arguments)
        except Refused as refused:
            return Refused(refused.reason, f"{arm.name}: {refused.detail}") if len(self.arms) > 1 else refused


def of_arm(joints: ArmJoints, arm: str) -> JointState | None:
    """Return the joint state that has the arm's joints, or None."""
    return joints.get(arm) if isinstance(joints, Mapping) else joints


def _limited_by(command: Command, joints: JointState | None) -> Command:
    """Return the command with the joint state by which it was limited."""
    return command if joints is None else replace(command, limited_by=(joints.stamp, joints.publisher))
