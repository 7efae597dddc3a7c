"""Obstacles that move, from a topic of markers; and markers that show what the collision check sees."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from vla_ros.collision.geometry import Body, find_mesh, load_mesh, pieces_of
from vla_ros.collision.shapes import Piece, library
from vla_ros.collision.tree import transform
from vla_ros.collision.world import link_of
from vla_ros.control.collision import CollisionCheck
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.kinematics.rotations import read_rotation, write_rotation
from vla_ros.kinematics.urdf import resolve
from vla_ros.node.context import Context
from vla_ros.types import FloatArray

_ADD, _DELETE, _DELETE_ALL = 0, 2, 3
_CUBE, _SPHERE, _CYLINDER, _CUBES, _SPHERES, _MESH, _TRIANGLES = 1, 2, 3, 6, 7, 10, 11
_ARRAY, _MARKER, _HERE = "visualization_msgs/msg/MarkerArray", "visualization_msgs/msg/Marker", np.eye(4)
_MOST = 200  # shapes
_UNKNOWN = Origin()  # of a message that a middleware without origins delivers
_PERIOD = 0.1  # s between looks for obstacles whose lifetime has ended
_SHOWN = 0.2  # s between markers
_LINK, _OBSTACLE, _NEAR = (0.3, 0.6, 0.9, 0.4), (0.9, 0.6, 0.2, 0.5), (0.9, 0.1, 0.1, 1.0)


def join_collision(context: Context, wiring: Wiring, check: CollisionCheck | None) -> None:
    """Connect the collision check of a node with its clock, ``collision.scene`` and ``~/collision``."""
    if check is not None and check.world is not None:
        check.steady = context.clock.steady
        CollisionMarkers(context, wiring, check)
        if context.options.current.collision.scene:
            SceneTopic(context, wiring, check)


class SceneTopic:
    """Takes the markers of ``collision.scene`` as obstacles. Its callbacks run on the graph thread."""

    def __init__(self, context: Context, wiring: Wiring, check: CollisionCheck) -> None:
        assert check.world is not None
        self._context, self._check, self._world = context, check, check.world
        self._urdf = resolve(context.options.current.arms[0].robot.urdf)
        self._bodies: dict[tuple[str, int], tuple[float, Body]] = {}  # with the time at which each one ends, s
        self._meshes: dict[str, list[Piece]] = {}
        wiring.subscribe_from(_ARRAY, context.options.current.collision.scene, self.take, "state")
        wiring.timer(_PERIOD, self.expire)

    def take(self, message: Any, origin: Origin = _UNKNOWN) -> None:
        """Take a message. One that is not understood changes nothing, so that a required scene becomes stale."""
        bodies, now, age = dict(self._bodies), self._check.steady(), 0.0
        if origin.published:  # a busy node may read it late
            age = max(0.0, self._context.clock.awake() - self._context.suspension.note_arrival(*origin))
        try:
            for marker in message.markers:
                key = str(marker.ns), int(marker.id)
                if marker.action == _DELETE_ALL:
                    bodies.clear()
                elif marker.action == _DELETE:
                    bodies.pop(key, None)
                elif marker.action == _ADD:
                    bodies[key] = now + (_seconds(marker.lifetime) or math.inf), self._body(marker)
                else:
                    raise ConfigError(f"marker {key}: found the action {marker.action}, expected 0, 2 or 3")
            if sum(len(body.pieces) for _, body in bodies.values()) > _MOST:
                raise ConfigError(f"found more than {_MOST} shapes")
            self._check.set_scene([body for _, body in bodies.values()], age=age)
        except (VlaRosError, ValueError, TypeError, OverflowError, RuntimeError) as error:
            topic = self._context.options.current.collision.scene
            self._context.throttled.log("scene", f"a message on {topic} was ignored: {error}", "error")
            return
        self._bodies = bodies

    def expire(self) -> None:
        """Remove obstacles whose lifetime has ended."""
        now = self._check.steady()
        kept = {key: each for key, each in self._bodies.items() if each[0] > now}
        if len(kept) < len(self._bodies):
            self._bodies = kept
            self._check.set_scene([body for _, body in kept.values()], age=None)

    def _body(self, marker: Any) -> Body:
        name = f"{marker.ns}/{marker.id}" if marker.ns else str(marker.id)
        frame, place = link_of(self._world, str(marker.header.frame_id) or self._world.base, f"marker {name}")
        scale = _numbers(name, "scale", marker.scale, "xyz")
        if (scale <= 0).any():
            raise ConfigError(f"marker {name}: found the scale {scale.tolist()}, expected more than 0")
        pieces = tuple(piece.moved(place @ _pose(name, marker.pose)) for piece in self._pieces(name, marker, scale))
        return Body(f"scene:{name}", frame, pieces, is_scene=True)

    def _pieces(self, name: str, marker: Any, scale: FloatArray) -> Iterator[Piece]:
        fcl, kind = library(), int(marker.type)
        if kind == _MESH:
            key = f"{marker.mesh_resource} {scale.tolist()}"
            if key not in self._meshes:
                path = find_mesh(str(marker.mesh_resource), self._urdf, f"marker {name}")
                self._meshes[key] = pieces_of(load_mesh(path, scale.tolist()), np.eye(4))
            yield from self._meshes[key]
        elif kind in (_CUBE, _CUBES, _SPHERE, _SPHERES):
            cubes = kind in (_CUBE, _CUBES)
            shape = fcl.Box(scale) if cubes else fcl.Sphere(0.5 * float(scale.max()))
            points = [_numbers(name, "point", each, "xyz") for each in marker.points]
            for point in points if kind >= _CUBES else [np.zeros(3)]:
                yield Piece.of(shape, transform(np.eye(3), point))
        elif kind == _CYLINDER:
            yield Piece.of(fcl.Cylinder(0.5 * float(scale[:2].max()), float(scale[2])), np.eye(4))
        else:
            raise ConfigError(f"marker {name}: found the type {kind}, expected a cube, sphere, cylinder or mesh")


def _numbers(name: str, what: str, message: Any, fields: str) -> FloatArray:
    found = np.array([float(getattr(message, each)) for each in fields])
    if not np.isfinite(found).all():
        raise ConfigError(f"marker {name}: its {what} is {found.tolist()}, expected finite numbers")
    return found


def _pose(name: str, pose: Any) -> FloatArray:
    turn = _numbers(name, "orientation", pose.orientation, "xyzw")
    return transform(read_rotation(turn, "quaternion_xyzw"), _numbers(name, "position", pose.position, "xyz"))


def _seconds(duration: Any) -> float:
    return float(duration.sec) + 1e-9 * float(duration.nanosec)


class CollisionMarkers:
    """Publishes ``~/collision`` while anyone subscribes: all bodies where they are, and the nearest two in red."""

    def __init__(self, context: Context, wiring: Wiring, check: CollisionCheck) -> None:
        assert check.world is not None
        self._make, self._check, self._clock = wiring.graph.message, check, context.clock
        links = check.world.links.items()
        roots = (name for name, (frame, place) in links if not frame and np.allclose(place, _HERE))
        self._frame = next(roots, "world")
        self._publisher = wiring.teller(_ARRAY, context.options.current.topics.collision, "diagnostics")
        wiring.timer(_SHOWN, self.show)

    def show(self) -> None:
        if not self._publisher.get_subscription_count():
            return
        nearest, world = self._check.nearest(), self._check.checker.world
        at = world.tree.forward(self._check.positions[None])[:, 0]
        clear = self._make(_MARKER)()
        clear.action = _DELETE_ALL
        markers = [clear]
        for body in world.bodies:
            colour = _OBSTACLE if body.is_scene else _LINK
            if nearest is not None and body.name in nearest.bodies:
                colour = _NEAR
            for piece in body.pieces:
                markers.append(self._marker(len(markers), piece.shape, at[body.frame] @ piece.place, colour))
        self._publisher.publish(self._make(_ARRAY)(markers=markers))

    def _marker(self, number: int, shape: Any, place: FloatArray, colour: tuple[float, ...]) -> Any:
        marker, stamp = self._make(_MARKER)(), self._clock.ros()
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


def _drawn(shape: Any) -> tuple[int, tuple[float, float, float], list[list[float]]]:
    """Return type, scale and points of a marker; a capsule is drawn as a cylinder."""
    if hasattr(shape, "polygons"):
        corners = np.asarray(shape.points())
        faces = [shape.polygons(index) for index in range(shape.num_polygons)]
        return (
            _TRIANGLES,
            (1.0, 1.0, 1.0),
            [corners[face[each]].tolist() for face in faces for each in range(3)],
        )
    if hasattr(shape, "halfSide"):
        x, y, z = (2.0 * np.asarray(shape.halfSide)).tolist()
        return _CUBE, (x, y, z), []
    if hasattr(shape, "halfLength"):
        capsule = 2.0 * shape.radius if "Capsule" in type(shape).__name__ else 0.0
        return _CYLINDER, (2.0 * shape.radius, 2.0 * shape.radius, 2.0 * shape.halfLength + capsule), []
    if hasattr(shape, "radius"):
        return _SPHERE, (2.0 * shape.radius,) * 3, []
    return _CUBE, (2.0, 2.0, 0.001), []  # a plane
