"""Applies all limits of an arm to a command: joint limits, tip steps, workspace box."""

import math
from dataclasses import dataclass, replace

import numpy as np

from vla_ros.config import LimitsConfig
from vla_ros.control.end_effector import shorten_for_tip
from vla_ros.control.limits import JointLimits, Violation, limit_joints, slower
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

_BEND = 1e-3  # m; a way in joint space may bend so far out of the box


@dataclass(frozen=True)
class Envelope:
    """All limits of one arm."""

    joints: JointLimits
    tip: LimitsConfig  # largest step of the tip, and the workspace box
    kinematics: Kinematics | None  # if None, the tip is not limited
    lifetime: float  # seconds after which a velocity expires; 0 for position commands
    straight: bool = False  # a twist: until it expires, the tip moves straight on, not each joint

    def limit(
        self,
        target: FloatArray,
        measured: FloatArray,
        origin: FloatArray,
        tip_from: FloatArray,
        before: FloatArray,
        dt: float,
    ) -> tuple[FloatArray, list[Violation], Violation | None]:
        """Return positions [N] that may be sent, the joint violations, and the tip violation.

        A velocity stays within the position limits and the workspace box until it expires. A joint that is faster
        than ``limits.max_joint_velocity``, because the policy moved it before, decelerates within its acceleration.

        Args:
            target: Wanted positions [N].
            measured: Newest measured positions [N]; the largest joint step starts there.
            origin: Positions at which the command starts, [N].
            tip_from: Positions at which the step of the tip starts, [N].
            before: Velocity of the previous command, [N].
            dt: Seconds until the next command.
        """
        limits, stands = self.joints, max(1.0, self.lifetime / dt)
        if math.isfinite(limits.acceleration):
            slowed = np.abs(slower(before, limits.acceleration, dt))
            if self.kinematics is not None:
                slowed = np.minimum(slowed, self.kinematics.velocity_limits * self.tip.velocity_scale)
            limits = replace(limits, velocity=np.maximum(limits.velocity, slowed))
        if stands > 1.0:
            low, high = origin + (limits.low - origin) / stands, origin + (limits.high - origin) / stands
            limits = replace(limits, low=low, high=high)
        positions, violations = limit_joints(target, measured, origin, before, dt, limits)
        if self.kinematics is None:
            return positions, violations, None
        positions, wrong = shorten_for_tip(
            self.kinematics, origin, positions, self.tip, stands, straight=self.straight, start=tip_from
        )
        return positions, violations, wrong

    def within(self, origin: FloatArray, positions: FloatArray, dt: float) -> FloatArray:
        """Return where a step ends, [N]: nearer to its origin if its way bends 1 mm out of the box."""
        if self.kinematics is None or not self.tip.box:
            return positions
        low, high = (
            tuple(each + sign * _BEND for each in edge) for sign, edge in zip((-1, 1), self.tip.box, strict=True)
        )
        tip, stands = replace(self.tip, workspace_low=low, workspace_high=high), max(1.0, self.lifetime / dt)
        within, _ = shorten_for_tip(self.kinematics, origin, positions, tip, stands, straight=self.straight)
        return within

    def around(self, measured: FloatArray, reach: FloatArray) -> "Envelope":
        """Return these limits, with each joint also within ``reach`` [N] of ``measured`` [N]."""
        low, high = np.maximum(self.joints.low, measured - reach), np.minimum(self.joints.high, measured + reach)
        return replace(self, joints=replace(self.joints, low=low, high=high))
