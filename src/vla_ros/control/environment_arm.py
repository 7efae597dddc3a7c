"""Passes actions on to an environment in its own units: no kinematics, no scaling and back.

A benchmark such as LIBERO takes the numbers that its policies return, like goals of a simulated controller. They
change only where ``control.clip`` applies, which is counted, and where the values of a closed and an open
gripper (``gripper.closed_value``, ``gripper.open_value``) are not the environment's (``gripper.closed_position``,
``gripper.open_position``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.components import UNUSED, Component
from vla_ros.control.command import Command
from vla_ros.control.gripper import Gripper
from vla_ros.control.motion import clip
from vla_ros.errors import ConfigError
from vla_ros.types import FloatArray, JointState

_RELATIVE = ("tip_delta", "joint_delta", "joint_velocity")


class EnvironmentArm:
    """Makes the commands for one arm of an environment, with the methods of ``ArmController``.

    Used from one thread. It needs no joint states, and sends nothing between two actions.

    Args:
        config: All options.
        columns: The parts of an action with their columns, of all arms.
        name: Name of the arm in ``config.arms``.

    Attributes:
        counters: How often ``control.clip`` changed an action (``action_clipped``).
    """

    joint_names: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    joint_speeds: Mapping[str, float] = {}
    unused_gripper, is_moving = "", False

    def __init__(self, config: Config, columns: Sequence[tuple[Component, slice]], name: str = "arm") -> None:
        self.name, self.counters = name, Counter[str]()
        self._size = max(place.stop for _, place in columns)
        self._columns = [(part, place) for part, place in columns if part.arm == name or part.quantity == UNUSED]
        grippers = [(part, place.start) for part, place in self._columns if part.quantity == "gripper"]
        self._column = grippers[0][1] if grippers else None
        self._gripper = Gripper(config.gripper, grippers[0][0] if grippers else None)
        self.configure(config)
        if grippers and (self._gripper.config.mode == "none" or self._gripper.config.max_speed):
            raise ConfigError("gripper.mode none and gripper.max_speed: an environment takes every gripper number")
        self.reset()

    def configure(self, config: Config) -> None:
        """Apply changed options, and keep the last action."""
        arm = next(each for each in config.arms if each.name == self.name)
        self._control, self._gripper.config = config.control, arm.gripper

    @property
    def binary(self) -> tuple[int, ...]:
        """The gripper's column in an action if the gripper is binary (``gripper.mode``), otherwise ()."""
        return () if self._column is None or self._gripper.config.mode != "binary" else (self._column,)

    def reset(self) -> None:
        """Forget previous actions, but keep the counters."""
        self._gripper.reset()
        self._last: FloatArray | None = None
        self._made: FloatArray | None = None

    def restart(self) -> None:
        """Do nothing: relative motions are the environment's."""

    def assume(self, joints: JointState | None) -> None:
        """Do nothing: no joint state is needed."""

    def check_joints(self, joints: JointState) -> None:
        """Accept any joint state: none is needed."""

    def command(
        self,
        action: FloatArray,
        joints: JointState | None,
        stamp: int,
        dt: float,
        reference: JointState | None = None,
    ) -> Command:
        """Return the command with this arm's numbers of ``action`` [D]; for the arguments see ``ArmController``."""
        made = np.full(self._size, np.nan)
        for part, place in self._columns:
            made[place] = (self._converted if part.quantity == "gripper" else self._within)(part, action[place])
        self._made = made
        return Command(self.names, np.zeros(0), stamp, self.name, duration=dt, action=made)

    def _within(self, part: Component, numbers: FloatArray) -> FloatArray:
        clipped = numbers
        if part.quantity == "tip_delta":
            clipped = np.concatenate([clip(numbers[:3], self._control, 0), clip(numbers[3:], self._control, 1)])
        elif part.quantity == "joint_velocity" and part.form == "1":
            clipped = clip(numbers, self._control, shares=True)
        if not np.array_equal(clipped, numbers):
            self.counters["action_clipped"] += 1
        return clipped

    def _converted(self, part: Component, numbers: FloatArray) -> FloatArray:
        """Return the gripper's number [1]: unchanged if the policy's two ends are the environment's."""
        config = self._gripper.config
        return np.array([self._gripper.convert(float(numbers[0]), (config.closed_position, config.open_position))])

    def interpolate(self, joints: JointState | None, dt: float, remaining: float, elapsed: float) -> Command | None:
        """Return None: an environment executes an action for a whole step."""
        return None

    def sent(self) -> None:
        """Record that the last command was sent."""
        if self._made is not None:
            self._last, self._made = self._made, None

    def hold(self, joints: JointState | None) -> Command:
        """Return a command that keeps the arm where it is: zeros for relative motions, and the last gripper.

        Before the first action the gripper is open, and an absolute motion NaN: nothing known keeps the arm.
        """
        held = np.full(self._size, np.nan)
        for part, place in self._columns:
            if part.quantity in (*_RELATIVE, UNUSED):
                held[place] = 0.0
            elif self._last is not None:
                held[place] = self._last[place]
            elif part.quantity == "gripper":
                held[place] = self._gripper.config.open_position
        self._made = None
        return Command(self.names, np.zeros(0), joints.stamp if joints else 0, self.name, hold=True, action=held)
