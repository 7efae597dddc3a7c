"""How near a robot's bodies come to each other and to obstacles along a motion, and whether that is allowed.

Spheres around all pieces find the pairs that may be near, for all samples of the motion at once; the distance of
those is that of the convex pieces (GJK and EPA). Between two samples with the distances d and e, no point of one
body moves further than s relative to the other, so the bodies are never nearer than (d + e - s) / 2.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_ros.collision.shapes import library
from vla_ros.collision.world import World, named
from vla_ros.types import FloatArray, IntArray

_STEP = 0.05  # m; samples are so dense that nothing moves further between two of them
_MOST = 64  # samples of a motion
_CURVED = 1.02  # a path is longer than its chord
_FINE = 0.001  # m; between samples nearer to each other, a distance is at most half of this smaller
_LARGE = 0.15  # m, radius of a box's sphere
_ROUNDING = 1e-5  # m; smaller changes of a distance are none
_SLOWEST = 0.1  # share of the speed just above the stop distance
_HARMLESS = 0.1  # share of its distance from the stop distance that a pair may lose without being slowed
_ESCAPE = 25  # samples of a motion out of a collision
_CHUNK = 500  # samples
_ALL, _NONE = slice(None), np.zeros(0, np.int64)


@dataclass(frozen=True)
class Margins:
    """How near bodies may come, m."""

    stop: float
    slow: float
    support: float  # as ``stop``, for fingertips at a support

    @property
    def support_slow(self) -> float:
        return self.support * (self.slow / self.stop if self.stop else 1.0)


_ANY = Margins(-10.0, 10.0, -10.0)


@dataclass(frozen=True)
class Clearance:
    """The smallest distance between bodies along a motion, and the share of the motion that is allowed."""

    distance: float  # smallest distance; for pairs that are never near, of spheres around them; m
    bodies: tuple[str, str]  # the pair with that distance, or the one that forbids the motion
    share: float = 1.0  # of the motion that may be executed in the same time
    forbidden: bool = False
    with_scene: bool = False  # one of ``bodies`` is an obstacle


class Checker:
    """Checks motions in a world. Holds no state, so that any thread may call it."""

    def __init__(self, world: World) -> None:
        self.world = world
        pieces = [(piece, index) for index, body in enumerate(world.bodies) for piece in body.pieces]
        body_of = np.array([index for _, index in pieces], np.int64)
        self._shapes = [piece.shape for piece, _ in pieces]
        self._frames = np.array([world.bodies[index].frame for index in body_of], np.int64)
        self._places = np.array([piece.place for piece, _ in pieces]).reshape(-1, 1, 4, 4)
        radii = np.array([piece.radius for piece, _ in pieces])
        self._radii = np.where(np.isfinite(radii), radii, 0.0)
        members = [np.flatnonzero(body_of == index) for index in range(len(world.bodies))]
        crossed = [
            (a, b, number) for number, (i, j) in enumerate(world.pairs) for a in members[i] for b in members[j]
        ]
        # The second one of a pair is the larger: an obstacle, whose form counts when pairs are selected.
        ordered = [(b, a, n) if radii[a] > radii[b] else (a, b, n) for a, b, n in crossed]
        self._first, self._second, self._pair = np.array(ordered, np.int64).reshape(-1, 3).T
        fcl = library()
        # Half-spaces and large boxes are treated as such when pairs are selected, other pieces as spheres.
        self._planes = ~np.isfinite(radii[self._second])
        boxes = np.array([isinstance(self._shapes[b], fcl.Box) and radii[b] > _LARGE for b in self._second], bool)
        halves = [getattr(shape, "halfSide", np.zeros(3)) for shape in self._shapes]
        self._halves = np.array(halves).reshape(-1, 3)[self._second]
        self._alone = self._planes | boxes
        self._sum = self._radii[self._first] + np.where(self._alone, 0.0, self._radii[self._second])
        self._rows: list[list[int]] = [self._first.tolist(), self._second.tolist(), self._pair.tolist()]
        bodies = world.bodies
        self._supported = np.array(
            [
                (bodies[i].is_tip and bodies[j].is_support) or (bodies[j].is_tip and bodies[i].is_support)
                for i, j in world.pairs
            ],
            bool,
        )
        near = np.array([world.near.get(named(bodies[i].name, bodies[j].name), np.nan) for i, j in world.pairs])
        self._is_near = np.isfinite(near)
        self._closest = np.where(near > 0, 0.5 * near, math.inf)  # largest stop distance of each pair
        self._held = [tuple(filter(None, (bodies[i].held_by, bodies[j].held_by))) for i, j in world.pairs]
        self._has_held = any(self._held)

    def check(self, path: FloatArray, margins: Margins, closed: Collection[str] = ()) -> Clearance:
        """Check the motion through ``path`` [W, J]; ``closed`` names the arms whose gripper is closed."""
        if not len(self._pair):
            return Clearance(math.inf, ("", ""))
        return _Sweep(self, _sampled(path, self.world.reach)).find(margins, self._idle(closed))

    def nearest(self, q: FloatArray, closed: Collection[str] = ()) -> Clearance:
        """Return the smallest distance at positions ``q`` [J]."""
        return self.check(q[None], _ANY, closed)

    def distances(self, pair: int, q: FloatArray, near: float) -> FloatArray:
        """Return the distances of a pair of bodies at ``q`` [K, J]; lower bounds if they exceed ``near``."""
        rows, found = np.flatnonzero(self._pair == pair), np.empty(len(q))
        for start in range(0, len(q), _CHUNK):
            sweep = _Sweep(self, q[start : start + _CHUNK])
            lower = sweep.lower(rows)
            for row, bounds in zip(rows.tolist(), lower, strict=True):
                for at in np.flatnonzero(bounds <= near).tolist():
                    bounds[at] = sweep.distance(row, at)
            found[start : start + _CHUNK] = lower.min(axis=0)
        return found

    def _idle(self, closed: Collection[str]) -> IntArray:
        """Return the rows of what is held only by grippers that are open."""
        if not self._has_held:
            return _NONE
        idle = np.array([any(arm not in closed for arm in held) for held in self._held])
        return np.flatnonzero(idle[self._pair])


class _Sweep:
    """Samples of a motion [K, J], and distances at them."""

    def __init__(self, checker: Checker, samples: FloatArray) -> None:
        fcl = library()
        self._c, self._samples = checker, samples
        self._place: Any = getattr(fcl, "Transform3s", None) or fcl.Transform3f
        self._distance_of, self._request, self._result = fcl.distance, fcl.DistanceRequest(), fcl.DistanceResult()
        self._where: dict[tuple[int, float], Any] = {}
        self._extra: dict[float, FloatArray] = {}
        self._at = self._transforms(samples)  # [P, K, 4, 4]

    def _transforms(self, samples: FloatArray) -> FloatArray:
        checker = self._c
        found: FloatArray = checker.world.tree.forward(samples)[checker._frames] @ checker._places
        return found

    def find(self, margins: Margins, idle: IntArray) -> Clearance:
        checker = self._c
        lower = self.lower(_ALL)
        slow = np.where(checker._supported, margins.support_slow, margins.slow)[checker._pair]
        moves = _moved(self._at, checker._radii).max(axis=1, initial=0.0)  # at most, between two samples
        lower[idle] = np.inf
        near = lower.min(axis=1) - 0.5 * (moves[checker._first] + moves[checker._second])
        rows = np.flatnonzero(near < slow)
        relative = self._relative(rows)
        keep = _between(lower[rows], relative).min(axis=1, initial=np.inf) < slow[rows]
        rows, relative = rows[keep], relative[keep]
        if not len(rows):
            row = int(np.argmin(lower.min(axis=1)))
            return Clearance(float(lower[row].min()), self._names(int(checker._pair[row])))
        return self._judge(rows, lower[rows], relative, slow, margins)

    def _judge(
        self, rows: IntArray, lower: FloatArray, relative: FloatArray, slow: FloatArray, margins: Margins
    ) -> Clearance:
        checker = self._c
        starts, least, used = dict[int, float](), dict[int, float](), dict[int, list[int]]()
        wanted = np.where(checker._supported, margins.support, margins.stop)
        stops: list[float] = np.minimum(wanted, checker._closest).tolist()
        for row, bounds, motion in zip(rows.tolist(), lower.tolist(), relative.tolist(), strict=True):
            pair = checker._rows[2][row]
            first, smallest = self._follow(row, bounds, motion, float(slow[row]), stops[pair])
            starts[pair] = min(first, starts.get(pair, math.inf))
            least[pair] = min(smallest, least.get(pair, math.inf))
            used.setdefault(pair, []).append(row)
        share, below = 1.0, list[int]()
        for pair, smallest in least.items():
            first, stop = starts[pair], stops[pair]
            most = margins.support_slow if checker._supported[pair] else margins.slow
            if first < stop:
                below.append(pair)
            elif smallest < stop:
                return self._finding(pair, smallest, forbidden=True)
            elif smallest < most and smallest < first - _ROUNDING and not checker._is_near[pair]:
                harmless = _HARMLESS * (first - stop) / (first - smallest)
                share = min(share, max(_SLOWEST, (smallest - stop) / (most - stop), harmless))
        if below:
            kept = self._not_escaping({pair: used[pair] for pair in below})
            if kept is not None:
                return self._finding(kept, least[kept], forbidden=True)
        worst = min(least, key=lambda pair: least[pair])
        return self._finding(worst, least[worst], share)

    def _not_escaping(self, below: Mapping[int, list[int]]) -> int | None:
        """Return None if the motion brings none of these pairs nearer and one of them apart; else a pair."""
        at, count = np.linspace(0, len(self._samples) - 1, _ESCAPE), len(self._samples)
        dense = [np.interp(at, np.arange(count), column) for column in self._samples.T]
        fine, apart = _Sweep(self._c, np.stack(dense, axis=1)), False
        for pair, rows in below.items():
            first, *later = [min(fine.distance(row, step) for row in rows) for step in range(_ESCAPE)]
            if min(later) < first - _ROUNDING:
                return pair
            apart = apart or later[-1] > first + _ROUNDING
        return None if apart else next(iter(below))

    def _finding(self, pair: int, distance: float, share: float = 1.0, forbidden: bool = False) -> Clearance:
        scene = any(self._c.world.bodies[index].is_scene for index in self._c.world.pairs[pair])
        return Clearance(distance, self._names(pair), share, forbidden, scene)

    def _names(self, pair: int) -> tuple[str, str]:
        first, second = (self._c.world.bodies[index].name for index in self._c.world.pairs[pair])
        return first, second

    def lower(self, rows: Any) -> FloatArray:
        """Return lower bounds [N, K] of the distances of pairs of pieces."""
        checker, centres = self._c, np.ascontiguousarray(self._at[..., :3, 3])
        second = checker._second[rows]
        apart = centres.take(checker._first[rows], axis=0) - centres.take(second, axis=0)
        size = np.sqrt(np.einsum("nki,nki->nk", apart, apart))
        if (own := np.flatnonzero(checker._alone[rows])).size:
            turned = np.einsum("nki,nkij->nkj", apart[own], self._at[second[own], :, :3, :3])
            outside = np.maximum(np.abs(turned) - checker._halves[rows][own, None], 0.0)
            beside = np.sqrt(np.einsum("nki,nki->nk", outside, outside))
            size[own] = np.where(checker._planes[rows][own, None], turned[..., 2], beside)
        found: FloatArray = size - checker._sum[rows][:, None]
        return found

    def _relative(self, rows: IntArray) -> FloatArray:
        """Return how far points of the first piece move relative to the second one, [N, K - 1], m."""
        first, second = self._at[self._c._first[rows]], self._at[self._c._second[rows]]
        first[..., 3] -= second[..., 3]
        seen = np.einsum("nkji,nkjl->nkil", second[..., :3, :3], first[..., :3, :])
        return _moved(seen, self._c._radii[self._c._first[rows]])

    def _follow(
        self, row: int, lower: list[float], motion: list[float], slow: float, stop: float
    ) -> tuple[float, float]:
        """Return a pair's distance at the start, and the smallest one along the motion if it is below ``slow``."""
        last, at = len(motion), 0
        first = here = least = self.distance(row, 0) if lower[0] < slow else lower[0]
        while at < last:
            to, moved = at + 1, motion[at]
            while to < last and here - moved - motion[to] > slow:
                moved += motion[to]
                to += 1
            if here - moved > slow and to == last:
                break
            there = self.distance(row, to) if lower[to] < slow else lower[to]
            least = min(least, there)
            if 0.5 * (here + there - moved) < stop <= least:
                least = min(least, self._inside(row, (float(at), here), (float(to), there), moved, stop))
            at, here = to, there
        return first, least

    def _inside(
        self, row: int, start: tuple[float, float], end: tuple[float, float], moved: float, stop: float
    ) -> float:
        """Return the smallest distance between two samples (number, distance); divides where it is unclear."""
        (a, here), (b, there) = start, end
        least = min(here, there)
        if least < stop or moved < _FINE or 0.5 * (here + there - moved) >= stop:
            return least
        middle = 0.5 * (a + b)
        found = middle, self.distance(row, middle)
        return min(
            self._inside(row, start, found, 0.5 * moved * _CURVED, stop),
            self._inside(row, found, end, 0.5 * moved * _CURVED, stop),
        )

    def distance(self, row: int, at: float) -> float:
        """Return the distance of a pair of pieces at a sample, or between two samples."""
        checker = self._c
        a, b = checker._rows[0][row], checker._rows[1][row]
        self._result.clear()
        places = self._placed(a, at), self._placed(b, at)
        found = self._distance_of(
            checker._shapes[a], places[0], checker._shapes[b], places[1], self._request, self._result
        )
        return float(found)

    def _placed(self, piece: int, at: float) -> Any:
        key = piece, at
        if key not in self._where:
            whole = int(at)
            if at == whole:
                matrix = self._at[piece, whole]
            else:
                if at not in self._extra:
                    share = at - whole
                    q = (1 - share) * self._samples[whole] + share * self._samples[whole + 1]
                    self._extra[at] = self._transforms(q[None])[:, 0]
                matrix = self._extra[at][piece]
            self._where[key] = self._place(matrix[:3, :3], matrix[:3, 3])
        return self._where[key]


