"""A second node that contests the arm, the policy node's name or the robot's data."""

from collections.abc import Callable
from typing import Any

from vla_ros.execution.claim import Claim
from vla_ros.graph.node import Graph

_TYPES = {"camera": "sensor_msgs/msg/Image", "scene": "visualization_msgs/msg/MarkerArray"}
_QOS = {"joints": "state_publisher", "camera": "camera", "scene": "state_publisher"}


class Intruder:
    """Joins the graph when created, and leaves with :meth:`close`.

    Args:
        graph: The graph.
        what: ``claim``, ``name``, ``command``, ``gripper``, ``joints``, ``camera`` or ``scene``.
        topic: Topic of the command or of the data.
        data: Makes false data. These are not recorded, because no command may be based on them.
    """

    def __init__(self, graph: Graph, what: str, topic: str, data: Callable[[], Any] | None) -> None:
        self._data, self._publisher = data, None
        if what == "claim":  # what a policy node does before its publisher is discovered
            self.close: Callable[[], Any] = Claim("command " + topic, "/intruder").close
            return
        node = graph.create_node("vla_policy" if what == "name" else "intruder")
        self.close = node.destroy_node
        if what != "name":
            kind = graph.message(_TYPES.get(what, "sensor_msgs/msg/JointState"))
            self._publisher = node.create_publisher(kind, topic, graph.qos(_QOS.get(what, "command")))

    def send(self) -> None:
        """Send false data, if this intruder publishes any."""
        if self._publisher is not None and self._data is not None:
            self._publisher.publish(self._data())
