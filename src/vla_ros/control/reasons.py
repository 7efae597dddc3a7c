"""Every reason why the arm does not move, with a stable name and its effect on the arm.

``/diagnostics``, reports and counters show the names, which do not change between releases.
``docs/safety.md`` has the table with triggers, timeouts and tests.
"""

from enum import Enum

from vla_ros.errors import DeviceLostError, ServerLostError, VlaRosError, printable


class Level(str, Enum):
    """The reaction to a reason.

    ``COUNT``: it is counted, and the arm continues. ``HOLD``: the arm keeps its measured position until the reason
    ends. ``STOP``: the arm keeps it until a person resets.
    """

    COUNT = "count"
    HOLD = "hold"
    STOP = "stop"


class Reason(str, Enum):
    """A named reason with its level and a description."""

    level: Level
    description: str

    def __new__(cls, value: str, level: Level, description: str) -> "Reason":
        """Return a member with a level and a description."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.level = level
        member.description = description
        return member

    IMAGE_INVALID = "image_invalid", Level.COUNT, "a camera message cannot be decoded"
    TASK_CHANGED = (
        "task_changed",
        Level.COUNT,
        "during the inference, the instruction changed, a person armed or took over, or motion was interrupted",
    )
    VELOCITY_EXPIRED = (
        "velocity_expired",
        Level.COUNT,
        "no velocity followed within timeouts.velocity: zeros were sent",
    )
    GRIPPER_FAILED = "gripper_failed", Level.COUNT, "a goal of the gripper's action was rejected or has failed"
    PLAN_EMPTY = "plan_empty", Level.COUNT, "the plan ended before the next chunk arrived: the arm rests"
    FRAME_REPEATED = "frame_repeated", Level.COUNT, "a frame has the same stamp as the previous one"
    FRAME_OUT_OF_ORDER = "frame_out_of_order", Level.COUNT, "a frame is older than the previous one"

    NO_INSTRUCTION = "no_instruction", Level.HOLD, "there is no instruction to follow"
    INPUT_MISSING = "input_missing", Level.HOLD, "an input of the policy is missing, stale or not a number"
    CAMERA_STALE = "camera_stale", Level.HOLD, "no new frame for timeouts.camera"
    CAMERA_FROZEN = "camera_frozen", Level.HOLD, "timeouts.frozen_frames consecutive frames have the same pixels"
    CAMERA_CONTESTED = "camera_contested", Level.HOLD, "two sources alternate on a camera topic"
    CAMERA_SKEW = "camera_skew", Level.HOLD, "the cameras' images are further apart than timeouts.camera_skew"
    CAMERA_INFO_INVALID = "camera_info_invalid", Level.HOLD, "a CameraInfo or points do not fit the images"
    TRANSFORM_MISSING = "transform_missing", Level.HOLD, "no transform of a depth camera at its image's stamp"
    TRANSFORM_JUMPED = "transform_jumped", Level.HOLD, "a static transform of a depth camera has changed"
    FRAME_OLD = "frame_old", Level.HOLD, "a frame is older than timeouts.frame_age"
    FRAME_FROM_FUTURE = "frame_from_future", Level.HOLD, "a frame's stamp is ahead of the ROS clock"
    JOINT_STATE_STALE = "joint_state_stale", Level.HOLD, "no new joint state for timeouts.joint_state"
    JOINT_STATE_INVALID = (
        "joint_state_invalid",
        Level.HOLD,
        "a joint state lacks joints, names a joint twice, or contains values that are not numbers",
    )
    JOINT_STATE_CONTESTED = "joint_state_contested", Level.HOLD, "two sources alternate on a joint"
    INFERENCE_LATE = "inference_late", Level.HOLD, "an inference takes longer than timeouts.inference"
    INFERENCE_ERROR = "inference_error", Level.HOLD, "the policy failed on a frame"
    SERVER_LOST = "server_lost", Level.HOLD, "the policy's server cannot be reached or does not answer"
    ACTION_INVALID = (
        "action_invalid",
        Level.HOLD,
        "the policy's actions have a wrong shape, are not numbers or absurd",
    )
    CLOCK_JUMP = "clock_jump", Level.HOLD, "the ROS clock jumped by more than timeouts.clock_jump"
    SUSPENDED = "suspended", Level.HOLD, "the process did not run, and there is no joint state from after that"
    DRIVER_MISSING = "driver_missing", Level.HOLD, "the command topic has no subscriber yet"
    NAME_CONTESTED = "name_contested", Level.HOLD, "another node has this node's name and serves ~/enable as well"
    FOLLOWING_ERROR = "following_error", Level.HOLD, "the arm is too far from where it was commanded to be"
    COLLISION_SELF = "collision_self", Level.HOLD, "parts of the robot would come too near each other"
    COLLISION_SCENE = "collision_scene", Level.HOLD, "the robot would come too near an obstacle"
    SCENE_STALE = "scene_stale", Level.HOLD, "no new scene for collision.scene_timeout"
    SCENE_CONTESTED = "scene_contested", Level.HOLD, "a second publisher sends a scene as well"
    HEARTBEAT_MISSING = "heartbeat_missing", Level.HOLD, "no heartbeat has arrived yet"
    DRIVER_WRITE = "driver_write", Level.HOLD, "a command could not be written to the driver"
    OPTIONS_REFUSED = "options_refused", Level.HOLD, "changed options could not be applied: the old ones stay"

    PERSON_RELEASED = "person_released", Level.HOLD, "a person corrects, and the dead-man button is not pressed"
    PERSON_STALE = "person_stale", Level.HOLD, "a person corrects, and nothing new came from the input"
    PERSON_FROZEN = "person_frozen", Level.HOLD, "the person's input repeats the same numbers"
    PERSON_STUCK = (
        "person_stuck",
        Level.HOLD,
        "the dead-man button is down for longer than takeover.longest_press",
    )
    PERSON_INVALID = "person_invalid", Level.HOLD, "the person's input lacks numbers, or they are not finite"
    PERSON_CONTESTED = "person_contested", Level.HOLD, "another publisher sends the person's input as well"
    PERSON_FAR = "person_far", Level.HOLD, "the leader arm is not where the arm is"

    OPERATOR_STOP = "operator_stop", Level.STOP, "a person stopped the arm"
    HEARTBEAT_LOST = "heartbeat_lost", Level.STOP, "no heartbeat for timeouts.heartbeat"
    DRIVER_GONE = "driver_gone", Level.STOP, "the command topic has lost its subscriber"
    DRIVER_UNREACHABLE = (
        "driver_unreachable",
        Level.STOP,
        "several commands could not be written to the driver",
    )
    GUARD_LOST = "guard_lost", Level.STOP, "the guard's process has ended, hangs, or cannot be reached"
    GUARD_REJECTED = (
        "guard_rejected",
        Level.STOP,
        "the guard has refused a command, which means a fault in the node",
    )
    COMMAND_CONTESTED = "command_contested", Level.STOP, "another node publishes commands for the same driver"
    MIDDLEWARE_GONE = "middleware_gone", Level.STOP, "new processes can no longer reach the node"
    THREAD_DIED = "thread_died", Level.STOP, "a thread of the node, or a callback, failed with an unexpected error"
    DEVICE_ERROR = "device_error", Level.STOP, "the GPU reported an error"
    LIMIT_TRANSLATION = "limit_translation", Level.STOP, "a step beyond limits.max_translation_step"
    LIMIT_ROTATION = "limit_rotation", Level.STOP, "a step beyond limits.max_rotation_step"
    LIMIT_WORKSPACE = "limit_workspace", Level.STOP, "a target outside the workspace box"
    LIMIT_POSITION = "limit_position", Level.STOP, "a target beyond a joint's limits"
    LIMIT_JUMP = "limit_jump", Level.STOP, "a step of a joint beyond limits.max_joint_step"
    LIMIT_VELOCITY = "limit_velocity", Level.STOP, "a target beyond a joint's velocity limit"
    LIMIT_ACCELERATION = "limit_acceleration", Level.STOP, "a target beyond limits.max_joint_acceleration"


LIMITS = frozenset(reason for reason in Reason if reason.value.startswith("limit_"))
"""Reasons that stop the arm with ``limits.on_violation: stop``."""

OF_PERSON = frozenset(reason for reason in Reason if reason.value.startswith("person_"))
"""Reasons why the input of a person who corrects does not move the arm, which rests meanwhile."""

OF_PATH = frozenset((Reason.COLLISION_SELF, Reason.COLLISION_SCENE, Reason.SCENE_STALE))
"""Reasons that lie in where a command leads to, not in what was measured."""

OF_POLICY = frozenset(
    reason
    for reason in Reason
    if reason.level is Level.HOLD
    and reason.value.startswith(
        (
            *("no_instruction", "input_", "camera_", "transform_", "frame_"),
            *("inference_", "server_", "action_", "options_"),
        )
    )
)
"""Reasons that hold the policy, and nobody else."""


class Refused(VlaRosError):  # noqa: N818 - an outcome, not a mistake
    """No command may be sent.

    Attributes:
        reason: The reason, whose level says whether the arm holds or stops.
        detail: What was found and what was expected.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = printable(detail)


def reason_of(error: BaseException) -> Reason:
    """Return ``device_error``, ``server_lost`` or ``inference_error`` for a policy's exception.

    After a CUDA error, every later CUDA call in the process fails as well, so the arm stops and the node must be
    restarted. Running out of memory is only a reason to hold. CUDA errors are recognised by their text, so that
    torch need not be imported.
    """
    if isinstance(error, ServerLostError):
        return Reason.SERVER_LOST
    lost = isinstance(error, DeviceLostError) or "CUDA error" in str(error)
    return Reason.DEVICE_ERROR if lost else Reason.INFERENCE_ERROR
