"""The embedded DDS participant: a ROS 2 node without a ROS installation, over Eclipse Cyclone DDS.

Rules that this package keeps, each learnt by measurement: no DDS listeners (with a local and a remote writer on
one topic they deadlock with Python's interpreter lock), one wait set on the thread that spins, samples stay CDR
blobs until a callback asks for a message, writers keep the last N samples so that a publish never waits.
"""

from __future__ import annotations

from vla_ros.graph.dds.graph import DdsGraph

__all__ = ["DdsGraph"]
