"""Every reason why the arm does not move: a stable name, and its effect on the arm.

The values are what ``/diagnostics``, reports and counters show; they do not change between releases.
``docs/safety.md`` has the table with triggers, timeouts and tests.
"""

from __future__ import annotations

from enum import Enum

from vla_ros.errors import DeviceLostError, ServerLostError, VlaRosError


class Level(str, Enum):
    """The reaction to a reason.

    ``DROP``: the message is not used and counted; nothing else happens. ``HOLD``: the arm keeps its last
    measured position until the reason has ended. ``STOP``: the same, until a person resets.
    """

    DROP = "drop"
    HOLD = "hold"
    STOP = "stop"


class Reason(str, Enum):
    """A named reason with its level and a sentence for people."""

    level: Level
    description: str

    def __new__(cls, value: str, level: Level, description: str) -> Reason:
        """Return a text with two attributes."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.level = level
        member.description = description
        return member

    IMAGE_INVALID = "image_invalid", Level.DROP, "a camera message cannot be decoded"
    TASK_CHANGED = (
        "task_changed",
        Level.DROP,
        "during the inference the instruction changed, a person armed, or motion was interrupted",
    )
    TWIST_EXPIRED = (
        "twist_expired",
        Level.DROP,
        "no velocity followed the last one for timeouts.twist: zeros were sent",
    )
    GRIPPER_FAILED = "gripper_failed", Level.DROP, "a goal of the gripper's action was rejected or has failed"
    PLAN_EMPTY = (
        "plan_empty",
        Level.DROP,
        "the plan ended before the next chunk came: the arm rests",
    )
    FRAME_REPEATED = "frame_repeated", Level.DROP, "a frame has the stamp of the one before"
    FRAME_OUT_OF_ORDER = "frame_out_of_order", Level.DROP, "a frame is older than the one before"

    NO_INSTRUCTION = "no_instruction", Level.HOLD, "there is no instruction to follow"
    INPUT_MISSING = "input_missing", Level.HOLD, "something that the policy needs is missing, stale or no number"
    CAMERA_STALE = "camera_stale", Level.HOLD, "no new frame for timeouts.camera"
    CAMERA_FROZEN = "camera_frozen", Level.HOLD, "the same pixels timeouts.frozen_frames times in a row"
    CAMERA_CONTESTED = "camera_contested", Level.HOLD, "two sources send frames on one topic in turn"
    CAMERA_SKEW = "camera_skew", Level.HOLD, "the cameras' images are further apart than timeouts.camera_skew"
    FRAME_OLD = "frame_old", Level.HOLD, "a frame is older than timeouts.frame_age"
    FRAME_FROM_FUTURE = "frame_from_future", Level.HOLD, "a frame's stamp is ahead of the ROS clock"
    JOINT_STATE_STALE = "joint_state_stale", Level.HOLD, "no new joint state for timeouts.joint_state"
    JOINT_STATE_INVALID = "joint_state_invalid", Level.HOLD, "a joint state lacks joints or is no number"
    JOINT_STATE_CONTESTED = "joint_state_contested", Level.HOLD, "two sources tell of the same joint in turn"
    INFERENCE_LATE = "inference_late", Level.HOLD, "an answer takes longer than timeouts.inference"
    INFERENCE_ERROR = "inference_error", Level.HOLD, "the policy failed on a frame"
    SERVER_LOST = "server_lost", Level.HOLD, "the policy's server cannot be reached or does not answer"
    ACTION_INVALID = "action_invalid", Level.HOLD, "the policy's answer has a wrong shape or is no number"
    CLOCK_JUMP = "clock_jump", Level.HOLD, "the ROS clock jumped by more than timeouts.clock_jump"
    DRIVER_MISSING = "driver_missing", Level.HOLD, "nobody has subscribed to the command topic yet"
    NAME_CONTESTED = "name_contested", Level.HOLD, "another node has this node's name and would answer for it"
    HEARTBEAT_MISSING = "heartbeat_missing", Level.HOLD, "no heartbeat has come yet"

    OPERATOR_STOP = "operator_stop", Level.STOP, "a person said stop"
    HEARTBEAT_LOST = "heartbeat_lost", Level.STOP, "no heartbeat for timeouts.heartbeat"
    DRIVER_GONE = "driver_gone", Level.STOP, "nobody subscribes to the command topic any more"
    COMMAND_CONTESTED = "command_contested", Level.STOP, "another node publishes commands for the same driver"
    MIDDLEWARE_GONE = "middleware_gone", Level.STOP, "no new process can reach the node any more"
    THREAD_DIED = "thread_died", Level.STOP, "a thread of the node ended with an error"
    DEVICE_ERROR = "device_error", Level.STOP, "the GPU reported an error"
    LIMIT_TRANSLATION = "limit_translation", Level.STOP, "a step beyond limits.max_translation_step"
    LIMIT_ROTATION = "limit_rotation", Level.STOP, "a step beyond limits.max_rotation_step"
    LIMIT_WORKSPACE = "limit_workspace", Level.STOP, "a target outside the workspace box"
    LIMIT_POSITION = "limit_position", Level.STOP, "a target beyond a joint's limits"
    LIMIT_JUMP = "limit_jump", Level.STOP, "a target further than limits.max_joint_step from the measured position"
    LIMIT_VELOCITY = "limit_velocity", Level.STOP, "a target beyond a joint's velocity limit"
    LIMIT_ACCELERATION = "limit_acceleration", Level.STOP, "a target beyond limits.max_joint_acceleration"


LIMITS = frozenset(reason for reason in Reason if reason.value.startswith("limit_"))
"""Limits that stop the arm with ``limits.on_violation: stop``."""


class Refused(VlaRosError):  # noqa: N818 - an outcome, not a mistake
    """A command was not made; nothing of it may be sent.

    Attributes:
        reason: Why; its level says whether the arm holds or stops.
        detail: What was found and what was expected.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def reason_of(error: BaseException) -> Reason:
    """``device_error`` for an error of the GPU itself, ``server_lost`` without a server, else ``inference_error``.

    A CUDA error is sticky: every later call of the process fails as well, so the arm stops and the node must be
    started again. Running out of memory is not (the next frame may fit). PyTorch raises ``RuntimeError`` or
    ``torch.AcceleratorError`` with "CUDA error" in its text, the engine :class:`DeviceLostError`; torch is not
    imported for this.
    """
    if isinstance(error, ServerLostError):
        return Reason.SERVER_LOST
    lost = isinstance(error, DeviceLostError) or "CUDA error" in str(error)
    return Reason.DEVICE_ERROR if lost else Reason.INFERENCE_ERROR
