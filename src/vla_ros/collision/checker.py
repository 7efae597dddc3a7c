"""How near a robot's bodies come to each other and to obstacles along a motion, and whether that is allowed.

Spheres around all pieces find the pairs that may be near, for all samples of the motion at once; the distance of
those is that of the convex pieces (GJK and EPA). :mod:`~vla_ros.collision.bounds`
says why few samples need a query.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.collision.bounds import CURVED, MOST_SAMPLES, least_between, moves, samples_of
from vla_ros.collision.query import Query, Solids
from vla_ros.collision.shapes import library
from vla_ros.collision.world import World, named
from vla_ros.types import FloatArray, IntArray

_BETWEEN = 0.5  # of the hold distance, below which nothing comes between two samples
_FINE = 0.001  # m; motions that are not divided further
_LARGE = 0.15  # m, radius of a box's sphere
_ROUNDING = 1e-5  # m; smaller changes of a distance are none
_SLOWEST = 0.1  # share of the speed just above the hold distance
_HARMLESS = 0.1  # share of its distance from the hold distance that a pair may lose without being slowed
_ESCAPE = 25  # samples of a motion out of a collision, at least
_DENSER = 10  # times as many as of any other motion, up to the most
_CHUNK = 500  # samples
_ALL, _NONE = slice(None), np.zeros(0, np.int64)
_Two = tuple[float, float]


@dataclass(frozen=True)
class Margins:
    """How near bodies may come, m."""

    hold: float
    slow: float
    support: float  # as ``hold``, for fingertips at a support

    @property
    def support_slow(self) -> float:
        return self.support * (self.slow / self.hold if self.hold else 1.0)


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
        self._solids = Solids(pieces)
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
        # Half-spaces and large boxes that do not move are treated as such when pairs are selected.
        boxes = np.array([isinstance(shape, fcl.Box) for shape in self._solids.shapes], bool) & (radii > _LARGE)
        alone = np.flatnonzero((boxes | ~np.isfinite(radii)) & (self._frames == 0))  # [B]
        self._turned = self._places[alone, :3, :3].swapaxes(1, 2)
        self._moved = self._turned @ self._places[alone, :3, 3:]
        self._plane = ~np.isfinite(radii[alone])[:, None]
        halves = [getattr(self._solids.shapes[number], "halfSide", np.zeros(3)) for number in alone]
        self._halves = np.array(halves).reshape(-1, 3, 1)
        which = np.full(len(pieces), -1)
        which[alone] = np.arange(len(alone))
        self._which = which[self._second]  # [N], of which of these a row's second piece is, or -1
        self._sum = radii[self._first] + np.where(self._which < 0, radii[self._second], 0.0)
        rows = np.arange(len(ordered))
        self._signs = np.zeros((len(pieces), len(ordered)))  # for differences of a row's pieces
        self._signs[self._first, rows], self._signs[self._second, rows] = 1.0, -1.0
        moves = np.zeros((len(world.tree.names), len(pieces)), bool)
        for number, frame in enumerate(self._frames.tolist()):
            moves[world.tree.ancestors(frame), number] = True
        apart = moves[:, self._first] != moves[:, self._second]
        self._levers = apart * world.reach[:, None]  # [J, N], m that a row's pieces move apart per rad
        self._rows: list[list[int]] = [self._first.tolist(), self._second.tolist(), self._pair.tolist()]
        bodies = world.bodies
        self._supported = np.array(
            [
                (bodies[i].is_tip and bodies[j].is_support) or (bodies[j].is_tip and bodies[i].is_support)
                for i, j in world.pairs
            ],
            bool,
        )
        near = [named(bodies[i].name, bodies[j].name) in world.near for i, j in world.pairs]
        self._is_near = np.array(near, bool)
        self._held = [tuple(filter(None, (bodies[i].held_by, bodies[j].held_by))) for i, j in world.pairs]
        self._has_held = any(self._held)
        self._limits = dict[Margins, tuple[list[float], list[float], FloatArray]]()

    def check(
        self,
        path: FloatArray,
        margins: Margins,
        closed: Collection[str] = (),
        others: FloatArray | None = None,
        beside: FloatArray | None = None,
    ) -> Clearance:
        """Check the motion through ``path`` [W, J]; ``closed`` names the arms whose gripper is closed.

        Between two samples, a distance may be smaller than was found, down to half of the hold distance. ``others``
        [D, W, J] are motions that may take the place of ``path``, in order, with all between neighbours: they do
        not slow, but forbid, what comes too near; between their samples, bodies do not touch. Each motion of
        ``beside`` [D, W, J] is checked as ``path`` is, and may begin elsewhere.
        """
        if not len(self._pair):
            return Clearance(math.inf, ("", ""))
        idle, sweep = self._idle(closed), _Sweep(self, *samples_of(path, self.world.reach))
        found = sweep.find(margins, idle)
        for way in beside if beside is not None else ():
            if not found.forbidden and (rows := self._near(sweep, way - path, margins)).size:
                other = _Sweep(self, *samples_of(way, self.world.reach)).find(margins, idle, rows)
                found = other if other.forbidden or other.share < found.share else found
        if others is None or found.forbidden:
            return found
        never = replace(margins, slow=margins.hold)
        rows = self._near(sweep, np.abs(others - path).max(axis=0), never)
        if not rows.size:
            return found
        # There with one, back with the next, and along where they end.
        there = [way[:: (-1) ** number] for number, way in enumerate(others)]
        way = np.concatenate([*there, others[::-1, -1], others[:, -2]])
        other = _Sweep(self, *samples_of(way, self.world.reach)).find(never, idle, rows)
        return other if other.forbidden else found

    def _near(self, sweep: "_Sweep", apart: FloatArray, margins: Margins) -> IntArray:
        """Return the rows that may come near on a way with waypoints ``apart`` [W, J] from those of ``sweep``."""
        spread = (np.abs(apart) @ self._levers).max(axis=0)
        return np.flatnonzero(sweep.room() - spread < self.limits(margins)[2])

    def nearest(self, q: FloatArray, closed: Collection[str] = ()) -> Clearance:
        """Return the smallest distance at positions ``q`` [J]."""
        return self.check(q[None], _ANY, closed)

    def distances(self, pair: int, q: FloatArray, near: float) -> FloatArray:
        """Return the distances of a pair of bodies at ``q`` [K, J]; lower bounds if they exceed ``near``."""
        rows, found = np.flatnonzero(self._pair == pair), list[float]()
        for start in range(0, len(q), _CHUNK):
            found += _Sweep(self, q[start : start + _CHUNK]).least(rows, near)
        return np.array(found)

    def limits(self, margins: Margins) -> tuple[list[float], list[float], FloatArray]:
        """Return below which distance, in m, each pair of bodies holds and slows, and the latter for each row.

        A row is a pair of pieces of two bodies.
        """
        found = self._limits.get(margins)
        if found is None:
            hold = np.where(self._supported, margins.support, margins.hold)
            slow = np.where(self._supported, margins.support_slow, margins.slow)
            slow = np.where(self._is_near & (margins is not _ANY), hold, slow)
            found = hold.tolist(), slow.tolist(), slow[self._pair]
            self._limits = {**(self._limits if len(self._limits) < 4 else {}), margins: found}
        return found

    def _idle(self, closed: Collection[str]) -> IntArray:
        """Return the rows of what is held only by grippers that are open."""
        if not self._has_held:
            return _NONE
        idle = np.array([any(arm not in closed for arm in held) for held in self._held])
        return np.flatnonzero(idle[self._pair])


class _Sweep:
    """Samples of a motion [K, J], and distances at them."""

    def __init__(self, checker: Checker, samples: FloatArray, step: float = 0.0) -> None:
        self._c, self._samples, self._slack = checker, samples, 0.5 * step
        self._query = Query(checker._solids, signed=not step)
        self._extra: dict[float, FloatArray] = {}
        self._at = self._transforms(samples)  # [P, K, 4, 4]
        self._turns, self._points = self._at[..., :3, :3], self._at[..., :3, 3]

    def _transforms(self, samples: FloatArray) -> FloatArray:
        checker = self._c
        frames = checker.world.tree.forward(samples)[checker._frames]
        found: FloatArray = (frames.reshape(len(frames), -1, 4) @ checker._places).reshape(frames.shape)
        return found

    def find(self, margins: Margins, idle: IntArray, among: Any = _ALL) -> Clearance:
        """Judge the motion by the rows ``among``."""
        checker = self._c
        holds, slows, slow = checker.limits(margins)
        least = np.full(len(slow), math.inf)
        lower = self.lower(among)
        least[among] = lower.min(axis=0) - self._slack
        least[idle] = np.inf
        rows = np.flatnonzero(least < slow)
        rows = rows[least[rows].argsort()]  # what is found for the first rows of a pair spares queries of others
        columns = rows if among is _ALL else np.searchsorted(among, rows)
        seen, bounds = self._relative(rows), lower.T[columns]
        moved = moves(seen[:, 1:] - seen[:, :-1])
        self._seen = least, rows, bounds, moved
        passed = np.zeros_like(bounds)
        np.cumsum(moved, axis=1, out=passed[:, 1:])
        starts, found, used = dict[int, float](), dict[int, float](), dict[int, list[int]]()
        for number in np.flatnonzero(least_between(bounds, moved) < slow[rows]).tolist():
            row = int(rows[number])
            pair = checker._rows[2][row]
            known, limits = (starts.get(pair, math.inf), found.get(pair, math.inf)), (holds[pair], slows[pair])
            used.setdefault(pair, []).append(row)
            if known[0] >= limits[0]:
                places = passed[number] if among is _ALL else seen[number]
                known = self._search(row, bounds[number], places, moved[number], limits, known)
                starts[pair], found[pair] = known
                if known[1] < limits[0] <= known[0]:
                    return self._finding(pair, known[1], forbidden=True)
        if not found:
            row = int(least.argmin())
            return Clearance(float(least[row] + self._slack), self._names(checker._rows[2][row]))
        share, below = 1.0, list[int]()
        for pair, smallest in found.items():
            first, hold, most = starts[pair], holds[pair], slows[pair]
            if first < hold:
                below.append(pair)
            elif smallest < most and smallest < first - _ROUNDING:
                harmless = _HARMLESS * (first - hold) / (first - smallest)
                share = min(share, max(_SLOWEST, (smallest - hold) / (most - hold), harmless))
        if below:
            kept = self._not_escaping({pair: used[pair] for pair in below})
            if kept is not None:
                return self._finding(kept, found[kept], forbidden=True)
        worst = min(found, key=lambda pair: found[pair])
        return self._finding(worst, found[worst], share)

    def room(self) -> FloatArray:
        """Return how near the rows [N] come at most along the motion, by what :meth:`find` found."""
        least, rows, bounds, moved = self._seen
        least[rows] = least_between(bounds, moved)
        return least

    def _search(
        self, row: int, bounds: FloatArray, places: FloatArray, moved: FloatArray, limits: _Two, known: _Two
    ) -> _Two:
        """Return a pair's distance at the start, and the smallest one along the motion if it matters.

        Samples are asked in the order of their lower ``bounds`` [K], which each answer raises, until the smallest
        distance is known well enough. ``limits`` are the distances below which to hold and to be slow; ``known`` is
        what other pieces of the same bodies have at the start and at least. ``places`` are lengths of the way [K],
        which take less time, or what :meth:`_relative` returns, [K, 12], for ways that come back.
        """
        (hold, slow), (first, least), asked = limits, known, dict[int, float]()

        def ask(at: int) -> float:
            if at not in asked:
                asked[at] = self.distance(row, at)
                change = places - places[at]
                change = np.abs(change, out=change) if change.ndim == 1 else moves(change)
                np.maximum(bounds, asked[at] - change, out=bounds)
            return asked[at]

        here = ask(0) if bounds[0] < min(slow, first) else float(bounds[0])
        first, least = min(first, here), min(least, here)
        while first >= hold <= least:
            at = int(bounds.argmin())
            if at in asked or bounds[at] >= min(slow, max(hold, least - _HARMLESS * (least - hold))):
                break
            least = min(least, ask(at))
        if first < hold or least < hold:
            return first, least
        floor = 2.0 * _BETWEEN * hold if places.ndim == 1 else 0.0
        for at in np.flatnonzero(bounds[1:] + bounds[:-1] - moved < floor).tolist():
            ends = (float(at), ask(at)), (float(at + 1), ask(at + 1))
            least = min(least, self._inside(row, *ends, float(moved[at]), floor))
            if least < hold:
                break
        return first, least

    def _not_escaping(self, below: Mapping[int, list[int]]) -> int | None:
        """Return None if the motion brings none of these pairs nearer and one of them apart; else a pair."""
        count = len(self._samples)
        at = np.linspace(0, count - 1, max(_ESCAPE, min(MOST_SAMPLES, _DENSER * count), count))
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
        checker, count = self._c, len(self._samples)
        centres = self._points.transpose(2, 1, 0).reshape(3, -1)  # [3, K * P]
        apart = (centres.reshape(3 * count, -1) @ checker._signs[:, rows]).reshape(3, count, -1)
        size = np.sqrt(np.einsum("ikn,ikn->kn", apart, apart))
        if (own := np.flatnonzero(checker._which[rows] >= 0)).size:
            beyond = checker._turned @ centres - checker._moved  # [B, 3, K * P]
            height, beyond = beyond[:, 2], np.abs(beyond) - checker._halves
            outside = np.maximum(beyond, 0.0)
            beside = np.sqrt(np.einsum("bik,bik->bk", outside, outside)) + np.minimum(beyond.max(axis=1), 0.0)
            beside = np.where(checker._plane, height, beside).reshape(len(beside), count, -1)
            size[:, own] = beside[checker._which[rows][own], :, checker._first[rows][own]].T
        found: FloatArray = size - checker._sum[rows]
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
        """Return the first pieces' places relative to the second ones, [R, K, 12], for :func:`moves`."""
        first, second = self._at[self._c._first[rows]], self._at[self._c._second[rows]]
        first[..., 3] -= second[..., 3]
        seen: FloatArray = second[..., :3, :3].swapaxes(2, 3) @ first[..., :3, :]
        seen[..., :3] *= math.sqrt(0.5) * self._c._radii[self._c._first[rows], None, None, None]
        return seen.reshape(*seen.shape[:2], 12)

    def _inside(self, row: int, start: _Two, end: _Two, moved: float, floor: float) -> float:
        """Return the smallest distance between two samples (number, distance); divides where it is unclear."""
        (a, here), (b, there) = start, end
        if here + there - moved >= floor or moved < _FINE:
            return min(here, there)
        middle = 0.5 * (a + b)
        found, half = (middle, self.distance(row, middle)), 0.5 * moved * CURVED
        return min(self._inside(row, start, found, half, floor), self._inside(row, found, end, half, floor))

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
        return self._query.distance(a, b, at, whole, turns, points)
