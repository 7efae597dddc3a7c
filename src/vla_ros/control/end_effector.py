"""Steps of the end effector: what six numbers mean, how far one step may go, and what the tip really does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_ros.config import ControlConfig, LimitsConfig
from vla_ros.control.limits import Violation, limit_box, limit_length
from vla_ros.control.reasons import Reason
from vla_ros.kinematics.solver import Kinematics
from vla_ros.kinematics.transforms import (
    Pose,
    euler_xyz_matrix,
    rotation_angle,
    rotation_vector,
    rotation_vector_matrix,
)
from vla_ros.types import FloatArray

_SLACK = 1.01  # what kinematics leaves over may exceed a step limit by this factor
_HALVINGS = 6


@dataclass(frozen=True)
class Delta:
    """A motion of the tip in one step: translation [3] in metres and rotation [3, 3], in the delta's frame."""

    translation: FloatArray
    rotation: FloatArray

    def apply(self, pose: Pose, frame: str) -> Pose:
        """The pose after it; ``frame`` (``control.delta_frame``) says whose axes it is given in."""
        if frame == "tip":
            return Pose(pose.position + pose.rotation @ self.translation, pose.rotation @ self.rotation)
        return Pose(pose.position + self.translation, self.rotation @ pose.rotation)


def read_delta(motion: FloatArray, control: ControlConfig, limits: LimitsConfig) -> tuple[Delta, list[Violation]]:
    """The delta that six finite numbers [6] in the action's units mean, shortened to the step limits."""
    violations = []
    raw = np.minimum(np.maximum(motion, -1e9), 1e9)  # far beyond every limit, and no product of it overflows
    translation, shortened = limit_length(raw[:3] * control.translation_scale, limits.max_translation_step)
    if shortened:
        found = math.hypot(*raw[:3].tolist()) * control.translation_scale
        detail = f"a step of {found:.4g} m, allowed {limits.max_translation_step:g} m"
        violations.append(Violation(Reason.LIMIT_TRANSLATION, detail))
    angles, unwound = limit_length(raw[3:] * control.rotation_scale, math.pi)
    rotation = euler_xyz_matrix(angles) if control.rotation == "euler_xyz" else rotation_vector_matrix(angles)
    vector, shortened = limit_length(rotation_vector(rotation), limits.max_rotation_step)
    if shortened or unwound:
        found = math.hypot(*raw[3:].tolist()) * control.rotation_scale
        detail = f"a step of {found:.4g} rad, allowed {limits.max_rotation_step:g} rad"
        violations.append(Violation(Reason.LIMIT_ROTATION, detail))
        rotation = rotation_vector_matrix(vector)
    return Delta(translation, rotation), violations


def draw_into_box(target: Pose, current: Pose, limits: LimitsConfig) -> tuple[Pose, list[Violation]]:
    """``target`` with its position in the workspace box, where there is one."""
    if not limits.workspace_low:
        return target, []
    inside, changed = limit_box(target.position, current.position, limits.workspace_low, limits.workspace_high)
    if not changed:
        return target, []
    detail = f"target {np.round(target.position, 4).tolist()} m, {_box(limits)}"
    return Pose(inside, target.rotation), [Violation(Reason.LIMIT_WORKSPACE, detail)]


def shorten_for_tip(
    kinematics: Kinematics, origin: FloatArray, positions: FloatArray, limits: LimitsConfig, *, steps: bool
) -> tuple[FloatArray, str]:
    """Joint positions [N] between ``origin`` and ``positions`` at which the tip keeps its limits.

    Kinematics and joint limits bend the tip's path, and a policy in joint space knows of no box: so this looks
    at where the tip would really be. Without ``steps`` (joint-space policies) only the box counts.

    Returns:
        The positions, and what was wrong with the wanted ones (empty where nothing was).
    """
    start = kinematics.forward(origin)
    share, first = 1.0, ""
    for _ in range(_HALVINGS):
        candidate = origin + share * (positions - origin)
        excess, wrong = _excess(start, kinematics.forward(candidate), limits, steps)
        if excess <= 1.0:
            return candidate, first
        first = first or wrong
        share *= 0.5 if math.isinf(excess) else 0.99 / excess
    return origin.copy(), first


def _excess(start: Pose, end: Pose, limits: LimitsConfig, steps: bool) -> tuple[float, str]:
    """By what factor a step from ``start`` to ``end`` is too long (at most 1 is right), and in words."""
    if end is start:  # kinematics remembers poses: nothing moves
        return 0.0, ""
    if limits.workspace_low:
        _, outside = limit_box(end.position, start.position, limits.workspace_low, limits.workspace_high)
        if outside:
            return math.inf, f"tip at {np.round(end.position, 4).tolist()} m, {_box(limits)}"
    if not steps:
        return 0.0, ""
    moved = math.dist(end.position.tolist(), start.position.tolist())
    turned = rotation_angle(end.rotation @ start.rotation.T)
    worst = 0.0
    for found, allowed in ((moved, limits.max_translation_step), (turned, limits.max_rotation_step)):
        excess = found / (allowed * _SLACK + 1e-4)
        worst = max(worst, excess)
    return worst, f"tip moves {moved:.4g} m and {turned:.4g} rad" if worst > 1.0 else ""


def twist_between(start: Pose, end: Pose, dt: float) -> tuple[FloatArray, FloatArray]:
    """Constant velocity from pose to pose in ``dt`` seconds: linear [3] m/s, angular [3] rad/s, base axes."""
    return (end.position - start.position) / dt, rotation_vector(end.rotation @ start.rotation.T) / dt


def _box(limits: LimitsConfig) -> str:
    return f"box {list(limits.workspace_low)} to {list(limits.workspace_high)}"
