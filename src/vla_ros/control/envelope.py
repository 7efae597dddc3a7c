"""All limits of an arm: joint limits, steps of the tip, workspace box."""

import math
from dataclasses import dataclass, replace

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, ArmConfig, Config, LimitsConfig
from vla_ros.control.command import lifetime
from vla_ros.control.limits import JointLimits, Violation, limit_box, limit_joints, limit_length, slower
from vla_ros.control.measured import joint_speeds
from vla_ros.control.reasons import Reason
from vla_ros.kinematics.rotations import Pose, rotation_angle, rotation_vector, rotation_vector_matrix
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

_BEND = 1e-3  # m; a way in joint space may bend so far out of the box
_SLACK = 1.01  # factor by which the error of inverse kinematics may exceed a step limit
_HALVINGS = 6


@dataclass(frozen=True)
class Envelope:
    """All limits of one arm."""

    joints: JointLimits
    tip: LimitsConfig  # largest step of the tip, and the workspace box
    kinematics: Kinematics | None  # if None, the tip is not limited
    lifetime: float  # seconds after which a velocity expires; 0 for position commands
    straight: bool = False  # a twist: until it expires, the tip moves straight on, not each joint

    @classmethod
    def from_config(
        cls, config: Config, arm: ArmConfig, names: tuple[str, ...], kinematics: Kinematics | None
    ) -> "Envelope":
        """Return the limits of an arm with the joints ``names``; raises ConfigError if one has no range left."""
        wide, moves_on = np.full(len(names), math.inf), arm.output in VELOCITY_OUTPUTS
        speeds = np.array([*joint_speeds(arm, names, kinematics).values()])
        ranges = (-wide, wide, speeds, np.zeros(len(names), np.bool_))
        if kinematics is not None:
            ranges = (kinematics.position_low, kinematics.position_high, speeds, kinematics.is_prismatic)
        joints = JointLimits.from_config(arm.limits, names, *ranges)
        if moves_on:  # each command begins at the measured position
            joints = replace(joints, lead=wide)
        straight = arm.output not in VELOCITY_OUTPUTS or arm.output == "twist_stamped"
        return cls(joints, arm.limits, kinematics, lifetime(config) if moves_on else 0.0, straight=straight)

    def limit(
        self,
        target: FloatArray,
        measured: FloatArray,
        origin: FloatArray,
        before: FloatArray,
        dt: float,
    ) -> tuple[FloatArray, list[Violation], Violation | None]:
        """Return positions [N] that may be sent, the joint violations, and the tip violation.

        A velocity stays within the position limits and the workspace box until it expires. A joint that is faster
        than ``limits.max_joint_velocity``, because the policy moved it before, decelerates within its acceleration.

        Args:
            target: Wanted positions [N].
            measured: Newest measured positions [N], which the command leads by a bounded distance.
            origin: Positions at which the command starts, [N].
            before: Velocity of the previous command, [N].
            dt: Seconds until the next command.
        """
        limits, lasts = self.joints, max(1.0, self.lifetime / dt)
        if math.isfinite(limits.acceleration):
            slowed = np.abs(slower(before, limits.acceleration, dt))
            if self.kinematics is not None:
                scale = self.tip.velocity_scale  # 0 times no limit is not a number
                slowed = np.minimum(slowed, self.kinematics.velocity_limits * scale if scale else 0.0)
            limits = replace(limits, velocity=np.maximum(limits.velocity, slowed))
        if lasts > 1.0:
            low, high = (
                origin + (limits.low - origin) / lasts,
                origin + (limits.high - origin) / lasts,
            )
            limits = replace(limits, low=low, high=high)
        positions, violations = limit_joints(target, measured, origin, before, dt, limits)
        if self.kinematics is None:
            return positions, violations, None
        positions, wrong = shorten_for_tip(
            self.kinematics, origin, positions, self.tip, lasts, straight=self.straight
        )
        return positions, violations, wrong

    def within(self, origin: FloatArray, positions: FloatArray, dt: float) -> FloatArray:
        """Return where a step ends, [N]: nearer to its origin if its way bends 1 mm out of the box."""
        if self.kinematics is None or not self.tip.box:
            return positions
        low, high = (
            tuple(each + sign * _BEND for each in edge) for sign, edge in zip((-1, 1), self.tip.box, strict=True)
        )
        tip, lasts = (
            replace(self.tip, workspace_low=low, workspace_high=high),
            max(1.0, self.lifetime / dt),
        )
        within, _ = shorten_for_tip(self.kinematics, origin, positions, tip, lasts, straight=self.straight)
        return within

    def outside_box(self, positions: FloatArray) -> str:
        """Return how the tip at joint ``positions`` [N] is outside the workspace box, or ""."""
        if self.kinematics is None or not self.tip.box:
            return ""
        tip = self.kinematics.forward(positions).position
        if not limit_box(tip, np.clip(tip, *self.tip.box), *self.tip.box)[1]:
            return ""
        where, low, high = (np.round(each, 3).tolist() for each in (tip, *self.tip.box))
        return f"at {where} m, outside limits.workspace_low {low} and workspace_high {high}: it can only come back"

    def around(self, positions: FloatArray, step: float) -> "Envelope":
        """Return these limits, with each joint also within a ``step`` of ``positions`` [N]."""
        low, high = (
            np.maximum(self.joints.low, positions - step),
            np.minimum(self.joints.high, positions + step),
        )
        return replace(self, joints=replace(self.joints, low=low, high=high))

    def allows_tip(self, origin: FloatArray, positions: FloatArray) -> bool:
        """Return True if the tip's limits allow a step from ``origin`` to ``positions`` [N]."""
        if self.kinematics is None:
            return True
        ends = self.kinematics.forward(origin), self.kinematics.forward(positions)
        return _excess(*ends, self.tip)[0] <= 1.0


