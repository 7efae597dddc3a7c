"""Converts the numbers of an action to joint positions or a pose of the tip."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_ros.config import ArmConfig, ControlConfig
from vla_ros.contract.action import velocity_scale
from vla_ros.contract.components import MOTIONS, Component
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robosuite_osc import AT_REST, HandState, respond
from vla_ros.errors import ConfigError
from vla_ros.kinematics.rotations import Pose, read_rotation
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

_UNITS = {"rad": 1.0, "rad/s": 1.0, "deg": math.pi / 180, "deg/s": math.pi / 180}
_SAME = 1e-9  # rad or m; smaller differences are rounding
_UNBOUNDED = 1e5  # rad; a joint with a wider range has no limits
_MOST_TURNS = 4 * math.pi  # rad; what a joint without limits may be at home
_ROUNDED = 1e-3  # rad or m, by which a number in a file may be beyond its limit
_CHOOSE = (
    "control.delta_form: choose goal or motion. LIBERO's actions are goals of robosuite's compliant controller: "
    "1.0 is a goal 0.05 m or 0.5 rad ahead, of which the arm covers about a quarter in a step. goal sends these "
    "goals, for a simulator with that controller; a stiff arm moves four times as far as in the demonstrations. "
    "motion sends the motion that the controller makes of them, for an arm"
)


@dataclass(frozen=True, eq=False)
class JointMotion:
    """Converts numbers that are joint positions, steps or velocities."""

    quantity: str  # ``joint_position``, ``joint_delta`` or ``joint_velocity``
    scale: FloatArray  # float64 [N], radians or metres (per second) per unit
    offset: FloatArray  # float64 [N], position that the number 0 stands for
    clips: bool = False  # True if the numbers are shares, to which ``control.clip`` applies

    def reset(self) -> None:
        """Do nothing; see :meth:`TipMotion.reset`."""

    def sent(self, positions: FloatArray) -> None:
        """Do nothing; see :meth:`TipMotion.sent`."""

    discard = reset

    def target(self, numbers: FloatArray, start: FloatArray, dt: float, control: ControlConfig) -> FloatArray:
        """Return the joint positions [N] that ``numbers`` [N] mean, ``dt`` seconds after ``start``."""
        if self.clips:
            numbers = clip(numbers, control, shares=True)
        wanted: FloatArray = self.offset + self.scale * numbers
        if self.quantity == "joint_position":
            return wanted
        return start + (wanted * dt if self.quantity == "joint_velocity" else wanted)


@dataclass(frozen=True, eq=False)
class _Target:
    """A pose for the tip, where the next one may start (``control.delta_from``)."""

    pose: Pose
    goal: FloatArray  # [3, 3], orientation that a delta without rotation keeps (``control.delta_form``)
    response: HandState = AT_REST


class TipMotion:
    """Converts numbers that are a pose or a step of the tip.

    :meth:`target` uses what :meth:`sent` recorded of the last command; :meth:`reset` forgets it.

    Args:
        quantity: ``tip_position`` or ``tip_delta``; the numbers of the rotation follow.
        form: Form of the rotation.
    """

    def __init__(self, quantity: str, form: str) -> None:
        self.quantity, self.form = quantity, form
        self.reset()

    def reset(self) -> None:
        """Forget the last command: the arm is at rest."""
        self._sent: _Target | None = None
        self._made: _Target | None = None  # not sent yet
        self._positions = np.zeros(0)  # [N], with which ``_sent`` was commanded

    def pose_at(self, positions: FloatArray) -> Pose | None:
        """Return the last commanded pose if it was commanded with these ``positions`` [N], otherwise None."""
        if self._sent is None or not np.allclose(positions, self._positions, rtol=0.0, atol=_SAME):
            return None
        return self._sent.pose

    def sent(self, positions: FloatArray) -> None:
        """Record that the last target was commanded, with ``positions`` [N]."""
        if self._made is not None:
            self._sent, self._made, self._positions = self._made, None, positions

    def discard(self) -> None:
        """Forget the last target, because another command replaced it."""
        self._made = None

    def shortened(self, pose: Pose) -> None:
        """Record that limits replaced the last target."""
        if self._made is not None:
            self._made = replace(self._made, pose=pose)

    def target(
        self, numbers: FloatArray, start: Pose, control: ControlConfig, pivot: FloatArray | None = None
    ) -> Pose:
        """Return the pose that ``numbers`` [3 + rotation] mean, relative to ``start`` for a delta.

        A delta turns ``start`` about the position ``pivot`` [3], by default that of ``start``. Raises Refused
        (``action_invalid``) if the rotation has no direction.
        """
        translation, rotation = numbers[:3], numbers[3:]
        if self.quantity == "tip_position":
            return Pose(translation, self._rotation(rotation))
        translation = clip(translation, control, 0) * control.translation_scale
        angles = clip(rotation, control, 1) * control.rotation_scale
        size = math.hypot(*angles.tolist())
        turn = self._rotation(angles if size <= math.pi else angles * (math.pi / size))
        if control.delta_frame == "tip":
            translation, turn = start.rotation @ translation, start.rotation @ turn @ start.rotation.T
        arm = np.zeros(3) if pivot is None else start.position - pivot
        goal = Pose(start.position - arm + turn @ arm + translation, turn @ start.rotation)
        if control.delta_form == "step":
            self._made = _Target(goal, goal.rotation)
            return goal
        turning = bool(np.any(angles))  # robosuite, too, compares with exactly zero
        if not turning:
            goal = Pose(goal.position, start.rotation if self._sent is None else self._sent.goal)
        end, response = goal, AT_REST
        if control.delta_form == "motion":
            end, response = respond(start, goal, self._sent.response if self._sent else AT_REST, turning)
        self._made = _Target(end, goal.rotation, response)
        return end

    def _rotation(self, numbers: FloatArray) -> FloatArray:
        try:
            return read_rotation(numbers, self.form)
        except ValueError as error:
            raise Refused(Reason.ACTION_INVALID, f"tip_rotation[{self.form}]: {error}") from None


def clip(numbers: FloatArray, control: ControlConfig, group: int = 0, *, shares: bool = False) -> FloatArray:
    """Apply ``control.clip`` to the numbers [3] of a translation (``group`` 0) or a rotation (1).

    Or to velocities [N] that are ``shares`` of the largest one: the largest of them counts, not their length.
    """
    largest = control.clip_at[min(group, len(control.clip_at) - 1)]
    if control.clip == "each":
        return np.clip(numbers, -largest, largest)
    if control.clip == "together":
        length = float(np.abs(numbers).max()) if shares else math.hypot(*numbers.tolist())
        return numbers / max(length / largest, 1.0)
    return numbers


Motion = JointMotion | TipMotion


def make_motion(
    parts: Sequence[Component], arm: ArmConfig, control: ControlConfig, kinematics: Kinematics | None
) -> Motion:
    """Return the motion that ``parts``, checked by ``contract.binding.bind``, describe."""
    found = {part.quantity: part for part in parts}
    [quantity] = found.keys() & MOTIONS
    part = found[quantity]
    if kinematics is None and (quantity == "tip_position" or part.range is not None):
        raise _lacks(arm, part, "not set")
    if quantity == "tip_position":
        return TipMotion(quantity, found["tip_rotation"].form)
    if quantity == "tip_delta":
        if control.delta_form == "choose":
            raise ConfigError(_CHOOSE)
        if kinematics is None and arm.output != "twist_stamped":
            raise _lacks(arm, part, "not set", "; set it, or set control.output to twist_stamped")
        return TipMotion(quantity, part.form or control.rotation)
    names = kinematics.joint_names if kinematics else arm.robot.joint_names
    scale, offset = np.ones(len(names)), np.zeros(len(names))
    if quantity == "joint_velocity":
        limits = kinematics.velocity_limits if kinematics else np.full(len(names), math.inf)
        _all_limited(arm, part, names, limits, "velocity")
        if part.form == "1":
            scale = velocity_scale(control, limits)
    if part.range is not None and kinematics is not None:
        low, high = kinematics.position_low, kinematics.position_high
        _all_limited(arm, part, names, np.where(high - low < _UNBOUNDED, 0.0, math.inf), "position")
        least, most = part.range
        scale = (high - low) / (most - least)
        offset = low - least * scale
    return JointMotion(quantity, scale * _UNITS.get(part.form, 1.0), offset, part.form == "1")


def check_fit(arm: ArmConfig, motion: Motion, kinematics: Kinematics | None, joints: Sequence[str]) -> None:
    """Raise ConfigError: a twist from joint actions without a URDF, or ``robot.home`` of another length."""
    section = "robot" if arm.name == "arm" else arm.name
    if kinematics is None and arm.output == "twist_stamped" and isinstance(motion, JointMotion):
        raise ConfigError(f"{section}.urdf: not set, but a twist from joint positions requires it")
    if arm.robot.home and len(arm.robot.home) != len(joints):
        found = f"{len(arm.robot.home)} numbers, expected one for each of {list(joints)}"
        raise ConfigError(f"{section}.home: found {found}")
    if kinematics is None or not arm.robot.home:
        return
    low, high = kinematics.position_low, kinematics.position_high
    turning = np.where(high - low < _UNBOUNDED, math.inf, _MOST_TURNS)
    low, high = np.maximum(low, -turning), np.minimum(high, turning)
    for name, at, least, most in zip(joints, arm.robot.home, low.tolist(), high.tolist(), strict=True):
        if not least - _ROUNDED <= at <= most + _ROUNDED:
            expected = f"expected {least:.4g} to {most:.4g} (radians or metres, {kinematics.description.path})"
            raise ConfigError(f"{section}.home: found {at:g} for '{name}', {expected}; is it in degrees?")


def _all_limited(arm: ArmConfig, part: Component, names: Sequence[str], limits: FloatArray, what: str) -> None:
    free = [name for name, limit in zip(names, limits, strict=True) if not math.isfinite(limit)]
    if free:
        raise _lacks(arm, part, f"found no {what} limit for {free}")


def _lacks(arm: ArmConfig, part: Component, found: str, advice: str = "") -> ConfigError:
    section = "robot" if arm.name == "arm" else arm.name
    return ConfigError(f"{section}.urdf: {found}, but the policy returns {part}{advice}")
