"""The embedded DDS participant: a ROS 2 node without a ROS installation, over Eclipse Cyclone DDS.

It uses no DDS listeners, which deadlock with Python's interpreter lock, but one wait set on the thread that spins.
Samples remain CDR bytes until a callback needs a message, and writers keep the last N samples and never block.
"""

from vla_ros.graph.dds.graph import DdsGraph

__all__ = ["DdsGraph"]
