"""The robots of openpi's checkpoints and the conversions of their data.

Openpi's checkpoints do not state their robot; it follows from the name of the training configuration. LeRobot's
checkpoints state everything and do not use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.policies.pi.architecture import PI0, PI05
from vla_ros.policies.pi.normalization import Array

BASE, LEFT_WRIST, RIGHT_WRIST = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"

_NO_DELTA: Mapping[str, tuple[bool, ...]] = MappingProxyType({})
_ARM = (True,) * 6 + (False,)


@dataclass(frozen=True)
class Robot:
    """A robot as configured in openpi's training."""

    name: str  # as in presets
    asset: str  # folder below ``assets`` with its statistics
    images: tuple[str, ...]  # keys in the model's order
    state: int  # numbers in the state
    actions: int  # numbers in one action
    optional_images: tuple[str, ...] = ()  # keys of images that may be missing
    # For each model, True for action dimensions relative to the state. A model without an entry has none.
    delta: Mapping[str, tuple[bool, ...]] = field(default_factory=lambda: _NO_DELTA)
    adapt: bool = False  # True if joints and grippers are converted to openpi's convention for ALOHA
    prompt_state: bool = True  # False if pi0.5 was trained without the state in its prompt
    # Names of the images in openpi's server.
    image_keys: tuple[str, ...] = ("observation/image", "observation/wrist_image")
    # Names of the state's parts in openpi's server, with their sizes.
    state_keys: tuple[tuple[str, int], ...] = (("observation/state", 8),)


_DROID = Robot(
    "droid",
    "droid",
    (BASE, LEFT_WRIST),
    state=8,
    actions=8,
    image_keys=("observation/exterior_image_1_left", "observation/wrist_image_left"),
    state_keys=(("observation/joint_position", 7), ("observation/gripper_position", 1)),
)
_ALOHA = Robot(
    "aloha",
    "trossen",
    (BASE, LEFT_WRIST, RIGHT_WRIST),
    state=14,
    actions=14,
    optional_images=(LEFT_WRIST, RIGHT_WRIST),
    delta=dict.fromkeys((PI0, PI05), _ARM * 2),
    adapt=True,
    image_keys=("images.cam_high", "images.cam_left_wrist", "images.cam_right_wrist"),
    state_keys=(("state", 14),),
)

ROBOTS: Mapping[str, Robot] = {
    robot.name: robot
    for robot in (
        Robot(
            "libero",
            "physical-intelligence/libero",
            (BASE, LEFT_WRIST),
            state=8,
            actions=7,
            delta={PI0: _ARM},
            prompt_state=False,
        ),
        _DROID,  # joint velocities are not relative to the state
        replace(_DROID, name="droid_joint_position", delta=dict.fromkeys((PI0, PI05), (True,) * 7 + (False,))),
        _ALOHA,
        replace(_ALOHA, name="aloha_sim", asset="lerobot/aloha_sim_transfer_cube_human", delta=_NO_DELTA),
    )
}


def find_robot(name: str) -> Robot:
    if name not in ROBOTS:
        raise ConfigError(f"policy.robot: found {name!r}, expected one of {sorted(ROBOTS)}")
    return ROBOTS[name]


def add_state(actions: Array, state: Array, mask: tuple[bool, ...]) -> Array:
    """Add ``state`` to actions [..., D], in the dimensions where ``mask`` is True."""
    result = np.array(actions)
    chosen = np.flatnonzero(mask)
    result[..., chosen] += state[chosen]
    return result


def subtract_state(actions: Array, state: Array, mask: tuple[bool, ...]) -> Array:
    return add_state(actions, -state, mask)


# ALOHA has two arms with six joints and a gripper each. In openpi's convention, some joints turn the other way, and
# a gripper is an angle, where ALOHA's runtime has a fraction of the finger's travel.
_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, dtype=np.float64)
_GRIPPERS = [6, 13]
_FINGER_CLOSED, _FINGER_OPEN = 0.01844, 0.05800  # metres
_ARM_LENGTH, _HORN_RADIUS = 0.036, 0.022  # metres
_ANGLE_CLOSED, _ANGLE_OPEN = 0.5476, 1.6296  # radians, 0 and 1 for the model
_JOINT_CLOSED, _JOINT_OPEN = -0.6213, 1.4910  # radians, the gripper joint's range in ALOHA's runtime


def aloha_state(state: Array) -> Array:
    """Convert ALOHA's state [..., 14] to openpi's convention."""
    result = state * _SIGNS
    finger = result[..., _GRIPPERS] * (_FINGER_OPEN - _FINGER_CLOSED) + _FINGER_CLOSED
    sine = (_HORN_RADIUS**2 + finger**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * finger)
    angle = np.arcsin(np.clip(sine, -1.0, 1.0))
    result[..., _GRIPPERS] = (angle - _ANGLE_CLOSED) / (_ANGLE_OPEN - _ANGLE_CLOSED)
    return result


def aloha_actions(actions: Array) -> Array:
    """Convert actions [..., 14] from openpi's convention to that of ALOHA's runtime.

    This is not the inverse of :func:`aloha_state`: in actions the gripper is a joint command, in the state a
    measured width.
    """
    result = actions * _SIGNS
    angle = result[..., _GRIPPERS] + _ANGLE_CLOSED
    result[..., _GRIPPERS] = (angle - _JOINT_CLOSED) / (_JOINT_OPEN - _JOINT_CLOSED)
    return result


def aloha_targets(actions: Array) -> Array:
    result = actions * _SIGNS
    result[..., _GRIPPERS] = actions[..., _GRIPPERS] * (_JOINT_OPEN - _JOINT_CLOSED) + _JOINT_CLOSED - _ANGLE_CLOSED
    return result
