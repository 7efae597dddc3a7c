"""Tells absurd actions from overshoot: 1e30 m is no step that is too long, but a damaged answer.

Limits shorten every command, so an absurd action would move the arm as far as they allow, in a random direction.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from vla_ros.config import Config
from vla_ros.contract.components import UNUSED, Component
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import ActionChunk

_REACH = 1.0  # m; how far an arm's tip may be from its base, or move in a step
_LEAST = 1.0  # smallest half of a range, for joints that hardly move and for fingers in metres
_UNBOUNDED = 1e5  # rad; a joint with a wider range has no limits


class Plausibility:
    """The numbers that an action of ``columns`` can contain.

    Each number has a range: a joint's is that of the URDF (without one, a turn), a gripper's is closed to open, a
    tip's is a metre and half a turn. A number is absurd if it is further from the middle of its range than half of
    the range times ``factor``, or if the policy's statistics normalise it to more than ``factor``: they map their
    range to [-1, 1], or a standard deviation to 1, and networks overshoot that by a few times at most. Grippers are
    often converted after that, so only their own range counts.
    """

    def __init__(
        self,
        config: Config,
        columns: Sequence[tuple[Component, slice]],
        kinematics: Mapping[str, Kinematics],
        factor: float,
    ) -> None:
        self._factor = factor
        self._columns = columns
        size = max((place.stop for _, place in columns), default=0)
        self.low, self.high = np.full(size, -math.inf), np.full(size, math.inf)
        self._grippers = np.zeros(size, bool)
        for part, place in columns if factor else ():
            self._grippers[place] = part.quantity == "gripper"
            if part.quantity != UNUSED:
                low, high = map(np.asarray, _range(config, part, kinematics.get(part.arm)))
                middle, half = (low + high) / 2, np.maximum((high - low) / 2, _LEAST)
                self.low[place], self.high[place] = middle - factor * half, middle + factor * half

    def absurd(self, chunk: ActionChunk) -> str:
        """Describe the first absurd number of a chunk with D numbers in each action; "" if there is none."""
        actions, normalized = chunk.actions, chunk.normalized
        outside = (actions < self.low) | (actions > self.high)
        if outside.any():
            step, number = np.argwhere(outside)[0]
            part = next(part for part, place in self._columns if place.start <= number < place.stop)
            found = f"number {number} of step {step} ({part}) is {actions[step, number]:.4g}"
            return f"{found}, expected {self.low[number]:.4g} to {self.high[number]:.4g} (control.max_overshoot)"
        if not self._factor or normalized is None or normalized.shape != actions.shape:
            return ""
        # A number that equals its normalised value has no statistics.
        outside = (np.abs(normalized) > self._factor) & (normalized != actions) & ~self._grippers
        if not outside.any():
            return ""
        step, number = np.argwhere(outside)[0]
        found = f"number {number} of step {step} is {actions[step, number]:.4g}"
        times = f"{abs(normalized[step, number]):.4g} times the range of the checkpoint's statistics"
        return f"{found}, {times}, expected up to {self._factor:g} (control.max_overshoot)"


def _range(config: Config, part: Component, kinematics: Kinematics | None) -> tuple[ArrayLike, ArrayLike]:
    """Return the lowest and the highest that all or each of a part's numbers should be, in its unit."""
    unit = 180 / math.pi if part.form.startswith("deg") else 1.0
    if part.quantity == "gripper" and part.range is None:
        gripper = next(arm.gripper for arm in config.arms if arm.name == part.arm)
        metres = gripper.closed_position, gripper.open_position
        ends = metres if part.form else (gripper.closed_value, gripper.open_value)
        return min(ends), max(ends)
    if part.range is not None:
        return min(part.range), max(part.range)
    turn = math.pi
    half: ArrayLike
    if part.quantity in ("joint_position", "joint_delta"):
        low, high = (kinematics.position_low, kinematics.position_high) if kinematics else (-math.inf, math.inf)
        free = ~(np.subtract(high, low) < _UNBOUNDED)
        low, high = np.where(free, -2 * turn, low) * unit, np.where(free, 2 * turn, high) * unit
        if part.quantity == "joint_position":
            return low, high
        half = high - low
    elif part.quantity == "joint_velocity":
        limits = kinematics.velocity_limits if kinematics else math.inf
        half = 1.0 if part.form == "1" else np.where(np.isfinite(limits), limits, 2 * turn) * unit
    elif part.quantity == "tip_delta":
        half = np.repeat([_REACH / config.control.translation_scale, turn / config.control.rotation_scale], 3)
    else:
        half = {"tip_position": _REACH, "tip_rotation": turn}[part.quantity]
    return np.negative(half), half
