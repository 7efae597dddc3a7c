"""What the gripper's number of an action means.

Datasets have different conventions: 1 is open and 0 closed for OpenVLA's Bridge checkpoints, -1 is open and 1
closed in LIBERO's environment, and some are continuous. Two options, the values for open and closed, describe each
convention.
"""

import math

from vla_ros.config import GripperConfig
from vla_ros.contract.components import Component


def gripper_ends(part: Component | None, gripper: GripperConfig) -> tuple[float, float]:
    """Return the values for closed and open of a gripper's part of the action; None is a part without a form."""
    if part is not None and part.form:
        return part.range or (gripper.closed_position, gripper.open_position)  # [m]
    return gripper.closed_value, gripper.open_value


class GripperValues:
    """Interprets the gripper's numbers of successive actions; stores the binary state.

    Args:
        config: The options; to change them, assign to the attribute.
        part: The gripper's part of the action. Its form, ``[CLOSED..OPEN]`` or ``[m]`` for finger positions, takes
            precedence over the options.
    """

    def __init__(self, config: GripperConfig, part: Component | None = None) -> None:
        self.config = config
        self._part = part
        self._open: bool | None = None

    def reset(self) -> None:
        """Forget the binary state."""
        self._open = None

    def opening(self, value: float) -> float:
        """Return the opening in [0, 1] for a gripper value, clipped to [closed, open].

        In binary mode the result is 1 above ``threshold + hysteresis``, 0 at or below ``threshold - hysteresis``,
        and unchanged in between; the first value is compared with ``threshold`` only. Without hysteresis,
        ``at_threshold`` decides at exactly the threshold. Raises ValueError if the value is NaN or infinite.
        """
        if not math.isfinite(value):
            raise ValueError(f"gripper value {value} is not finite")
        config, share = self.config, self._share(value)
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

    def convert(self, value: float, ends: tuple[float, float]) -> float:
        """Return a value in the convention of other ``ends`` (closed, open); equal ends change nothing.

        A binary value of exactly ``threshold`` that keeps the state becomes the middle, which moves no simulated
        gripper: as ``sign`` does in the published evaluations.
        """
        config = self.config
        if gripper_ends(self._part, config) == ends:
            return value
        keeps = config.mode == "binary" and config.at_threshold == "keep" and config.hysteresis == 0
        opening = self.opening(value)
        if keeps and self._share(value) == config.threshold:
            opening = 0.5
        return ends[0] + opening * (ends[1] - ends[0])

    def _share(self, value: float) -> float:
        closed, opened = gripper_ends(self._part, self.config)
        return min(max((value - closed) / (opened - closed), 0.0), 1.0)
