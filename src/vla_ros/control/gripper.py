"""Converts the gripper number of an action to a finger position.

Conventions differ between datasets: OpenVLA's Bridge checkpoints say 1 for open and 0 for closed, LIBERO's
environment wants -1 for open and 1 for closed and takes the sign (threshold 0.5 on that range), some are
continuous. Here each convention is described by two numbers: the value that means open and the value that means
closed.
"""

from __future__ import annotations

import math

from vla_ros.config import GripperConfig
from vla_ros.contract.parts import Part


class Gripper:
    """Interprets gripper values; remembers whether it is open (binary mode) and the last finger position sent.

    Args:
        config: The options; others may be assigned to the attribute.
        part: Says which numbers mean closed and open (``[CLOSED..OPEN]``), or that they are finger positions
            (``[m]``); without a form the options do.

    Attributes:
        target: Finger position that was last sent, or None.
    """

    def __init__(self, config: GripperConfig, part: Part | None = None) -> None:
        self.config = config
        self._part = part
        self.reset()

    def reset(self) -> None:
        """Forget the binary state and the last position sent."""
        self._open: bool | None = None
        self.target: float | None = None

    def opening(self, value: float) -> float:
        """Return the opening in [0, 1] for the action's gripper number; 1 is open.

        NaN and infinity raise ValueError. Numbers outside the range from closed to open are clipped. In binary mode
        the result is 0 or 1: open above ``threshold + hysteresis``, closed at or below ``threshold - hysteresis``,
        unchanged in between (the first time, the threshold alone decides).
        """
        if not math.isfinite(value):
            raise ValueError(f"gripper value {value} is not finite")
        config, closed, opened = self.config, self.config.closed_value, self.config.open_value
        if self._part is not None and self._part.form:
            closed, opened = self._part.range or (config.closed_position, config.open_position)  # [m]
        share = min(max((value - closed) / (opened - closed), 0.0), 1.0)
        if config.mode != "binary":
            return share
        band = config.hysteresis if self._open is not None else 0.0
        if share > config.threshold + band:
            self._open = True
        elif share <= config.threshold - band:
            self._open = False
        return 1.0 if self._open else 0.0

    def position(self, opening: float) -> float:
        """Return the finger joint position in metres or radians for an opening in [0, 1]."""
        config = self.config
        return config.closed_position + opening * (config.open_position - config.closed_position)

    def command(self, value: float, measured: float | None, dt: float) -> tuple[float, bool]:
        """Return the finger position to send now, and True if ``max_speed`` shortened the step.

        The step is relative to the last *sent* position, not the measured one: fingers that grip something never
        reach their target, and the difference is what presses them together. The first step starts at ``measured``,
        if known. Assign the position to :attr:`target` once it was sent.
        """
        wanted = self.position(self.opening(value))
        before = self.target if self.target is not None else measured
        if self.config.max_speed <= 0 or before is None:
            return wanted, False
        reach = self.config.max_speed * dt
        return min(max(wanted, before - reach), before + reach), abs(wanted - before) > reach * (1 + 1e-9)
