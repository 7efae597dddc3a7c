"""Obstacles around the robot: publishes them, and falls silent or sends what no obstacle is."""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.faults.descriptions import TRUNCATED
from vla_ros.graph.node import Graph
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

SCENE = "/obstacles"
BROKEN_MESH = Path(tempfile.gettempdir()) / "vla_ros_truncated.stl"
# Boxes beside, before and below the tip: their edges, and their centres relative to it, m.
_Box = tuple[Sequence[float], Sequence[float]]
_WALLS: tuple[_Box, ...] = (
    ((0.1, 0.3, 0.3), (0.2, 0.0, 0.0)),
    ((0.3, 0.1, 0.3), (0.0, 0.22, 0.0)),
    ((0.3, 0.1, 0.3), (0.0, -0.22, 0.0)),
    ((0.2, 0.2, 0.1), (0.0, 0.0, -0.22)),
)
_FAR: _Box = ((0.1, 0.1, 0.1), (-1.0, 0.0, 0.05))
_CUBE, _MESH, _DELETE_ALL = 1, 10, 3
_WRONG: tuple[dict[str, Any], ...] = (
    {"edge": math.nan}, {"edge": -0.1}, {"edge": 0.0}, {"beside": math.inf}, {"w": 0.0}, {"w": math.nan},
    {"type": 9}, {"type": -1}, {"type": _MESH}, {"action": 7}, {"frame_id": "nowhere"}, {"type": 6, "count": 300},
)  # fmt: skip


class Surroundings:
    """The obstacles of ``collision.scene``: one far away, or walls around the tip.

    Args:
        graph: The graph.
        node: The robot's node.
        emit: Records the walls as options of ``collision.obstacles``.
    """

    def __init__(self, graph: Graph, node: Any, emit: Callable[..., None]) -> None:
        self._make, self._emit = graph.message, emit
        array = self._make("visualization_msgs/msg/MarkerArray")
        self._array, self._publisher = array, node.create_publisher(array, SCENE, graph.qos("state_publisher"))
        self._arm = Kinematics.from_urdf("demo")
        self._fault, self._count, self._boxes = "", 0, [_FAR]
        BROKEN_MESH.write_bytes(TRUNCATED)

    def become(self, fault: str, positions: FloatArray) -> None:
        """Begin ``walls``, ``silent``, ``malformed`` or ``mesh`` with the arm at ``positions`` [7]."""
        self._fault = fault
        tip = self._arm.forward(positions).position
        placed = [(size, (tip + at).tolist()) for size, at in _WALLS]
        self._boxes = placed if fault == "walls" else [_FAR]
        boxes = ((number, *map(_text, box)) for number, box in enumerate(self._boxes))
        self._emit("scene", text=json.dumps([f"wall_{number} = box {size} at {at}" for number, size, at in boxes]))
        self.send()

    def send(self) -> None:
        self._count += 1
        if self._fault == "silent":
            return
        wrong = dict[str, Any]()
        if self._fault == "mesh":
            wrong = {"type": _MESH, "mesh_resource": str(BROKEN_MESH)}
        elif self._fault == "malformed":
            wrong = _WRONG[self._count % len(_WRONG)]
        markers = [self._marker(number, *box, **wrong) for number, box in enumerate(self._boxes)]
        self._publisher.publish(self._array(markers=[self._marker(0, *_FAR, action=_DELETE_ALL), *markers]))

    def cleared(self) -> Any:
        """Return a message that deletes all obstacles, as a second publisher may send it."""
        return self._array(markers=[self._marker(0, *_FAR, action=_DELETE_ALL)])

    def _marker(self, number: int, size: Sequence[float], at: Sequence[float], **more: Any) -> Any:
        """Return a box of edges ``size`` at ``at``; ``more`` are further fields, or what is wrong with it."""
        marker = self._make("visualization_msgs/msg/Marker")()
        marker.id, marker.type = number, _CUBE
        place, scale, turn = marker.pose.position, marker.scale, marker.pose.orientation
        place.x, place.y, place.z = at
        scale.x, scale.y, scale.z = size
        scale.y, place.y, turn.w = more.pop("edge", scale.y), more.pop("beside", place.y), more.pop("w", 1.0)
        marker.header.frame_id = more.pop("frame_id", "")
        point = self._make("geometry_msgs/msg/Point")
        marker.points = [point(x=0.0, y=0.0, z=0.0) for _ in range(more.pop("count", 0))]
        for name, value in more.items():
            setattr(marker, name, value)
        return marker


def _text(numbers: Sequence[float]) -> str:
    return " ".join(f"{each:.6f}" for each in numbers)
