"""An arm that reaches every pose, with limits so wide that they change nothing."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.config import Config, build
from vla_ros.contract.spec import PolicySpec
from vla_ros.execution.source import PolicySource
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.pipeline import ActionPipeline, build_pipeline
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, FloatArray, JointState, Observation

WIDE = {
    "limits.max_translation_step": 1.0,
    "limits.max_rotation_step": 3.2,
    "limits.max_joint_step": 3.2,
    "limits.following_error": 6.4,
    "limits.following_error_prismatic": 10.0,
}
GANTRY = (
    ("prismatic", "1 0 0"),
    ("prismatic", "0 1 0"),
    ("prismatic", "0 0 1"),
    ("revolute", "0 1 0"),
    ("revolute", "0 0 1"),
    ("revolute", "1 0 0"),
    ("revolute", "0 1 0"),
    ("revolute", "0 0 1"),
)
"""Three axes of translation, then five of rotation, so that no orientation is singular."""
FINGERS = ("finger", "other_finger")
STAMP = 1_700_000_000_000_000_000


def urdf(folder: Path, joints: Any = GANTRY, velocity: float = 1e3, reach: float = 20.0) -> str:
    """Write a URDF whose joints (type and axis) meet in one point, with two fingers; return its path."""
    links = ["base", *(f"link_{number}" for number in range(1, len(joints))), "hand"]
    parts = [f'<link name="{name}"/>' for name in links]
    limit = f'<limit lower="{-reach}" upper="{reach}" effort="9" velocity="{velocity}"/>'
    for number, ((kind, axis), (parent, child)) in enumerate(zip(joints, pairwise(links), strict=True)):
        parts.append(
            f'<joint name="j{number + 1}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
            f'<axis xyz="{axis}"/>{limit}</joint>'
        )
    parts += [
        f'<link name="{name}_jaw"/><joint name="{name}" type="prismatic"><parent link="hand"/>'
        f'<child link="{name}_jaw"/><axis xyz="0 1 0"/>{limit}</joint>'
        for name in FINGERS
    ]
    path = folder / f"free_{len(joints)}_{velocity:g}.urdf"
    path.write_text(f"<robot name='free'>{''.join(parts)}</robot>")
    return str(path)


def revolute(count: int) -> tuple[tuple[str, str], ...]:
    """Joints that turn about one point."""
    return tuple(("revolute", ("0 0 1", "0 1 0")[number % 2]) for number in range(count))


def options(path: str, preset: str, **more: Any) -> Config:
    """A preset on the arm of a URDF, without limits. LIBERO has two fingers."""
    fingers = FINGERS if preset == "libero" else FINGERS[:1]
    own = {"robot.urdf": path, "robot.tip_frame": "hand", "robot.gripper_joint_names": list(fingers)}
    fixed = {"policy.name": "hold", "policy.instruction": "go", "preset": preset}
    return build({**own, **WIDE, **fixed, **{name.replace("__", "."): value for name, value in more.items()}})


def measured(positions: Any, fingers: float = 0.0, stamp: int = STAMP) -> JointState:
    """A joint state of the arm."""
    names = (*(f"j{number + 1}" for number in range(len(positions))), *FINGERS)
    return JointState(names, np.array([*positions, fingers, fingers], np.float64), stamp)


def gantry_joints(position: FloatArray, rotation: FloatArray) -> FloatArray:
    """Return joints [8] of the gantry at a pose."""
    turns = (
        np.arctan2(-rotation[2, 0], rotation[0, 0]),
        np.arcsin(np.clip(rotation[1, 0], -1, 1)),
        np.arctan2(-rotation[1, 2], rotation[1, 1]),
    )
    return np.array([*position, *turns, 0.0, 0.0])


class Recorded(Policy):
    """Answers with recorded chunks, one after the other."""

    def __init__(self, spec: PolicySpec, chunks: FloatArray) -> None:
        self.spec, self.chunks, self.asked = spec, chunks, list[Observation]()

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self.asked.append(observation)
        return ActionChunk(np.array(self.chunks[len(self.asked) - 1], np.float64), observation.stamp)


def recorded(config: Config, spec: PolicySpec, chunks: FloatArray) -> tuple[PolicySource, ActionPipeline]:
    """A loaded policy with recorded chunks, and the pipeline that executes them."""
    source = PolicySource(Recorded(spec, chunks)).start()
    return source, build_pipeline(config, source.spec)


def kinematics(config: Config) -> Kinematics:
    """The kinematics of the only arm."""
    robot = config.arms[0].robot
    return Kinematics.from_urdf(robot.urdf, robot.joint_names, robot.base_frame, robot.tip_frame)
