"""Surfaces of hollow meshes (bins, rings, pipes), whose convex pieces fill the room that a link may enter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.types import FloatArray

_PART = 256  # triangles; a part is built within 2 ms, in which no other thread of Python runs
_ROOM = 0.02  # m, radius of a ball that fits into what the pieces of a hollow mesh fill
_TRIED = 400  # places of that ball
_SAME = 1e-6  # m; nearer vertices are one
_HALF = 0.5  # winding number, above which a point is inside


@dataclass(frozen=True, eq=False)
class Surface:
    """The triangles of a mesh in several parts, each with a sphere around it, in the coordinates of the mesh."""

    parts: tuple[Any, ...]  # models of the collision library, [C]
    centres: FloatArray  # [C, 3]
    radii: FloatArray  # [C], m
    solid: FloatArray  # the triangles [N, 3, 3] of a mesh that is closed, so that it has an inside; else none

    def near(self, point: FloatArray, most: float) -> Iterator[tuple[float, Any]]:
        """Yield the parts that may be nearer than ``most`` to ``point`` [3], with the distance of their spheres.

        The nearest sphere comes first.
        """
        lower = np.linalg.norm(self.centres - point, axis=1) - self.radii
        for number in lower.argsort().tolist():
            if lower[number] >= most:
                return
            yield float(lower[number]), self.parts[number]

    def encloses(self, point: FloatArray) -> bool:
        """Tell whether ``point`` [3] is inside the material of a closed mesh.

        The winding number, from each triangle's solid angle (Van Oosterom and Strackee 1983, equation 8).
        """
        if not len(self.solid):
            return False
        a, b, c = (self.solid - point).swapaxes(0, 1)
        lengths = [np.sqrt(np.einsum("ni,ni->n", each, each)) for each in (a, b, c)]
        across = np.einsum("ni,ni->n", a, np.cross(b, c))
        along = lengths[0] * lengths[1] * lengths[2]
        for (first, second), length in zip(((a, b), (b, c), (c, a)), (lengths[2], lengths[0], lengths[1]), strict=True):
            along += np.einsum("ni,ni->n", first, second) * length
        return abs(float(np.arctan2(across, along).sum()) / (2 * np.pi)) > _HALF


def surface_of(fcl: Any, triangles: FloatArray) -> Surface:
    """Return the surface of a mesh from its ``triangles`` [N, 3, 3]; ``fcl`` is the collision library."""
    groups = list(_split(triangles))
    middles = [0.5 * (group.min(axis=(0, 1)) + group.max(axis=(0, 1))) for group in groups]
    radii = [np.linalg.norm(group - middle, axis=2).max() for group, middle in zip(groups, middles, strict=True)]
    solid = triangles if _is_closed(triangles) else np.zeros((0, 3, 3))
    return Surface(tuple(_model(fcl, group) for group in groups), np.array(middles), np.array(radii), solid)


def is_hollow(fcl: Any, surface: Surface, pieces: Sequence[Any]) -> bool:
    """Tell whether a ball of 2 cm fits into a convex piece [P] of a mesh without touching the mesh."""
    rng, (ball, point) = np.random.default_rng(0), (fcl.Sphere(_ROOM), fcl.Sphere(1e-6))
    for piece in pieces:
        corners = np.asarray(piece.points())
        for place in rng.uniform(corners.min(axis=0), corners.max(axis=0), (_TRIED, 3)):
            if (
                distance(fcl, point, place, piece) < 0
                and all(distance(fcl, ball, place, part) > 0 for _, part in surface.near(place, _ROOM))
                and not surface.encloses(place)
            ):
                return True
    return False


def distance(fcl: Any, shape: Any, place: FloatArray, other: Any) -> float:
    """Return the distance of ``shape``, moved by ``place`` [3], from another one."""
    at, here = (getattr(fcl, "Transform3s", None) or fcl.Transform3f for _ in range(2))
    request, result = fcl.DistanceRequest(), fcl.DistanceResult()
    return float(fcl.distance(shape, at(np.eye(3), place), other, here(), request, result))


def _split(triangles: FloatArray) -> Iterator[FloatArray]:
    """Divide triangles at the median of their longest extent, until no part has too many."""
    if len(triangles) <= _PART:
        yield triangles
        return
    middles = triangles.mean(axis=1)
    order = middles[:, np.ptp(middles, axis=0).argmax()].argsort()
    half = len(order) // 2
    yield from _split(triangles[order[:half]])
    yield from _split(triangles[order[half:]])


def _model(fcl: Any, triangles: FloatArray) -> Any:
    model = fcl.BVHModelOBBRSS()
    model.beginModel(len(triangles), 3 * len(triangles))
    for a, b, c in triangles:
        model.addTriangle(a, b, c)
    model.endModel()
    return model


def _is_closed(triangles: FloatArray) -> bool:
    """Tell whether each edge belongs to one triangle in either direction."""
    grid = np.round(triangles.reshape(-1, 3) / _SAME).astype(np.int64)
    _, numbers = np.unique(grid, axis=0, return_inverse=True)
    corners = numbers.reshape(-1, 3)
    corners = corners[(corners != np.roll(corners, 1, axis=1)).all(axis=1)]
    edges = np.stack((corners, np.roll(corners, -1, axis=1)), axis=2).reshape(-1, 2)
    there, back = (np.unique(way, axis=0) for way in (edges, edges[:, ::-1]))
    return len(there) == len(edges) > 0 and np.array_equal(there, back)
