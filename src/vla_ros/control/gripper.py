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

    ``part`` says which numbers mean closed and open (``[CLOSED..OPEN]``), or that they are finger positions
    (``[m]``); without a form the options do.
    """

    def __init__(self, config: GripperConfig, part: Part | None = None) -> None:
        self._part = part
        self.configure(config)
        self.reset()

    def configure(self, config: GripperConfig) -> None:
        """Apply new options and keep the state."""
        self._config = config
        self._closed, self._open_value = config.closed_value, config.open_value
        if self._part is not None and self._part.form:
            ends = self._part.range or (config.closed_position, config.open_position)  # [m]
            self._closed, self._open_value = ends

    @property
    def is_used(self) -> bool:
        """False in mode none: no finger is commanded."""
        return self._config.mode != "none"

    @property
    def target(self) -> float | None:
        """Finger position that was last sent, or None before the first one."""
        return self._target

    def reset(self) -> None:
        """Forget the binary state and the last position sent."""
        self._open: bool | None = None
        self._target: float | None = None

    def opening(self, value: float) -> float:
        """Return the opening in [0, 1] for the action's gripper number; 1 is open.

        NaN and infinity raise ValueError. Numbers outside the range from closed to open are clipped. In binary mode
        the result is 0 or 1: open above ``threshold + hysteresis``, closed at or below ``threshold - hysteresis``,
        unchanged in between (the first time, the threshold alone decides).
        """
        if not math.isfinite(value):
            raise ValueError(f"gripper value {value} is not finite")
        config = self._config
        share = (value - self._closed) / (self._open_value - self._closed)
        share = min(max(share, 0.0), 1.0)
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
        config = self._config
        return config.closed_position + opening * (config.open_position - config.closed_position)

    def command(self, value: float, measured: float | None, dt: float) -> tuple[float, bool]:
        """Return the finger position to send now, and True if ``max_speed`` shortened the step.

        The step is relative to the last *sent* position, not the measured one: fingers that grip something never
        reach their target, and the difference is what presses them together. The first step starts at ``measured``,
        if known. :meth:`sent` records the position as sent.
        """
        wanted = self.position(self.opening(value))
        before = self._target if self._target is not None else measured
        if self._config.max_speed <= 0 or before is None:
            return wanted, False
        reach = self._config.max_speed * dt
        return min(max(wanted, before - reach), before + reach), abs(wanted - before) > reach * (1 + 1e-9)

    def sent(self, position: float) -> None:
        """Record that the fingers were commanded to ``position``."""
        self._target = position
