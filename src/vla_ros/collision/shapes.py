"""Convex pieces of meshes, and capsules that enclose them."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_ros.collision.surface import Surface
from vla_ros.errors import MissingDependencyError
from vla_ros.kinematics.rotations import transform
from vla_ros.types import FloatArray, IntArray

_FLAT = 1e-5  # m; thinner things lie in a plane
_EDGE = 0.015  # m; triangles are divided until no edge is longer, so that a cut leaves little overlap
_MOST_TRIANGLES = 40_000
_MOST_PIECES = 8  # of one mesh
_WORTH = 0.06  # a cut is kept if the hulls lose this share of their volume,
_LEAST = 4e-6  # m^3, and at least this much
_TRIED = (0.3, 0.5, 0.7)  # where a cut is tried, of the extent along each axis
_SAMPLE = 800  # triangles with which cuts are tried
_DIRECTIONS = np.random.default_rng(0).normal(size=(3, 96))


def library() -> Any:
    """Return Pinocchio's collision library: coal, or hpp-fcl with Pinocchio 2."""
    try:
        import coal as found
    except ImportError:
        try:
            import hppfcl as found
        except ImportError as error:
            raise MissingDependencyError(
                f"collision.check needs Pinocchio's collision library ({error}); run `pip install pin`"
            ) from None
    return found


@dataclass(frozen=True, eq=False)
class Piece:
    """A convex shape whose bounding sphere is about its origin, placed in the frame of a joint."""

    shape: Any
    place: FloatArray  # [4, 4]
    radius: float  # of the sphere, m; infinite for a half-space
    surface: Surface | None = None  # of the hollow mesh that it is a piece of; inside the piece, it decides
    middle: FloatArray = field(default_factory=lambda: np.zeros(3))  # the piece's origin in the mesh's coordinates

    @classmethod
    def of(cls, shape: Any, place: FloatArray, surface: Surface | None = None) -> "Piece":
        """Return a piece for a shape of the library; the points of a hull are moved to their middle."""
        if hasattr(shape, "points"):
            points = np.asarray(shape.points())
            middle = 0.5 * (points.min(axis=0) + points.max(axis=0))
            centred = points - middle
            radius = float(np.sqrt((centred**2).sum(axis=1).max()))
            return cls(hull(centred), place @ transform(np.eye(3), middle), radius, surface, middle)
        shape.computeLocalAABB()
        return cls(shape, place, float(shape.aabb_radius))

    def moved(self, place: FloatArray) -> "Piece":
        return replace(self, place=place @ self.place)


def hull(points: FloatArray) -> Any:
    """Return the convex hull of ``points`` [N, 3], or None if they lie in a plane."""
    _, directions = np.linalg.eigh(np.cov(points.T)) if len(points) > 3 else (None, np.zeros((3, 3)))
    if float(np.ptp(points @ directions[:, 0])) < _FLAT:  # the library crashes
        return None
    fcl = library()
    vector = (getattr(fcl, "StdVec_Vec3s", None) or fcl.StdVec_Vec3f)()
    vector.extend(list(points))
    return fcl.Convex.convexHull(vector, True, "Qt")


def box_around(points: FloatArray) -> Piece:
    """Return a box around ``points`` [N, 3], for a flat mesh."""
    low, high = points.min(axis=0), points.max(axis=0)
    size = np.maximum(high - low, 1e-3)
    return Piece.of(library().Box(size), transform(np.eye(3), 0.5 * (low + high)))


def convex_pieces(vertices: FloatArray, triangles: IntArray) -> list[Any]:
    """Return convex shapes that together contain the surface of a mesh.

    A mesh is cut where that takes the most volume off its hulls, at most into eight pieces.
    """
    soup = _divided(vertices[triangles])
    rng = np.random.default_rng(0)
    whole = hull(vertices)
    if whole is None:
        return []
    done, open_ = list[Any](), [(soup, whole)]
    while open_:
        part, shape = open_.pop(0)
        halves = _best_cut(part, rng) if len(done) + len(open_) + 1 < _MOST_PIECES else None
        hulls = [(half, hull(half.reshape(-1, 3))) for half in halves or ()]
        if hulls and all(each is not None for _, each in hulls):
            open_ += hulls
        else:
            done.append(shape)
    return done


