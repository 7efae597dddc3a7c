"""Access to the ROS 2 graph: one small Node interface on rclpy or the embedded DDS participant."""

from __future__ import annotations

from vla_ros.graph.node import Graph, Node
from vla_ros.graph.open import open_graph

__all__ = ["Graph", "Node", "open_graph"]
