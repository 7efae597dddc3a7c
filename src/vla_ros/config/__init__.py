"""One tree of typed options: ROS parameters, parameter files and command line are three views of it."""

from vla_ros.config.loading import (
    Entry,
    build,
    entries,
    flatten,
    load,
    parse_assignment,
    read_file,
    to_yaml,
)
from vla_ros.config.options import Option
from vla_ros.config.policy import PolicyConfig
from vla_ros.config.tree import (
    ArmConfig,
    CameraConfig,
    Config,
    ControlConfig,
    GripperConfig,
    LimitsConfig,
    LiveConfig,
    NodeConfig,
    RobotConfig,
    TimeoutsConfig,
    TopicsConfig,
)

__all__ = [
    "ArmConfig",
    "CameraConfig",
    "Config",
    "ControlConfig",
    "Entry",
    "GripperConfig",
    "LimitsConfig",
    "LiveConfig",
    "NodeConfig",
    "Option",
    "PolicyConfig",
    "RobotConfig",
    "TimeoutsConfig",
    "TopicsConfig",
    "build",
    "entries",
    "flatten",
    "load",
    "parse_assignment",
    "read_file",
    "to_yaml",
]
