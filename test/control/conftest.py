"""What the tests of control share: the arm and the options of the demo's arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vla_ros.config import Config, build
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import JointState

HOME = (0.0, 0.5, 0.0, 1.2, 0.0, 0.8, 0.0)
FINGERS = ("finger_left", "finger_right")


@pytest.fixture(scope="session")
def arm() -> Kinematics:
    """The demo's arm with seven joints."""
    return Kinematics.from_urdf("demo")


@pytest.fixture
def configure() -> Callable[..., Config]:
    """Options of the demo's arm with changes by section: ``configure(limits={"max_joint_step": 0.1})``."""

    def make(**sections: dict[str, Any]) -> Config:
        values = {
            "robot.urdf": "demo",
            "robot.gripper_joint_names": list(FINGERS),
            "control.delta_from": "measured",
        }
        for section, values_of in sections.items():
            values.update({f"{section}.{name}": value for name, value in values_of.items()})
        return build(values)

    return make


@pytest.fixture
def state(arm: Kinematics) -> Callable[..., JointState]:
    """A joint state of the demo's arm: ``state()`` is at home with open fingers."""

    def make(arm_positions: Any = HOME, fingers: float = 0.04, stamp: int = 1_000) -> JointState:
        positions = np.array([*arm_positions, fingers, fingers], dtype=np.float64)
        return JointState((*arm.joint_names, *FINGERS), positions, stamp)

    return make


@pytest.fixture
def several() -> Callable[[Config, list[str]], Config]:
    """Copies of the one arm of a config, called ``arm_0``, ``arm_1``, ..., each with its own output and topics."""

    def make(config: Config, outputs: list[str]) -> Config:
        values: dict[str, Any] = {"robot.arms": [f"arm_{number}" for number in range(len(outputs))]}
        for number, output in enumerate(outputs):
            own = {"output": output} | {
                topic: f"/arm_{number}/{topic}" for topic in ("command", "gripper", "joint_states")
            }
            values.update({f"arm_{number}.{leaf}": value for leaf, value in own.items()})
        return build(values, base=config)

    return make
