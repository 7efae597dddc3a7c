"""The tree of typed options that ROS parameters, parameter files and command-line options set."""

from vla_ros.config.control import VELOCITY_OUTPUTS, ControlConfig
from vla_ros.config.files import read_file
from vla_ros.config.loading import build, entries, flatten, load, parse_assignment, to_yaml
from vla_ros.config.options import PolicyConfig
from vla_ros.config.sections import CameraConfig, GripperConfig, LimitsConfig, TimeoutsConfig
from vla_ros.config.tree import ArmConfig, Config, LiveConfig

__all__ = [
    "VELOCITY_OUTPUTS",
    "ArmConfig",
    "CameraConfig",
    "Config",
    "ControlConfig",
    "GripperConfig",
    "LimitsConfig",
    "LiveConfig",
    "PolicyConfig",
    "TimeoutsConfig",
    "build",
    "entries",
    "flatten",
    "load",
    "parse_assignment",
    "read_file",
    "to_yaml",
]
