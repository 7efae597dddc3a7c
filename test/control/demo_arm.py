"""The demo's arm, its options, joint states and controllers, for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_ros.config import Config, build
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.arm import ArmController
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import JointState

ARM = Kinematics.from_urdf("demo")
HOME = np.array([0.0, 0.5, 0.0, 1.2, 0.0, 0.8, 0.0])
FINGERS = ("finger_left", "finger_right")
POSE = PolicySpec().columns()
STAMP, DT = 123_456_789, 0.1


def configure(**sections: dict[str, Any]) -> Config:
    """Options of the demo's arm with changes by section: ``configure(limits={"max_joint_step": 0.1})``."""
    values = {"robot.urdf": "demo", "robot.gripper_joint_names": list(FINGERS), "control.delta_from": "measured"}
    for section, values_of in sections.items():
        values.update({f"{section}.{name}": value for name, value in values_of.items()})
    return build(values)


def control(columns: Sequence[tuple[Component, slice]] = POSE, **sections: dict[str, Any]) -> ArmController:
    """A controller of the demo's arm."""
    return ArmController(configure(**sections), columns, ARM)


def several(config: Config, outputs: list[str]) -> Config:
    """Copies of the arm of a config, called ``arm_0``, ``arm_1``, ..., with topics of their own."""
    values: dict[str, Any] = {"robot.arms": [f"arm_{number}" for number in range(len(outputs))]}
    for number, output in enumerate(outputs):
        own = {"output": output} | {
            topic: f"/arm_{number}/{topic}" for topic in ("command", "gripper", "joint_states")
        }
        values.update({f"arm_{number}.{leaf}": value for leaf, value in own.items()})
    return build(values, base=config)


def state(positions: Any = HOME, fingers: float = 0.04, stamp: int = 1_000) -> JointState:
    """A joint state of the demo's arm, by default at home with open fingers."""
    return JointState((*ARM.joint_names, *FINGERS), np.array([*positions, fingers, fingers]), stamp)


def action(*motion: float, gripper: float = 1.0) -> np.ndarray:
    """An action of six numbers, zero where not given, and the gripper's."""
    return np.array([*motion, *[0.0] * (6 - len(motion)), gripper])


def spec_of(text: str, dimension: int) -> PolicySpec:
    """The spec of a policy with these parts of an action."""
    return PolicySpec(action=parse_components(text, action=True), dimension=dimension)
