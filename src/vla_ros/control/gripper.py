"""Converts the gripper value of an action to a finger position.

Datasets have different conventions: 1 is open and 0 closed for OpenVLA's Bridge checkpoints, -1 is open and 1
closed in LIBERO's environment, and some are continuous. Two options, the values for open and closed, describe each
convention.
"""

import math

from vla_ros.config import GripperConfig
from vla_ros.contract.benchmark import gripper_ends
from vla_ros.contract.components import Component


class Gripper:
    """Interprets gripper values; stores the binary state and the last finger position sent.

    Args:
        config: The options; to change them, assign to the attribute.
        part: The gripper's part of the action. Its form, ``[CLOSED..OPEN]`` or ``[m]`` for finger positions, takes
            precedence over the options.

    Attributes:
        target: Last finger position sent, or None.
    """

    def __init__(self, config: GripperConfig, part: Component | None = None) -> None:
        self.config = config
        self._part = part
        self.reset()

    def reset(self) -> None:
        """Forget the binary state and the last position sent."""
        self._open: bool | None = None
        self.target: float | None = None

    def opening(self, value: float) -> float:
        """Return the opening in [0, 1] for a gripper value, clipped to [closed, open].

        In binary mode the result is 1 above ``threshold + hysteresis``, 0 at or below ``threshold - hysteresis``,
        and unchanged in between; the first value is compared with ``threshold`` only. Without hysteresis,
        ``at_threshold`` decides at exactly the threshold. Raises ValueError if the value is NaN or infinite.
        """
        if not math.isfinite(value):
            raise ValueError(f"gripper value {value} is not finite")
        config, (closed, opened) = self.config, gripper_ends(self._part, self.config)
        share = min(max((value - closed) / (opened - closed), 0.0), 1.0)
        if config.mode != "binary":
            return share
        band = config.hysteresis if self._open is not None else 0.0
        if share == config.threshold and band == 0:
            if config.at_threshold != "keep":
                self._open = config.at_threshold == "open"
        elif share > config.threshold + band:
            self._open = True
        elif share <= config.threshold - band:
            self._open = False
        return 0.0 if self._open is False else 1.0

    def position(self, opening: float) -> float:
        """Return the finger joint position in metres or radians for an opening in [0, 1]."""
        config = self.config
        return config.closed_position + opening * (config.open_position - config.closed_position)

    def command(self, value: float, measured: float | None, dt: float) -> tuple[float, bool]:
        """Return the finger position to send, and True if ``max_speed`` shortened the step.

        The step starts at the last *sent* position (the first step at ``measured``, if known), because fingers that
        grip an object never reach their target; the difference makes them press. Assign the position to
        :attr:`target` once it has been sent.
        """
        wanted = self.position(self.opening(value))
        before = self.target if self.target is not None else measured
        if self.config.max_speed <= 0 or before is None:
            return wanted, False
        reach = self.config.max_speed * dt
        return min(max(wanted, before - reach), before + reach), abs(wanted - before) > reach * (1 + 1e-9)