def _best_cut(soup: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray] | None:
    """Return the two parts of the cut across an axis that saves the most volume, or None if none is worth it."""
    few = soup if len(soup) <= _SAMPLE else soup[rng.choice(len(soup), _SAMPLE, replace=False)]
    volume, best = _volume(few), None
    least = max(_WORTH * volume, _LEAST)
    low, high = few.min(axis=(0, 1)), few.max(axis=(0, 1))
    for axis in range(3):
        for share in _TRIED:
            at = low[axis] + share * (high[axis] - low[axis])
            below, above = few[few[:, :, axis].min(axis=1) < at], few[few[:, :, axis].max(axis=1) > at]
            if not len(below) or not len(above):
                continue
            saved = volume - _volume(below) - _volume(above)
            if saved > least:
                least, best = saved, (axis, at)
    if best is None:
        return None
    axis, at = best
    return soup[soup[:, :, axis].min(axis=1) < at], soup[soup[:, :, axis].max(axis=1) > at]


def _volume(soup: FloatArray) -> float:
    """Return about the volume of a hull: that of the hull of its points that lie furthest in some directions."""
    points = soup.reshape(-1, 3)
    found = hull(points[np.unique(np.argmax(points @ _DIRECTIONS, axis=0))])
    return 0.0 if found is None else float(found.computeVolume())


def _divided(soup: FloatArray) -> FloatArray:
    """Return triangles [N, 3, 3] divided in four until no edge is longer than :data:`_EDGE`."""
    while len(soup) < _MOST_TRIANGLES:
        edges = np.linalg.norm(soup - np.roll(soup, -1, axis=1), axis=2).max(axis=1)
        long = soup[edges > _EDGE]
        if not len(long):
            break
        middle = 0.5 * (long + np.roll(long, -1, axis=1))  # of the edges 01, 12, 20
        corners = [np.stack((long[:, i], middle[:, i], middle[:, i - 1]), axis=1) for i in range(3)]
        soup = np.concatenate([soup[edges <= _EDGE], *corners, middle])
    return soup


def capsule_around(points: FloatArray) -> Piece:
    """Return a capsule around ``points`` [N, 3], along their longest direction."""
    centre = points.mean(axis=0)
    _, directions = np.linalg.eigh(np.cov((points - centre).T))
    z = directions[:, 2]
    x = directions[:, 1]
    rotation = np.stack((x, np.cross(z, x), z), axis=1)
    local = (points - centre) @ rotation
    middle = 0.5 * (local[:, :2].min(axis=0) + local[:, :2].max(axis=0))
    across = local[:, :2] - middle
    radius = float(np.sqrt((across**2).sum(axis=1).max()))
    # The ends are half spheres: the segment need only reach each point from its own height.
    reach = np.sqrt(np.maximum(radius**2 - (across**2).sum(axis=1), 0.0))
    low, high = float((local[:, 2] + reach).min()), float((local[:, 2] - reach).max())
    low, high = min(low, high), max(low, high)
    position = centre + rotation @ np.array([*middle, 0.5 * (low + high)])
    return Piece.of(library().Capsule(radius, max(high - low, 1e-6)), transform(rotation, position))


def corners(piece: Piece) -> FloatArray:
    """Return points [N, 3] whose hull contains ``piece``, in the frame of its joint."""
    if hasattr(piece.shape, "points"):
        points = np.asarray(piece.shape.points())
    else:
        box = piece.shape.aabb_local
        half = 0.5 * (np.asarray(box.max_) - np.asarray(box.min_))
        points = half * np.array(np.meshgrid(*[(-1, 1)] * 3)).reshape(3, -1).T
    found: FloatArray = points @ piece.place[:3, :3].T + piece.place[:3, 3]
    return found
