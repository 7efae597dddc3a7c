"""Limits of one arm's commands: joints, the tip's step, and the workspace box."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vla_ros.config import LimitsConfig
from vla_ros.control.end_effector import shorten_for_tip
from vla_ros.control.limits import JointLimits, Violation, limit_joints
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray


@dataclass(frozen=True)
class Envelope:
    """The limits of one arm."""

    joints: JointLimits
    tip: LimitsConfig  # its step, and the box
    kinematics: Kinematics | None  # None leaves the tip unlimited
    lifetime: float  # seconds for which a joint velocity may last; 0 for positions

    def limit(
        self,
        target: FloatArray,
        measured: FloatArray,
        origin: FloatArray,
        tip_from: FloatArray,
        before: FloatArray,
        dt: float,
    ) -> tuple[FloatArray, list[Violation], Violation | None]:
        """Return positions [N] that may be sent, on the way from ``origin`` to ``target``.

        Joint velocities that last for longer than ``dt`` stay within position limits and box for as long.

        Args:
            target: Wanted positions [N].
            measured: Newest measured positions [N], from which the distance counts.
            origin: Where the command starts, [N].
            tip_from: From which the tip's step counts, [N].
            before: Velocity of the command before, [N].
            dt: Seconds until the next command.

        Returns:
            The positions, and what was wrong with the wanted ones: with the joints, and with the tip.
        """
        limits, stands = self.joints, max(1.0, self.lifetime / dt)
        if stands > 1.0:
            low, high = origin + (limits.low - origin) / stands, origin + (limits.high - origin) / stands
            limits = replace(limits, low=low, high=high)
        positions, violations = limit_joints(target, measured, origin, before, dt, limits)
        if self.kinematics is None:
            return positions, violations, None
        positions, wrong = shorten_for_tip(self.kinematics, origin, positions, self.tip, stands, start=tip_from)
        return positions, violations, wrong

    def around(self, measured: FloatArray, reach: FloatArray) -> Envelope:
        """Return the same, and no joint further than ``reach`` [N] from where it is ``measured`` [N]."""
        low, high = np.maximum(self.joints.low, measured - reach), np.minimum(self.joints.high, measured + reach)
        return replace(self, joints=replace(self.joints, low=low, high=high))
