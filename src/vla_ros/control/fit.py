"""Whether policy, options and arm belong together; asked once, before anything moves."""

from __future__ import annotations

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.kinematics.solver import Kinematics


def check_fit(config: Config, spec: PolicySpec, kinematics: Kinematics | None) -> None:
    """Refuse a policy, options and an arm that do not belong together.

    Raises:
        ConfigError: Naming the option, what was found, and what the policy or the arm expects.
    """
    arm_names = kinematics.joint_names if kinematics else config.robot.joint_names
    is_twist = config.control.output == "twist_stamped"
    if spec.motion not in ("tip_delta", "joint_position", "joint_delta"):
        found = " + ".join(map(str, spec.action)) or "no action (features.action)"
        raise ConfigError(f"found {found}, expected a tip_delta, joint_position or joint_delta of one arm")
    if spec.motion == "tip_delta":
        spec.columns()
        if kinematics is None and not is_twist:
            raise ConfigError(
                "robot.urdf: found no value, and the policy gives end-effector deltas; name the arm's URDF, or "
                "set control.output to twist_stamped"
            )
    else:
        motion = sum(at.stop - at.start for part, at in spec.columns() if part.quantity == spec.motion)
        if motion != len(arm_names):
            raise ConfigError(
                f"robot.joint_names: found {len(arm_names)} joints {list(arm_names)}, and the policy "
                f"gives {motion} numbers besides the gripper"
            )
    if kinematics is None:
        if config.limits.workspace_low:
            raise ConfigError("robot.urdf: found no value, and limits.workspace_low needs it")
        if is_twist and spec.motion != "tip_delta":
            raise ConfigError("robot.urdf: found no value, and a twist from joint positions needs it")
    if config.robot.home and len(config.robot.home) != len(arm_names):
        raise ConfigError(
            f"robot.home: found {len(config.robot.home)} numbers, expected one for each of {list(arm_names)}"
        )


def unused_gripper(config: Config, spec: PolicySpec) -> str:
    """A warning where the policy opens and closes a gripper that nobody will hear of; "" where all is well."""
    if spec.gripper is None or config.gripper.mode == "none" or config.robot.gripper_joint_names:
        return ""
    return (
        "the gripper will not move: robot.gripper_joint_names is empty, so the policy's gripper number is only on "
        f"{config.topics.action}; name the finger joints, or say that this is meant: gripper.mode: none"
    )
