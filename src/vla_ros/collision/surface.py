"""Surfaces of hollow meshes (bins, rings, pipes), whose convex pieces fill the room that a link may enter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.types import FloatArray

_PART = 256  # triangles; a part is built within 2 ms, in which no other thread of Python runs
_TRIED = 400  # places of that ball
_SAME = 1e-6  # m; nearer vertices are one
_HALF = 0.5  # winding number, above which a point is inside


@dataclass(frozen=True, eq=False)
class Surface:
    """The triangles of a mesh in several parts, each with a box around it, in the mesh's frame, m."""

    parts: tuple[Any, ...]  # models of the collision library, [C]
    low: FloatArray  # [C, 3], of the boxes, m
    high: FloatArray  # [C, 3]
    triangles: FloatArray  # [N, 3, 3], corners, m
    is_closed: bool  # so that it has an inside

    def near(self, points: FloatArray, most: float) -> Iterator[tuple[float, Any]]:
        """Yield the parts that may be nearer than ``most`` to the hull of ``points`` [N, 3], and a lower bound.

        The bound is the gap along the direction from a part's box to the middle of the points; the lowest first.
        """
        middle = 0.5 * (points.min(axis=0) + points.max(axis=0))
        nearest = np.clip(middle, self.low, self.high)  # [C, 3]
        away = middle - nearest
        length = np.sqrt(np.einsum("ci,ci->c", away, away))
        along = (away @ points.T).min(axis=1) - np.einsum("ci,ci->c", away, nearest)
        lower = np.where(length > 0, along / np.maximum(length, 1e-9), -np.inf)
        for number in lower.argsort().tolist():
            if lower[number] >= most:
                return
            yield float(lower[number]), self.parts[number]

    def encloses(self, point: FloatArray) -> bool:
        """Tell whether ``point`` [3] is inside the material of a closed mesh.

        The winding number, from each triangle's solid angle (Van Oosterom and Strackee 1983, equation 8).
        """
        outside = (point < self.low.min(axis=0)) | (point > self.high.max(axis=0))
        if not self.is_closed or outside.any():
            return False
        a, b, c = (self.triangles - point).swapaxes(0, 1)
        lengths = [np.sqrt(np.einsum("ni,ni->n", each, each)) for each in (a, b, c)]
        across = np.einsum("ni,ni->n", a, np.cross(b, c))
        along = lengths[0] * lengths[1] * lengths[2]
        for (first, second), length in zip(
            ((a, b), (b, c), (c, a)), (lengths[2], lengths[0], lengths[1]), strict=True
        ):
            along += np.einsum("ni,ni->n", first, second) * length
        return abs(float(np.arctan2(across, along).sum()) / (2 * np.pi)) > _HALF


def surface_of(fcl: Any, triangles: FloatArray) -> Surface:
    """Return the surface of a mesh from its ``triangles`` [N, 3, 3]; ``fcl`` is the collision library."""
    groups = list(_split(triangles))
    low, high = (np.array([find(group, axis=(0, 1)) for group in groups]) for find in (np.min, np.max))
    return Surface(tuple(_model(fcl, group) for group in groups), low, high, triangles, _is_closed(triangles))


def is_hollow(fcl: Any, surface: Surface, pieces: Sequence[Any], room: float) -> bool:
    """Tell whether a ball with the radius ``room``, m, fits into a convex piece of a mesh, beside its triangles."""
    rng, (ball, point) = np.random.default_rng(0), (fcl.Sphere(room), fcl.Sphere(1e-6))
    for piece in pieces:
        corners = np.asarray(piece.points())
        for place in rng.uniform(corners.min(axis=0), corners.max(axis=0), (_TRIED, 3)):
            if (
                distance(fcl, point, place, piece) < 0
                and all(distance(fcl, ball, place, part) > 0 for _, part in surface.near(place[None], room))
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
    """Tell whether each edge belongs to as many triangles in one direction as in the other."""
    grid = np.round(triangles.reshape(-1, 3) / _SAME).astype(np.int64)
    _, numbers = np.unique(grid, axis=0, return_inverse=True)
    corners = numbers.reshape(-1, 3)
    corners = corners[(corners != np.roll(corners, 1, axis=1)).all(axis=1)]
    edges = np.stack((corners, np.roll(corners, -1, axis=1)), axis=2).reshape(-1, 2)
    there, back = (np.unique(way, axis=0, return_counts=True) for way in (edges, edges[:, ::-1]))
    return len(edges) > 0 and all(np.array_equal(*both) for both in zip(there, back, strict=True))
