"""What a person can do about each reason why the arm does not move, for the page."""

from collections.abc import Mapping

from vla_ros.control.reasons import LIMITS, Level, Reason

_LIMIT = "The policy asked for more than the limits allow: look at what it does before you reset and arm."
_CAMERA = "Look at the camera's driver, its cable, and its rate with `ros2 topic hz`."
_JOINTS = "Look at the arm's driver, and at who publishes the joint states."

REMEDIES: Mapping[Reason, str] = {
    Reason.NO_INSTRUCTION: "Type an instruction.",
    Reason.INPUT_MISSING: "Start what publishes the input that is named, or correct its topic in the options.",
    Reason.CAMERA_STALE: _CAMERA,
    Reason.CAMERA_FROZEN: f"The image does not change: uncover or restart the camera. {_CAMERA}",
    Reason.CAMERA_CONTESTED: "End one of the two publishers of the camera's topic.",
    Reason.CAMERA_SKEW: "The cameras are out of step: compare their rates and clocks.",
    Reason.CAMERA_INFO_INVALID: "Set camera.info to the CameraInfo of this depth image, and look at its driver.",
    Reason.TRANSFORM_MISSING: "Start what publishes the transform that is named, and compare the clocks.",
    Reason.TRANSFORM_JUMPED: "Find out who moved the camera or calibrated it anew; when it is right, reset.",
    Reason.FRAME_OLD: "Frames arrive late, or the clocks differ: compare the camera's clock with this host's.",
    Reason.FRAME_FROM_FUTURE: "The camera's clock is ahead of this host's: synchronise the clocks.",
    Reason.JOINT_STATE_STALE: _JOINTS,
    Reason.JOINT_STATE_INVALID: f"{_JOINTS} If the arm is elsewhere for good, disarm.",
    Reason.JOINT_STATE_CONTESTED: "End one of the two publishers of the joint states.",
    Reason.INFERENCE_LATE: "The machine is slow or busy: end other programs on it, or raise timeouts.inference.",
    Reason.INFERENCE_ERROR: "The policy failed: its error is in the node's log.",
    Reason.SERVER_LOST: "Start the policy's server, or repair the way to it; the node reconnects by itself.",
    Reason.ACTION_INVALID: "The policy's actions make no sense: check checkpoint, statistics and images.",
    Reason.CLOCK_JUMP: "It ends with new inputs. Find out what set the clock.",
    Reason.SUSPENDED: "It ends by itself. Find out what kept the process from running.",
    Reason.DRIVER_MISSING: "Start the arm's driver, or correct topics.command.",
    Reason.NAME_CONTESTED: "End or rename the other node of this name.",
    Reason.FOLLOWING_ERROR: "Free the arm if it is blocked. It ends once the arm has been held for a second.",
    Reason.COLLISION_SELF: "Disarm and lead the arm away, or give an instruction that leads away.",
    Reason.COLLISION_SCENE: "Remove the obstacle, or disarm and lead the arm away.",
    Reason.SCENE_STALE: "Start what publishes the scene.",
    Reason.SCENE_CONTESTED: "End one of the two publishers of the scene.",
    Reason.HEARTBEAT_MISSING: "Start what publishes ~/heartbeat.",
    Reason.DRIVER_WRITE: "It ends once a hold was written. If it comes back, look at the driver.",
    Reason.OPTIONS_REFUSED: "Correct the options that were changed; the old ones are in force.",
    Reason.PERSON_RELEASED: "Press the dead-man button to move the arm.",
    Reason.PERSON_STALE: "Nothing comes from the leader arm or the pad: look at its driver and cable.",
    Reason.PERSON_FROZEN: "The input repeats itself: restart its driver.",
    Reason.PERSON_STUCK: "Let go of the dead-man button, and press it again.",
    Reason.PERSON_INVALID: "The input's numbers are not usable: look at its driver.",
    Reason.PERSON_CONTESTED: "End one of the two publishers of the input.",
    Reason.PERSON_FAR: "Bring the leader arm to where the arm is.",
    Reason.OPERATOR_STOP: "Make sure that nobody is within reach, then reset and arm.",
    Reason.HEARTBEAT_LOST: "Start what publishes ~/heartbeat, then reset and arm.",
    Reason.DRIVER_GONE: "Start the arm's driver, then reset and arm.",
    Reason.DRIVER_UNREACHABLE: "Look at the driver and the middleware, then reset and arm.",
    Reason.GUARD_LOST: "Restart the node: without its guard, no command reaches the arm.",
    Reason.GUARD_REJECTED: "A fault in the node: keep its log and report it, before you reset and arm.",
    Reason.COMMAND_CONTESTED: "Decide who drives the arm, and end the other node; then reset and arm.",
    Reason.MIDDLEWARE_GONE: "Restart RouDi, the node, and the process of the stop button.",
    Reason.THREAD_DIED: "Restart the node; its log has the error.",
    Reason.DEVICE_ERROR: "Restart the node: every later call to the GPU fails.",
    **dict.fromkeys(LIMITS, _LIMIT),
}
"""For every reason that holds or stops the arm; those that are only counted need no advice."""
_NAMED = {reason.value: reason for reason in Reason}


def describe_reason(name: str, detail: str) -> dict[str, str]:
    """Return a reason's name, description, detail and advice; a reason of a newer node has only its detail."""
    reason = _NAMED.get(name)
    if reason is None:
        return {"name": name, "level": "", "what": name, "detail": detail, "advice": ""}
    level = "stop" if reason.level is Level.STOP else "hold"
    advice = REMEDIES.get(reason, "")
    return {"name": name, "level": level, "what": reason.description, "detail": detail, "advice": advice}
