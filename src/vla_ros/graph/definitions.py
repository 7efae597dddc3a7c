"""Definitions of messages, services and actions that rosbags does not include.

Sources: std_srvs, action_msgs, control_msgs 5.8, franka_msgs 2.0, interbotix_xs_msgs 0.0, moveit_msgs 2.6,
rosetta_interfaces 0.1.
"""

from __future__ import annotations

from typing import Any

from rosbags.typesys import get_types_from_msg

MESSAGES = {
    "control_msgs/msg/GripperCommand": "float64 position\nfloat64 max_effort",
    "franka_msgs/msg/GraspEpsilon": "float64 inner\nfloat64 outer",
    "interbotix_xs_msgs/msg/JointGroupCommand": "string name\nfloat32[] cmd",
    "interbotix_xs_msgs/msg/JointSingleCommand": "string name\nfloat32 cmd",
}

SERVICES = {
    "std_srvs/srv/SetBool": ("bool data", "bool success\nstring message"),
    "std_srvs/srv/Trigger": ("", "bool success\nstring message"),
    "std_srvs/srv/Empty": ("", ""),
    "moveit_msgs/srv/ServoCommandType": ("int8 command_type", "bool success"),
    "action_msgs/srv/CancelGoal": (
        "action_msgs/GoalInfo goal_info",
        "int8 return_code\naction_msgs/GoalInfo[] goals_canceling",
    ),
}
"""Request and response of each service."""

ACTIONS = {
    "control_msgs/action/GripperCommand": (
        "control_msgs/GripperCommand command",
        "float64 position\nfloat64 effort\nbool stalled\nbool reached_goal",
    ),
    "control_msgs/action/ParallelGripperCommand": (
        "sensor_msgs/JointState command",
        "sensor_msgs/JointState state\nbool stalled\nbool reached_goal",
    ),
    "franka_msgs/action/Move": ("float64 width\nfloat64 speed", "bool success\nstring error"),
    "franka_msgs/action/Grasp": (
        "float64 width\nfranka_msgs/GraspEpsilon epsilon\nfloat64 speed\nfloat64 force",
        "bool success\nstring error",
    ),
    "rosetta_interfaces/action/RunPolicy": (
        "string prompt",
        "bool success\nstring message",
        "uint32 published_actions\nuint32 queue_depth\nstring status",
    ),
}
"""Goal, result and, if the node serves the action, feedback."""

_ID = "unique_identifier_msgs/UUID goal_id\n"
# rosidl adds this member to an empty structure, and it is on the wire.
_EMPTY = "uint8 structure_needs_at_least_one_member"


def fields() -> dict[str, Any]:
    """Return every type by name in rosbags' format, including the types that rosidl derives for an action."""
    texts = dict(MESSAGES)
    for name, (request, response) in SERVICES.items():
        texts |= {f"{name}_Request": request, f"{name}_Response": response}
    for name, (goal, result, *feedback) in ACTIONS.items():
        texts |= {
            f"{name}_Goal": goal,
            f"{name}_Result": result,
            f"{name}_SendGoal_Request": f"{_ID}{name}_Goal goal",
            f"{name}_SendGoal_Response": "bool accepted\nbuiltin_interfaces/Time stamp",
            f"{name}_GetResult_Request": _ID,
            f"{name}_GetResult_Response": f"int8 status\n{name}_Result result",
        }
        if feedback:
            texts |= {
                f"{name}_Feedback": feedback[0],
                f"{name}_FeedbackMessage": f"{_ID}{name}_Feedback feedback",
            }
    # rosbags renames every type to a message, so only the value is used.
    return {name: next(iter(get_types_from_msg(text or _EMPTY, name).values())) for name, text in texts.items()}
