"""The distance of two pieces: of their convex shapes, and of the triangles of a hollow mesh inside of these."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from vla_ros.collision.shapes import Piece, corners, library
from vla_ros.collision.surface import Surface
from vla_ros.types import FloatArray

_ASKED = 0.1  # m; triangles are asked for pieces that are nearer than this
_FAR = 0.2  # m; triangles that are further away than this are not told apart
_ROUGH = 1e-3  # m, by which the distance from triangles may be too small, so that most of a flat wall is skipped


class Solids:
    """The shapes of pieces, and the surfaces of those that are part of a hollow mesh.

    Args:
        pieces: Each piece with the number of its body; pieces of one mesh in one body share its surface.
    """

    def __init__(self, pieces: Sequence[tuple[Piece, int]]) -> None:
        self.shapes = [piece.shape for piece, _ in pieces]
        self.surfaces = dict[int, tuple[int, Surface, FloatArray]]()  # with a number, and Piece.middle
        numbers = dict[tuple[int, int, bytes], int]()
        for index, (piece, body) in enumerate(pieces):
            if piece.surface is not None:
                at = piece.place.copy()
                at[:3, 3] -= at[:3, :3] @ piece.middle
                key = id(piece.surface), body, at.round(9).tobytes()
                self.surfaces[index] = numbers.setdefault(key, len(numbers)), piece.surface, piece.middle
        solid = enumerate(piece for piece, _ in pieces if self.surfaces)
        here = np.eye(4)
        self.corners = {
            index: corners(replace(piece, place=here)) for index, piece in solid if np.isfinite(piece.radius)
        }  # points [N, 3] around which a piece is; none of a half-space


class Query:
    """Asks for distances of pieces; keeps those of surfaces, which several pieces of one mesh ask for.

    Whether a piece is inside the material of a closed mesh is asked at the sample 0, or with ``signed`` at each.
    A motion gets there only through the surface.
    """

    def __init__(self, solids: Solids, signed: bool) -> None:
        fcl = library()
        place = getattr(fcl, "Transform3s", None) or fcl.Transform3f
        self._solids, self._places, self._distance_of = solids, (place(), place()), fcl.distance
        self._signed = signed
        self._request, self._result = fcl.DistanceRequest(), fcl.DistanceResult()
        self._rough = fcl.DistanceRequest()
        self._rough.abs_err, self._rough.rel_err = _ROUGH, 1.0
        self._known = dict[tuple[int, int, float], float]()

    def distance(self, a: int, b: int, at: float, k: int, turns: FloatArray, points: FloatArray) -> float:
        """Return the distance of the pieces ``a`` and ``b``, m, or a lower bound of it above 0.1 m.

        ``turns`` [P, K, 3, 3] and ``points`` [P, K, 3] are where all pieces are at samples; ``k`` is the one to
        look at, and ``at`` its number in the motion.
        Inside a piece of a hollow mesh it is the distance from the mesh's triangles, and inside the material of
        one that is closed, that distance with a negative sign.
        """
        shapes, places = self._solids.shapes, self._places
        places[0].setTransform(turns[a, k], points[a, k])
        places[1].setTransform(turns[b, k], points[b, k])
        self._result.clear()
        found = float(self._distance_of(shapes[a], places[0], shapes[b], places[1], self._request, self._result))
        if found >= _ASKED or not self._solids.surfaces:
            return found
        return max([found, *self._from_surfaces(a, b, at, turns[:, k], points[:, k])])

    def _from_surfaces(self, a: int, b: int, at: float, turns: FloatArray, points: FloatArray) -> Iterator[float]:
        """Yield the distance of each of two pieces from the surface that the other one is part of."""
        for piece, other in ((a, b), (b, a)):
            if other in self._solids.surfaces and piece in self._solids.corners:
                number, surface, middle = self._solids.surfaces[other]
                key = piece, number, at
                if key not in self._known:
                    origin = points[other] - turns[other] @ middle
                    self._places[0].setTransform(turns[piece], points[piece])
                    self._places[1].setTransform(turns[other], origin)
                    centre = turns[other].T @ (points[piece] - origin)
                    around = self._solids.corners[piece] @ (turns[other].T @ turns[piece]).T + centre
                    found = self._from(surface, piece, around)
                    inside = found > 0 and (self._signed or at == 0) and surface.encloses(centre)
                    self._known[key] = -found if inside else found
                yield self._known[key]

    def _from(self, surface: Surface, piece: int, around: FloatArray) -> float:
        """Return the distance of a piece, within the points ``around`` [N, 3] in the mesh's coordinates."""
        shape, least = self._solids.shapes[piece], _FAR
        for lower, part in surface.near(around, least):
            if lower >= least:
                break
            self._result.clear()
            self._result.min_distance = least  # what is further away is skipped
            found = self._distance_of(shape, self._places[0], part, self._places[1], self._rough, self._result)
            least = min(least, float(found))
        return least - _ROUGH
