"""Middleware settings for the camera driver, as in policy.launch.py: include it before the driver's nodes.

    ros2 launch vla_ros middleware.launch.py middleware:=fastdds width:=1920 height:=1080    to see what it does

It sets the environment of everything that is launched after it in the same file, and starts RouDi or the zenoh
router if it is needed and not running. Both ends of a topic need the same middleware and frame size.
"""

from launch.actions import OpaqueFunction

from launch import LaunchContext, LaunchDescription
from vla_ros.launching.arguments import MIDDLEWARE, Argument, declare_arguments, value
from vla_ros.launching.middleware import middleware
from vla_ros.middleware.profiles import FrameLoad

FRAMES = (
    Argument("width", "1920", "Width of the frames in pixels"),
    Argument("height", "1080", "Height of the frames in pixels"),
    Argument("cameras", "1", "Number of cameras"),
    Argument("bytes_per_pixel", "3", "3 for rgb8 and bgr8"),
)


def _middleware(context: LaunchContext) -> list:
    return middleware(context, FrameLoad(*(int(value(context, argument.name)) for argument in FRAMES)))


def generate_launch_description() -> LaunchDescription:
    """Set up the middleware only."""
    return LaunchDescription([*declare_arguments(MIDDLEWARE, FRAMES), OpaqueFunction(function=_middleware)])
