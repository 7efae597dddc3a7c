"""Middleware profiles that keep large camera frames: generated, written, selected and checked.

The stock settings of every ROS 2 middleware lose most raw 1080p frames between two processes of one host.
:func:`select` gives the profile that keeps them, for the ROS 2 distribution that is sourced and for the frames
that the cameras really send; :func:`examine` says whether it is in force.
"""

from vla_ros.middleware.checks import Report, examine, uses_iceoryx
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
    "ready_made",
    "select",
    "sourced_distribution",
    "uses_iceoryx",
    "write",
]
