"""Plays a recorded bag into the live node, to see what the policy would have done.

    ros2 launch vla_ros replay.launch.py bag:=my_bag config:=my_robot.yaml checkpoint:=/models/openvla-7b

Only the bag's camera, joint state and instruction topics and its clock are played, so that no recorded command
reaches a robot. The node is never armed; its actions are recorded, and a report of `vla-ros replay` is written
to the same folder. The command `vla-ros replay` itself needs no ROS and is faster.
"""

from launch.actions import OpaqueFunction

from launch import LaunchContext, LaunchDescription
from vla_ros.launching.arguments import MIDDLEWARE, POLICY, Argument, declare_arguments
from vla_ros_lab.launches import replay

REPLAY = (
    Argument("bag", "", "Bag to play: a folder, .mcap or .db3"),
    Argument("rate", "1.0", "Playback rate; reduce it if the policy is slower than the camera"),
    Argument("output", "replay", "Folder for the recorded actions, report.html and result.json; must not exist"),
)


def _replay(context: LaunchContext) -> list:
    return replay(context)


def generate_launch_description() -> LaunchDescription:
    """Start node, player and recorder, then the report."""
    shown = [argument for argument in POLICY if argument.name not in ("armed", "autostart", "use_sim_time")]
    return LaunchDescription([*declare_arguments(REPLAY, shown, MIDDLEWARE), OpaqueFunction(function=_replay)])
