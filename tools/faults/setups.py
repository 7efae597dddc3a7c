"""Node options for rows of the fault table, with the other row settings that they require."""

from collections.abc import Mapping
from typing import Any

from tools.faults.depth_camera import IMAGE, INFO
from tools.faults.hand import NAME
from tools.faults.person import JOY, LEADER
from tools.faults.surroundings import BROKEN_MESH, SCENE

OPTIONS: Mapping[str, str] = {
    "node.backend": "dds",
    "robot.urdf": "demo",
    "robot.tip_frame": "tool",
    "robot.gripper_joint_names": "[finger_left, finger_right]",
    "policy.instruction": "wave",
    "camera.width": "64",
    "camera.height": "48",
    "control.rate_hz": "0.0",
    "control.max_overshoot": "100000000.0",  # so that steps a million times too long reach the limits
    "limits.max_translation_step": "0.03",
    "limits.max_rotation_step": "0.15",
    "limits.max_joint_step": "0.15",
    "limits.joint_margin": "0.02",
    "limits.velocity_scale": "0.8",
    "limits.workspace_low": "[0.25, -0.42, 0.05]",
    "limits.workspace_high": "[0.80, 0.42, 0.60]",
    "timeouts.camera": "0.3",
    "timeouts.joint_state": "0.3",
    "timeouts.joint_state_age": "0.3",
    "timeouts.inference": "0.3",
    "timeouts.frame_age": "0.4",
    "timeouts.driver": "0.3",
    "timeouts.clock_jump": "0.5",
    "timeouts.frozen_frames": "6",
}
"""Options of every row: short timeouts, so that fifty injections take a minute."""

_TOPICS = (("command", "arm/joint_command"), ("joint_states", "joint_states"))
SERVO: Mapping[str, Any] = {
    "options": {"control.output": "twist_stamped", "robot.gripper_joint_names": "[]", "control.rate_hz": "10.0"}
    | {"gripper.mode": "none", "timeouts.inference": "1.5"},
    "robot_words": ("--listens", "twist"),
}
VELOCITY: Mapping[str, Any] = {
    "options": {
        **SERVO["options"],
        "control.output": "joint_velocity_state",
        "features.action": '["arm.joint_velocity[1]"]',
    },
    "robot_words": ("--listens", "velocity"),
}
AHEAD: Mapping[str, Any] = {
    "options": {"control.rate_hz": "20.0", "control.schedule": "blend", "limits.max_joint_acceleration": "12.0"},
    "horizon": 8,
    "seconds": 0.15,
}
LONG: Mapping[str, Any] = {
    "options": {"control.rate_hz": "10.0", "control.schedule": "blend", "timeouts.inference": "1.5"},
    "horizon": 50,
    "seconds": 0.05,
}
FINE: Mapping[str, Any] = {**AHEAD, "options": {**AHEAD["options"], "control.command_rate_hz": "250.0"}}
SINGLE: Mapping[str, Any] = {**FINE, "horizon": 1, "seconds": 0.03}
ARMS: Mapping[str, Any] = {
    "options": {
        "robot.arms": "[left, right]",
        "features.action": "[left.tip_delta, left.gripper, right.joint_position, right.gripper]",
    }
    | {f"{arm}.{leaf}": f"/{arm}/{topic}" for arm in ("left", "right") for leaf, topic in _TOPICS},
    "arms": ("left", "right"),
}
_CHECKED = {"collision.check": "true", "collision.deceleration": "20.0"}
WALLED: Mapping[str, Any] = {
    "options": _CHECKED
    | {"collision.scene": SCENE, "collision.scene_required": "true", "collision.scene_timeout": "0.3"}
    | {"collision.scene_meshes": f"['{BROKEN_MESH}']"},
    "robot_words": ("--scene",),
}
DEPTH: Mapping[str, Any] = {
    "options": {
        "camera.topics": f"[/camera/image_raw, {IMAGE}]",
        "camera.keys": "[image, points]",
        "camera.info": f"['', {INFO}]",
        "robot.base_frame": "base_link",
    },
    "robot_words": ("--depth", "tf"),
}
ON_A_LINK: Mapping[str, Any] = {**DEPTH, "robot_words": ("--depth", "tool")}
_MOUNTS = {"left.mount": "[0.0, 0.2, 0.0, 0.0, 0.0, 0.0]", "right.mount": "[0.0, -0.2, 0.0, 0.0, 0.0, 0.0]"}
MEETING: Mapping[str, Any] = {**ARMS, "options": {**ARMS["options"], **_CHECKED, **_MOUNTS}}
APART: Mapping[str, Any] = {
    "options": {"topics.gripper": "/gripper/command", "gripper.output": "joint_state"},
    "robot_words": ("--listens", "apart"),
}
_LEADS = {
    "takeover.input": "leader",
    "takeover.leader": LEADER,
    "takeover.stale_after": "0.2",
    "takeover.frozen_after": "0.5",
}
LEADS: Mapping[str, Any] = {"person": "leader", "options": _LEADS}
PAD: Mapping[str, Any] = {
    "person": "joy",
    "options": {
        "takeover.input": "joy",
        "takeover.joy": JOY,
        "takeover.buttons": '["deadman = 0"]',
        "takeover.axes": '["x = 0", "y = 1", "yaw = 2"]',
        "takeover.longest_press": "0.8",
        "takeover.stale_after": "0.2",
    },
}
ACTION: Mapping[str, Any] = {
    "options": {"topics.gripper": NAME, "gripper.output": "gripper_command", "timeouts.gripper": "0.3"},
    "robot_words": ("--listens", "action"),
}
