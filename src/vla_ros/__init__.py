"""vla_ros: Vision-Language-Action policies on real robots, with ROS 2 or without it."""

__version__ = "0.1.0"
