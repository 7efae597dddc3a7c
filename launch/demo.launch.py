"""A policy on the simulated table-top: `vla-ros demo` with a managed ROS 2 node.

    ros2 launch vla_ros demo.launch.py
    ros2 launch vla_ros demo.launch.py episodes:=20 report:=demo.html
    ros2 launch vla_ros demo.launch.py checkpoint:=demo-pi real_time:=true delay_ms:=200 schedule:=rtc
    ros2 launch vla_ros demo.launch.py checkpoint:=/models/mine unnorm_key:=my_table
    ros2 launch vla_ros demo.launch.py policy:=expert arms:=2 actions:=joint_position

The launch ends with the demo. The node arms itself, because the arm is simulated.
"""

from launch.actions import OpaqueFunction

from launch import LaunchContext, LaunchDescription
from vla_ros.launching.arguments import CONSOLE, MIDDLEWARE, POLICY, Argument, declare_arguments
from vla_ros_lab.launches import demo

DEMO = (
    Argument("episodes", "5", "Episodes to run"),
    Argument("seed", "0", "Seed of the first episode"),
    Argument("task", "pick", "Task of each episode", ("pick", "push", "all")),
    Argument("arms", "1", "Arms on the table", ("1", "2")),
    Argument("actions", "", "Actions of the scripted expert, such as joint_position"),
    Argument("real_time", "false", "Simulate in real time, not in lockstep", ("true", "false")),
    Argument("delay_ms", "", "Milliseconds by which each inference is delayed"),
    Argument("report", "", "Write a self-contained HTML report to this file"),
    Argument("json", "", "Write the figures to this file"),
    Argument("record", "", "Record a rosbag2 bag (MCAP) to this folder"),
    *CONSOLE,
)


def _demo(context: LaunchContext) -> list:
    return demo(context, [argument.name for argument in DEMO])


def generate_launch_description() -> LaunchDescription:
    """Start the node and the simulation."""
    shown = [argument for argument in POLICY if argument.name not in ("config", "name", "namespace", "armed")]
    return LaunchDescription([*declare_arguments(DEMO, shown, MIDDLEWARE), OpaqueFunction(function=_demo)])
