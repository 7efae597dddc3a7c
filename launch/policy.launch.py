"""A policy on a robot: camera frames in, joint commands out.

    ros2 launch vla_ros policy.launch.py config:=my_robot.yaml checkpoint:=/models/openvla-7b middleware:=fastdds

The node is managed (`ros2 lifecycle`), loads at once unless autostart:=false, and moves nothing before
`ros2 service call /vla_policy/enable std_srvs/srv/SetBool '{data: true}'` unless armed:=true. console:=true
also serves the operator's page for the browser, from which it can be armed and stopped.
"""

from launch.actions import OpaqueFunction

from launch import LaunchDescription
from vla_ros.launching.arguments import CONSOLE, MIDDLEWARE, POLICY, declare_arguments
from vla_ros.launching.node import policy


def generate_launch_description() -> LaunchDescription:
    """Start the node on a robot."""
    return LaunchDescription([*declare_arguments(POLICY, MIDDLEWARE, CONSOLE), OpaqueFunction(function=policy)])