def limit_pose(wanted: Pose, start: Pose, limits: LimitsConfig) -> tuple[Pose, list[Violation]]:
    """Limit a step of the tip from ``start`` to ``wanted``; return the pose and the violations.

    The pose is within the step limits and the workspace box.
    """
    violations = []
    position, rotation = wanted.position, wanted.rotation
    step, shortened = limit_length(position - start.position, limits.max_translation_step)
    if shortened:
        found = math.dist(position.tolist(), start.position.tolist())
        detail = f"a step of {found:.4g} m, allowed {limits.max_translation_step:g} m"
        violations.append(Violation(Reason.LIMIT_TRANSLATION, detail))
        position = start.position + step
    turn = rotation_vector(rotation @ start.rotation.T)
    vector, shortened = limit_length(turn, limits.max_rotation_step)
    if shortened:
        detail = f"a step of {math.hypot(*turn.tolist()):.4g} rad, allowed {limits.max_rotation_step:g} rad"
        violations.append(Violation(Reason.LIMIT_ROTATION, detail))
        rotation = rotation_vector_matrix(vector) @ start.rotation
    if limits.box:
        inside, changed = limit_box(position, start.position, *limits.box)
        if changed:
            detail = f"target {np.round(position, 4).tolist()} m, {_box(limits)}"
            violations.append(Violation(Reason.LIMIT_WORKSPACE, detail))
            position = inside
    return Pose(position, rotation), violations


def shorten_for_tip(
    kinematics: Kinematics,
    origin: FloatArray,
    positions: FloatArray,
    limits: LimitsConfig,
    lasts: float = 1.0,
    *,
    straight: bool = False,
) -> tuple[FloatArray, Violation | None]:
    """Shorten the step from ``origin`` to ``positions`` until the tip is within its limits.

    Returns joint positions [N] and the violation of ``positions``, or None. The check is necessary because inverse
    kinematics and joint limits bend the path of the tip, and because a policy in joint space ignores the tip.
    ``lasts`` is the number of step durations after which a velocity expires; until then the tip stays in the box.
    It moves ``straight`` on (a twist), or each joint moves on.
    """
    begin = kinematics.forward(origin)

    def expiry(candidate: FloatArray) -> FloatArray:
        """Return the tip's position [3] when the velocity that leads to ``candidate`` expires."""
        if not straight:
            return kinematics.forward(origin + lasts * (candidate - origin)).position
        tip = kinematics.forward(origin).position
        return tip + lasts * (kinematics.forward(candidate).position - tip)

    share, first = 1.0, None
    for _ in range(_HALVINGS):
        candidate = origin + share * (positions - origin)
        excess, wrong = _excess(begin, kinematics.forward(candidate), limits)
        if excess <= 1.0 and lasts > 1.0:
            excess, wrong = _out_of_box(begin, expiry(candidate), limits)
        if excess <= 1.0:
            return candidate, first
        first = first or wrong
        share *= 0.5 if math.isinf(excess) else 0.99 / excess
    return origin.copy(), first


def _out_of_box(start: Pose, end: FloatArray, limits: LimitsConfig) -> tuple[float, Violation | None]:
    """Return infinity and the violation if the position ``end`` [3] is (further) outside the box, otherwise 0."""
    if limits.box:
        _, outside = limit_box(end, start.position, *limits.box)
        if outside:
            detail = f"tip at {np.round(end, 4).tolist()} m, {_box(limits)}"
            return math.inf, Violation(Reason.LIMIT_WORKSPACE, detail)
    return 0.0, None


def _excess(start: Pose, end: Pose, limits: LimitsConfig) -> tuple[float, Violation | None]:
    """Return the larger of the step's ratios to its two limits, and the violation if it exceeds 1."""
    if end is start:  # kinematics caches poses: nothing moves
        return 0.0, None
    worst, wrong = _out_of_box(start, end.position, limits)
    if wrong is not None:
        return worst, wrong
    moved = math.dist(end.position.tolist(), start.position.tolist())
    turned = rotation_angle(end.rotation @ start.rotation.T)
    for reason, found, allowed, unit in (
        (Reason.LIMIT_TRANSLATION, moved, limits.max_translation_step, "m"),
        (Reason.LIMIT_ROTATION, turned, limits.max_rotation_step, "rad"),
    ):
        excess = found / (allowed * _SLACK + 1e-4)
        if excess > max(worst, 1.0):
            wrong = Violation(reason, f"the tip moves {found:.4g} {unit}, allowed {allowed:g} {unit}")
        worst = max(worst, excess)
    return worst, wrong


def twist_between(start: Pose, end: Pose, dt: float) -> tuple[FloatArray, FloatArray]:
    """Return the tip's velocity from ``start`` to ``end`` in ``dt`` seconds, in base axes.

    Linear [3] in m/s and angular [3] in rad/s.
    """
    return (end.position - start.position) / dt, rotation_vector(end.rotation @ start.rotation.T) / dt


def _box(limits: LimitsConfig) -> str:
    return f"box {list(limits.workspace_low)} to {list(limits.workspace_high)}"
