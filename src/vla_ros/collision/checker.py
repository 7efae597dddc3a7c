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
_ESCAPE = 25  # samples of a motion out of a collision, at least
_CHUNK = 500  # samples
_ALL, _NONE = slice(None), np.zeros(0, np.int64)
_Two = tuple[float, float]


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
        self._places = np.array([piece.place for piece, _ in pieces]).reshape(-1, 4, 4)
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
        boxes = np.array([isinstance(shape, fcl.Box) for shape in self._shapes], bool) & (radii > _LARGE)
        self._alone = np.flatnonzero(boxes | ~np.isfinite(radii))  # [B]
        self._plane = ~np.isfinite(radii[self._alone])[:, None, None]
        halves = [getattr(self._shapes[number], "halfSide", np.zeros(3)) for number in self._alone]
        self._halves = np.array(halves).reshape(-1, 1, 3, 1)
        which = np.full(len(pieces), -1)
        which[self._alone] = np.arange(len(self._alone))
        self._which = which[self._second]  # [N], of which of these a row's second piece is, or -1
        self._sum = self._radii[self._first] + np.where(self._which < 0, self._radii[self._second], 0.0)
        rows = np.arange(len(ordered))
        self._signs = np.zeros((2, len(pieces), len(ordered)))  # for sums and differences of a row's pieces
        self._signs[:, self._first, rows] = self._signs[0, self._second, rows] = 1.0
        self._signs[1, self._second, rows] = -1.0
        self._turned = np.zeros((len(world.tree.names), len(pieces)))  # radius, where a joint moves the piece
        for number, frame in enumerate(self._frames.tolist()):
            self._turned[world.tree.ancestors(frame), number] = self._radii[number]
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
        rows, found = np.flatnonzero(self._pair == pair), list[float]()
        for start in range(0, len(q), _CHUNK):
            found += _Sweep(self, q[start : start + _CHUNK]).least(rows, near)
        return np.array(found)

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
        place = getattr(fcl, "Transform3s", None) or fcl.Transform3f
        self._places, self._distance_of = (place(), place()), fcl.distance
        self._request, self._result = fcl.DistanceRequest(), fcl.DistanceResult()
        self._extra: dict[float, FloatArray] = {}
        self._at = self._transforms(samples)  # [P, K, 4, 4]
        self._turns, self._points = self._at[..., :3, :3], self._at[..., :3, 3]
        self._centres = np.ascontiguousarray(self._points.transpose(1, 2, 0))  # [K, 3, P]

    def _transforms(self, samples: FloatArray) -> FloatArray:
        checker = self._c
        frames = checker.world.tree.forward(samples)[checker._frames]
        found: FloatArray = (frames.reshape(len(frames), -1, 4) @ checker._places).reshape(frames.shape)
        return found

    def find(self, margins: Margins, idle: IntArray) -> Clearance:
        checker = self._c
        lower = self.lower(_ALL)
        slow = np.where(checker._supported, margins.support_slow, margins.slow)[checker._pair]
        lower[:, idle] = np.inf
        rows = np.flatnonzero(_between(lower, self._moves()).min(axis=0) < slow)
        relative = self._relative(rows)
        keep = _between(lower[:, rows], relative).min(axis=0, initial=np.inf) < slow[rows]
        if not keep.any():
            row = int(np.argmin(lower.min(axis=0)))
            return Clearance(float(lower[:, row].min()), self._names(int(checker._pair[row])))
        return self._judge(rows[keep], lower[:, rows[keep]].T, relative[:, keep].T, slow, margins)

    def _judge(
        self, rows: IntArray, lower: FloatArray, relative: FloatArray, slow: FloatArray, margins: Margins
    ) -> Clearance:
        checker = self._c
        starts, least, used = dict[int, float](), dict[int, float](), dict[int, list[int]]()
        wanted = np.where(checker._supported, margins.support, margins.stop)
        stops: list[float] = np.minimum(wanted, checker._closest).tolist()
        order = lower.min(axis=1).argsort()  # what is found for the first rows of a pair spares queries of others
        for row, bounds, motion in zip(*(each[order].tolist() for each in (rows, lower, relative)), strict=True):
            pair = checker._rows[2][row]
            known = starts.get(pair, math.inf), least.get(pair, math.inf)
            starts[pair], least[pair] = self._follow(row, bounds, motion, (float(slow[row]), stops[pair]), known)
            used.setdefault(pair, []).append(row)
        share, below = 1.0, list[int]()
        for pair, smallest in sorted(least.items()):
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
        count = len(self._samples)
        at = np.linspace(0, count - 1, max(_ESCAPE, count))
        dense = [np.interp(at, np.arange(count), column) for column in self._samples.T]
        fine, apart = _Sweep(self._c, np.stack(dense, axis=1)), False
        for pair, rows in below.items():
            first, *later = fine.least(np.array(rows), math.inf)
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
        """Return lower bounds [K, N] of the distances of pairs of pieces."""
        checker, centres = self._c, self._centres
        apart = (centres.reshape(-1, centres.shape[2]) @ checker._signs[1][:, rows]).reshape(len(centres), 3, -1)
        size = np.sqrt(np.einsum("kin,kin->kn", apart, apart))
        if (own := np.flatnonzero(checker._which[rows] >= 0)).size:
            alone = self._at[checker._alone]
            seen = alone[..., :3, :3].swapaxes(2, 3) @ (centres - alone[..., :3, 3:])  # [B, K, 3, P]
            beyond = np.abs(seen) - checker._halves
            outside = np.maximum(beyond, 0.0)
            beside = np.sqrt(np.einsum("bkip,bkip->bkp", outside, outside)) + np.minimum(beyond.max(axis=2), 0.0)
            beside = np.where(checker._plane, seen[:, :, 2], beside)
            size[:, own] = beside[checker._which[rows][own], :, checker._first[rows][own]].T
        found: FloatArray = size - checker._sum[rows]
        return found

    def _moves(self) -> FloatArray:
        """Return how far pairs of pieces move at most between two samples, [K - 1, N], m."""
        steps = self._centres[1:] - self._centres[:-1]
        turned = np.abs(self._samples[1:] - self._samples[:-1]) @ self._c._turned
        each = np.sqrt(np.einsum("kip,kip->kp", steps, steps)) + turned
        found: FloatArray = _CURVED * (each @ self._c._signs[0])
        return found

    def least(self, rows: IntArray, near: float) -> list[float]:
        """Return the smallest distance of pairs of pieces at each sample; a lower bound if it exceeds ``near``."""
        lower, found = self.lower(rows), list[float]()
        for at, (order, bounds) in enumerate(zip(lower.argsort(axis=1).tolist(), lower.tolist(), strict=True)):
            least = math.inf
            for number in order:
                if bounds[number] >= least:
                    break
                near_it = bounds[number] <= near
                least = min(least, self.distance(int(rows[number]), at) if near_it else bounds[number])
            found.append(least)
        return found

    def _relative(self, rows: IntArray) -> FloatArray:
        """Return how far points of the first piece move relative to the second one, [K - 1, N], m."""
        first, second = self._at[self._c._first[rows]], self._at[self._c._second[rows]]
        first[..., 3] -= second[..., 3]
        seen = second[..., :3, :3].swapaxes(2, 3) @ first[..., :3, :]
        change = seen[:, 1:] - seen[:, :-1]
        turned = np.sqrt(0.5 * np.einsum("nkij,nkij->kn", change[..., :3], change[..., :3]))  # about the angle, rad
        moved = np.sqrt(np.einsum("nki,nki->kn", change[..., 3], change[..., 3]))
        found: FloatArray = _CURVED * (moved + turned * self._c._radii[self._c._first[rows]])
        return found

    def _follow(self, row: int, lower: list[float], motion: list[float], limits: _Two, known: _Two) -> _Two:
        """Return a pair's distance at the start, and the smallest one along the motion if it is below ``slow``.

        ``limits`` are the distances below which to be slow and to stop; ``known`` is what other pieces of the same
        bodies have at the start and at least. Where a piece cannot be nearer than these, a bound takes the place of
        its distance.
        """
        (slow, stop), (first, least) = limits, known
        here = lower[0]
        is_bound = here >= (min(slow, first) if first >= stop else slow)
        if not is_bound:
            here = self.distance(row, 0)
        own, first, least = here, min(first, here), min(least, here)
        for at, moved in enumerate(motion):
            bound, sphere = here - moved, lower[at + 1]
            there = max(bound, sphere)
            was_bound, is_bound = is_bound, there >= (min(slow, least) if least >= stop else slow)
            is_bound = is_bound and bound + there >= 2.0 * stop
            if not is_bound:
                there = self.distance(row, at + 1) if sphere < slow else sphere
            if not is_bound or sphere >= bound:
                own = min(own, there)
            if bound + there < 2.0 * stop <= 2.0 * own:
                if was_bound and lower[at] < slow:
                    here = self.distance(row, at)
                own = min(own, self._inside(row, (float(at), here), (float(at + 1), there), moved, stop))
            here, least = there, min(least, own)
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
        whole, turns, points = int(at), self._turns, self._points
        if at != whole:
            if at not in self._extra:
                share = at - whole
                q = (1 - share) * self._samples[whole] + share * self._samples[whole + 1]
                self._extra[at] = self._transforms(q[None])
            turns, points = self._extra[at][..., :3, :3], self._extra[at][..., :3, 3]
            whole = 0
        self._places[0].setTransform(turns[a, whole], points[a, whole])
        self._places[1].setTransform(turns[b, whole], points[b, whole])
        self._result.clear()
        found = self._distance_of(
            checker._shapes[a], self._places[0], checker._shapes[b], self._places[1], self._request, self._result
        )
        return float(found)


def _between(lower: FloatArray, moves: FloatArray) -> FloatArray:
    """Return lower bounds [K - 1, N] between samples; without motion, those at the sample."""
    if len(lower) == 1:
        return lower
    found: FloatArray = 0.5 * (lower[:-1] + lower[1:] - moves)
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
