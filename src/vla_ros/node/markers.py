"""Reads the markers of a scene: what they change, and the shapes of obstacles."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.collision.geometry import Body
from vla_ros.collision.shapes import Piece, library
from vla_ros.collision.world import link_of
from vla_ros.control.collision import CollisionCheck
from vla_ros.errors import ConfigError, one_line
from vla_ros.kinematics.rotations import read_rotation, transform
from vla_ros.types import FloatArray, JointState

MARKERS, MARKER = "visualization_msgs/msg/MarkerArray", "visualization_msgs/msg/Marker"
ADD, DELETE, DELETE_ALL = 0, 2, 3
CUBE, SPHERE, CYLINDER, CUBES, SPHERES, MESH, TRIANGLES = 1, 2, 3, 6, 7, 10, 11
MOST = 200
"""Shapes of a scene."""

_MOST_MARKERS = 2 * MOST  # of a message; some may delete
_UNKNOWN = 10.0  # m, radius of a ball that stands for an obstacle of unknown shape
_FARTHEST = 1000.0  # m; sizes and places beyond are none
Find = Callable[[str, tuple[float, ...]], tuple[Piece, ...] | str]


@dataclass(frozen=True)
class Placed:
    """An obstacle of the scene."""

    ends: float  # when its lifetime is over, s of a steady clock
    body: Body
    place: FloatArray  # [4, 4] of a mesh in its frame
    mesh: tuple[str, tuple[float, ...]] | None = None  # its name and scale
    shape: tuple[Piece, ...] | str = ""  # of the mesh, or why it is not known

    def renewed(self, find: Find) -> "Placed":
        """Return the same with the mesh as it is now."""
        if self.mesh is None or (shape := find(*self.mesh)) is self.shape or shape == self.shape:
            return self
        if isinstance(shape, str):
            body = replace(self.body, pieces=(Piece.of(library().Sphere(_UNKNOWN), self.place),), unknown=shape)
        else:
            body = replace(self.body, pieces=tuple(piece.moved(self.place) for piece in shape), unknown="")
        return replace(self, body=body, shape=shape)


Scene = dict[tuple[str, int], Placed]


class MarkerReader:
    """Turns markers into obstacles of a world.

    Args:
        check: Whose world it is.
        find: Returns the pieces of a mesh with a scale, or why they are not known.
        joints_at: Returns each arm's joint state at a stamp in ns, or the newest at 0; those that are known.
    """

    def __init__(
        self, check: CollisionCheck, find: Find, joints_at: Callable[[int], Mapping[str, JointState]]
    ) -> None:
        assert check.world is not None
        self._check, self._world, self._find, self._joints_at = check, check.world, find, joints_at

    def apply(self, markers: Any, scene: Scene, now: float) -> Scene:
        """Return the scene after a message at the time ``now``, s. Raises ConfigError if it is not understood."""
        count = sum(max(1, len(marker.points)) for marker in markers[: _MOST_MARKERS + 1])
        if len(markers) > _MOST_MARKERS or count > _MOST_MARKERS:
            raise ConfigError(f"found more than {_MOST_MARKERS} markers or points of markers")
        scene, frames = dict(scene), dict[tuple[int, int], FloatArray]()
        for marker in markers:
            key = str(marker.ns), int(marker.id)
            if marker.action == DELETE_ALL:
                scene.clear()
            elif marker.action == DELETE:
                scene.pop(key, None)
            elif marker.action == ADD:
                scene[key] = self._placed(marker, now, frames)
            else:
                raise ConfigError(f"marker {_name(marker)}: found the action {marker.action}, expected 0, 2 or 3")
        if sum(len(each.body.pieces) for each in scene.values()) > MOST:
            raise ConfigError(f"found more than {MOST} shapes")
        return scene

    def _placed(self, marker: Any, now: float, frames: dict[tuple[int, int], FloatArray]) -> Placed:
        name = _name(marker)
        what, link = f"marker {name}", str(marker.header.frame_id)
        frame, place = link_of(self._world, link or self._world.base, what)
        scale = _numbers(what, "scale", marker.scale, "xyz")
        if (scale <= 0).any():
            raise ConfigError(f"{what}: found the scale {scale.tolist()}, expected more than 0")
        place = place @ _pose(what, marker.pose)
        if frame and not marker.frame_locked:  # it is where it was at its stamp, and does not move with the link
            stamp = int(marker.header.stamp.sec) * 1_000_000_000 + int(marker.header.stamp.nanosec)
            if (frame, stamp) not in frames:
                try:
                    frames[frame, stamp] = self._check.placed(frame, self._joints_at(stamp))
                except ConfigError as error:
                    raise ConfigError(
                        f"{what}: the frame '{one_line(link)}' moves; found {error} at the stamp {stamp} ns"
                    ) from None
            frame, place = 0, frames[frame, stamp] @ place
        ends = now + (_seconds(marker.lifetime) or math.inf)
        body = Body(f"scene:{name}", frame, (), is_scene=True)
        if int(marker.type) == MESH:
            if not marker.mesh_resource:
                raise ConfigError(f"{what}: found no mesh_resource, expected one of collision.scene_meshes")
            mesh = str(marker.mesh_resource), tuple(scale.tolist())
            return Placed(ends, body, place, mesh).renewed(self._find)
        pieces = tuple(piece.moved(place) for piece in _pieces(what, marker, scale))
        return Placed(ends, replace(body, pieces=pieces), place)


def _name(marker: Any) -> str:
    return one_line(f"{marker.ns}/{marker.id}" if marker.ns else str(marker.id), 80)


def _pieces(what: str, marker: Any, scale: FloatArray) -> Iterator[Piece]:
    fcl, kind = library(), int(marker.type)
    if kind in (CUBE, CUBES, SPHERE, SPHERES):
        shape = fcl.Box(scale) if kind in (CUBE, CUBES) else fcl.Sphere(0.5 * float(scale.max()))
        points = [_numbers(what, "point", each, "xyz") for each in marker.points]
        for point in points if kind >= CUBES else [np.zeros(3)]:
            yield Piece.of(shape, transform(np.eye(3), point))
    elif kind == CYLINDER:
        yield Piece.of(fcl.Cylinder(0.5 * float(scale[:2].max()), float(scale[2])), np.eye(4))
    else:
        raise ConfigError(f"{what}: found the type {kind}, expected a cube, sphere, cylinder or mesh")


def _numbers(what: str, part: str, message: Any, fields: str) -> FloatArray:
    found = np.array([float(getattr(message, each)) for each in fields])
    if not (np.abs(found) <= _FARTHEST).all():
        raise ConfigError(f"{what}: its {part} is {found.tolist()}, expected numbers up to {_FARTHEST:g}")
    return found


def _pose(what: str, pose: Any) -> FloatArray:
    turn = _numbers(what, "orientation", pose.orientation, "xyzw")
    return transform(read_rotation(turn, "quaternion_xyzw"), _numbers(what, "position", pose.position, "xyz"))


def _seconds(duration: Any) -> float:
    return float(duration.sec) + 1e-9 * float(duration.nanosec)
