"""The embedded DDS participant: a ROS 2 node without a ROS installation, over Eclipse Cyclone DDS.

Four rules, each learnt by measurement: no DDS listeners (with a local and a remote writer on one topic they
deadlock with Python's interpreter lock); one wait set, on the thread that spins; samples remain CDR bytes until a
callback needs a message; writers keep the last N samples, so that publishing never blocks.
"""

from __future__ import annotations

from vla_ros.graph.dds.graph import DdsGraph

__all__ = ["DdsGraph"]