def _between(lower: FloatArray, moves: FloatArray) -> FloatArray:
    """Return lower bounds [N, K - 1] between samples; without motion, those at the sample."""
    if lower.shape[1] == 1:
        return lower.copy()
    found: FloatArray = 0.5 * (lower[:, :-1] + lower[:, 1:] - moves)
    return found


def _moved(at: FloatArray, radii: FloatArray) -> FloatArray:
    """Return how far points within ``radii`` [N] move between transforms [N, K, 3 or 4, 4]."""
    change = at[:, 1:, :3] - at[:, :-1, :3]
    squares = change * change
    turned = np.sqrt(0.5 * squares[..., :3].sum(axis=(-1, -2)))  # about the angle, rad
    found: FloatArray = _CURVED * (np.sqrt(squares[..., 3].sum(axis=-1)) + radii[:, None] * turned)
    return found


def _sampled(path: FloatArray, reach: FloatArray) -> FloatArray:
    """Return samples [K, J] of the motion through ``path`` [W, J]."""
    steps = path[1:] - path[:-1]
    lengths: list[float] = (np.abs(steps) @ reach).tolist()
    step = max(_STEP, sum(lengths) / _MOST)
    counts = [math.ceil(length / step) for length in lengths]
    part = [number for number, count in enumerate(counts) for _ in range(count)]
    share = np.array([each / count for count in counts for each in range(1, count + 1)])
    return np.concatenate([path[:1], path[part] + share[:, None] * steps[part]])
