"""One tree of typed options: ROS parameters, parameter files and command line are three views of it."""

from vla_ros.config.files import read_file
from vla_ros.config.loading import (
    Entry,
    build,
    entries,
    flatten,
    load,
    parse_assignment,
    to_yaml,
)
from vla_ros.config.options import Option
from vla_ros.config.policy import PolicyConfig
from vla_ros.config.sections import (
    VELOCITY_OUTPUTS,
    CameraConfig,
    ControlConfig,
    FeaturesConfig,
    GripperConfig,
    LimitsConfig,
    NodeConfig,
    RobotConfig,
    TimeoutsConfig,
    TopicsConfig,
)
from vla_ros.config.tree import ArmConfig, Config, LiveConfig

__all__ = [
    "VELOCITY_OUTPUTS",
    "ArmConfig",
    "CameraConfig",
    "Config",
    "ControlConfig",
    "Entry",
    "FeaturesConfig",
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
