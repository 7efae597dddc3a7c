"""The distance of two pieces: of their convex shapes, and of the triangles of a hollow mesh inside of these."""

from collections.abc import Iterator, Sequence

import numpy as np

from vla_ros.collision.shapes import Piece, library
from vla_ros.collision.surface import Surface
from vla_ros.types import FloatArray

_ASKED = 0.1  # m; triangles are asked for pieces that are nearer than this
_FAR = 0.2  # m; triangles that are further away than this are not told apart


class Solids:
    """The shapes of pieces, and the surfaces of those that are part of a hollow mesh.

    Args:
        pieces: Each piece with the number of its body; pieces of one mesh in one body share its surface.
    """

    def __init__(self, pieces: Sequence[tuple[Piece, int]]) -> None:
        self.shapes = [piece.shape for piece, _ in pieces]
        self.radii = [piece.radius for piece, _ in pieces]
        self.surfaces = dict[int, tuple[int, Surface, FloatArray]]()  # with a number, and Piece.middle
        numbers = dict[tuple[int, int, bytes], int]()
        for index, (piece, body) in enumerate(pieces):
            if piece.surface is not None:
                at = piece.place.copy()
                at[:3, 3] -= at[:3, :3] @ piece.middle
                key = id(piece.surface), body, at.round(9).tobytes()
                self.surfaces[index] = numbers.setdefault(key, len(numbers)), piece.surface, piece.middle


class Query:
    """Asks for distances of pieces; keeps those of surfaces, which several pieces of one mesh ask for."""

    def __init__(self, solids: Solids) -> None:
        fcl = library()
        place = getattr(fcl, "Transform3s", None) or fcl.Transform3f
        self._solids, self._places, self._distance_of = solids, (place(), place()), fcl.distance
        self._request, self._result = fcl.DistanceRequest(), fcl.DistanceResult()
        self._known = dict[tuple[int, int, float], float]()

    def distance(self, a: int, b: int, at: float, turns: FloatArray, points: FloatArray) -> float:
        """Return the distance of the pieces ``a`` and ``b``, m, or a lower bound of it above 0.1 m.

        ``turns`` [P, 3, 3] and ``points`` [P, 3] are where all pieces are; ``at`` is the number of that sample.
        Inside a piece of a hollow mesh it is the distance from the mesh's triangles, and inside the material of
        one that is closed, that distance with a negative sign.
        """
        shapes, places = self._solids.shapes, self._places
        places[0].setTransform(turns[a], points[a])
        places[1].setTransform(turns[b], points[b])
        self._result.clear()
        found = float(self._distance_of(shapes[a], places[0], shapes[b], places[1], self._request, self._result))
        if found >= _ASKED or not self._solids.surfaces:
            return found
        return max([found, *self._from_surfaces(a, b, at, turns, points)])

    def _from_surfaces(self, a: int, b: int, at: float, turns: FloatArray, points: FloatArray) -> Iterator[float]:
        """Yield the distance of each of two pieces from the surface that the other one is part of."""
        for piece, other in ((a, b), (b, a)):
            if other in self._solids.surfaces and np.isfinite(self._solids.radii[piece]):
                number, surface, middle = self._solids.surfaces[other]
                key = piece, number, at
                if key not in self._known:
                    origin = points[other] - turns[other] @ middle
                    self._places[0].setTransform(turns[piece], points[piece])
                    self._places[1].setTransform(turns[other], origin)
                    self._known[key] = self._from(surface, piece, turns[other].T @ (points[piece] - origin))
                yield self._known[key]

    def _from(self, surface: Surface, piece: int, centre: FloatArray) -> float:
        """Return the distance of a piece, whose ``centre`` [3] is given in the coordinates of ``surface``."""
        shape, radius, least = self._solids.shapes[piece], self._solids.radii[piece], _FAR
        for lower, part in surface.near(centre, _FAR + radius):
            if lower - radius >= least:
                break
            self._result.clear()
            self._result.min_distance = least  # what is further away is skipped
            found = self._distance_of(shape, self._places[0], part, self._places[1], self._request, self._result)
            least = min(least, float(found))
        return -least if least > 0.0 and surface.encloses(centre) else least
