"""Markers that show what the collision check sees."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vla_ros.collision.geometry import Body
from vla_ros.config import node_topics
from vla_ros.control.collision import CollisionCheck
from vla_ros.execution.context import Context
from vla_ros.graph.wiring import Wiring
from vla_ros.kinematics.rotations import transform, write_rotation
from vla_ros.node.markers import CUBE, CYLINDER, DELETE_ALL, MARKER, MARKERS, SPHERE, TRIANGLES
from vla_ros.types import FloatArray

_HERE = np.eye(4)
SHOWN = 0.2
"""Seconds between markers."""

_MOST = 5_000  # triangles of a hollow mesh that are shown
_LINK, _OBSTACLE, _NEAR = (0.3, 0.6, 0.9, 0.4), (0.9, 0.6, 0.2, 0.5), (0.9, 0.1, 0.1, 1.0)


class CollisionView:
    """Publishes ``~/collision`` while anyone subscribes: all bodies where they are, and the nearest two in red."""

    def __init__(self, context: Context, wiring: Wiring, check: CollisionCheck) -> None:
        assert check.world is not None
        self._make, self._check, self._clock = wiring.graph.message, check, context.clock
        links = check.world.links.items()
        roots = (name for name, (frame, place) in links if not frame and np.allclose(place, _HERE))
        self._frame = next(roots, "world")
        self._publisher = wiring.teller(MARKERS, node_topics.COLLISION, "diagnostics")

    def show(self) -> None:
        if not self._publisher.get_subscription_count():
            return
        nearest, world = self._check.nearest(), self._check.checker.world
        at = world.tree.forward(self._check.positions[None])[:, 0]
        clear = self._make(MARKER)()
        clear.action = DELETE_ALL
        markers = [clear]
        for body in world.bodies:
            colour = _OBSTACLE if body.is_scene else _LINK
            if nearest is not None and body.name in nearest.bodies:
                colour = _NEAR
            for shape, place in _shown(body):
                markers.append(self._marker(len(markers), shape, at[body.frame] @ place, colour))
        self._publisher.publish(self._make(MARKERS)(markers=markers))

    def _marker(self, number: int, shape: Any, place: FloatArray, colour: tuple[float, ...]) -> Any:
        marker, stamp = self._make(MARKER)(), self._clock.ros()
        marker.header.frame_id, marker.ns, marker.id = self._frame, "collision", number
        marker.header.stamp.sec, marker.header.stamp.nanosec = divmod(stamp, 10**9)
        marker.type, scale, points = _drawn(shape)
        position, orientation = marker.pose.position, marker.pose.orientation
        position.x, position.y, position.z = place[:3, 3].tolist()
        turn = write_rotation(place[:3, :3], "quaternion_xyzw").tolist()
        orientation.x, orientation.y, orientation.z, orientation.w = turn
        marker.scale.x, marker.scale.y, marker.scale.z = scale
        marker.color.r, marker.color.g, marker.color.b, marker.color.a = colour
        point = self._make("geometry_msgs/msg/Point")
        marker.points = [point(x=x, y=y, z=z) for x, y, z in points]
        return marker


def _shown(body: Body) -> Iterator[tuple[Any, FloatArray]]:
    """Yield shapes and their places: of a hollow mesh its triangles [N, 3, 3], unless they are many."""
    surfaces = set[tuple[int, bytes]]()
    for piece in body.pieces:
        surface = piece.surface
        if surface is None or len(surface.triangles) > _MOST:
            yield piece.shape, piece.place
            continue
        place = piece.place @ transform(np.eye(3), -piece.middle)
        if (key := (id(surface), place.round(6).tobytes())) not in surfaces:
            surfaces.add(key)
            yield surface.triangles, place


def _drawn(shape: Any) -> tuple[int, tuple[float, float, float], list[list[float]]]:
    """Return type, scale and points of a marker; a capsule is drawn as a cylinder."""
    if isinstance(shape, np.ndarray):
        return TRIANGLES, (1.0, 1.0, 1.0), shape.reshape(-1, 3).tolist()
    if hasattr(shape, "polygons"):
        corners = np.asarray(shape.points())
        faces = [shape.polygons(index) for index in range(shape.num_polygons)]
        return (
            TRIANGLES,
            (1.0, 1.0, 1.0),
            [corners[face[each]].tolist() for face in faces for each in range(3)],
        )
    if hasattr(shape, "halfSide"):
        x, y, z = (2.0 * np.asarray(shape.halfSide)).tolist()
        return CUBE, (x, y, z), []
    if hasattr(shape, "halfLength"):
        capsule = 2.0 * shape.radius if "Capsule" in type(shape).__name__ else 0.0
        return CYLINDER, (2.0 * shape.radius, 2.0 * shape.radius, 2.0 * shape.halfLength + capsule), []
    if hasattr(shape, "radius"):
        return SPHERE, (2.0 * shape.radius,) * 3, []
    return CUBE, (2.0, 2.0, 0.001), []  # a plane
