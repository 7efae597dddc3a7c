"""Middleware profiles that do not lose large camera frames.

With default settings, every ROS 2 middleware loses most raw 1080p frames between two processes on one host.
:func:`select` generates a profile for the sourced ROS 2 distribution and the frame size; :func:`examine` checks
whether it is in force.
"""

from vla_ros.middleware.checks import Report, examine, middleware_watch, uses_iceoryx
from vla_ros.middleware.distributions import DISTRIBUTIONS, Distribution, sourced_distribution
from vla_ros.middleware.frames import Frames
from vla_ros.middleware.selection import NAMES, Profile, default_folder, ready_made, select, write

__all__ = [
    "DISTRIBUTIONS",
    "NAMES",
    "Distribution",
    "Frames",
    "Profile",
    "Report",
    "default_folder",
    "examine",
    "middleware_watch",
    "ready_made",
    "select",
    "sourced_distribution",
    "uses_iceoryx",
    "write",
]
