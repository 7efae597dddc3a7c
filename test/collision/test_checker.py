"""Distances along motions, compared with dense samples, and what is allowed."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tiny_robot import world_of

from vla_ros.collision.checker import Checker, Margins
from vla_ros.collision.world import World

MARGINS = Margins(hold=0.01, slow=0.05, support=0.002)
OBSTACLES = [
    "table = box 2 2 0.2 at 0 0 -0.15 support",
    "post = cylinder 0.05 1 at 0.45 0 0.5",
    "ball = sphere 0.1 at -0.5 0 0.4",
]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(tmp_path, obstacles=OBSTACLES)


def dense(checker: Checker, path: np.ndarray, count: int = 100) -> np.ndarray:
    """Distances [pairs, samples] along a motion."""
    share = np.linspace(0, 1, count)[:, None]
    q = np.concatenate([(1 - share) * a + share * b for a, b in pairwise(path)])
    return np.array([checker.distances(pair, q, 0.05) for pair in range(len(checker.world.pairs))])


def test_no_motion_is_allowed_that_comes_nearer_than_the_hold_distance(world: World) -> None:
    """Long random motions, compared with the distances at 300 positions along each."""
    checker, rng = Checker(world), np.random.default_rng(0)
    stop = np.array(checker.limits(MARGINS)[0])
    allowed = held = clear_and_held = 0
    for _ in range(60):
        start = np.array([*rng.uniform((-2, -2.5, 0), (2, 2.5, 0.1)), *rng.uniform(0, 0.04, 1), 0.0])
        path = np.stack([start, *(start + np.cumsum(rng.normal(0, (0.4, 0.4, 0.05, 0.01, 0), (2, 5)), axis=0))])
        world.tree.follow(path)
        distances = dense(checker, path)
        if (distances[:, 0] < stop).any():
            continue
        found = checker.check(path, MARGINS)
        least = distances.min(axis=1) - stop
        if found.forbidden:
            held += 1
            clear_and_held += least.min() > 0.001
        else:
            allowed += 1
            assert least.min() > -6e-4, (found, least.min())
    assert allowed > 10
    assert held > 10
    assert clear_and_held <= 1, "only what comes too near is held"


def test_bodies_are_slowed_down_when_they_approach_and_not_when_they_part(world: World) -> None:
    checker = Checker(world)
    towards = np.zeros((2, 5))
    towards[1, 0] = 0.55  # the upper link turns towards the post
    shares = []
    for reach in np.linspace(0.3, 1.0, 30):
        found = checker.check(towards * (1.0, *[1.0] * 4) * reach, MARGINS)
        shares.append(0.0 if found.forbidden else found.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert any(0 < share < 1 for share in shares), shares
    near = next(reach for reach, share in zip(np.linspace(0.3, 1.0, 30), shares, strict=True) if share < 1)
    back = np.stack([towards[1] * near, np.zeros(5)])
    assert checker.check(back, MARGINS).share == 1.0


def test_a_pair_that_is_near_all_the_way_does_not_slow_a_motion_that_hardly_brings_it_nearer(
    tmp_path: Path,
) -> None:
    """The upper link turns 14 mm beside a wall, and comes 0.1 mm nearer; then it turns towards a leaning wall."""
    motion = np.zeros((2, 5))
    motion[1, 0] = 0.3
    shares = []
    for lean in (0.0005, 0.02):
        checker = Checker(world_of(tmp_path, obstacles=[f"wall = box 3 0.02 3 at 0 0.054 0.3 0 0 {-lean}"]))
        nearer = checker.nearest(motion[0]).distance - checker.nearest(motion[1]).distance
        assert nearer > 5e-5
        found = checker.check(motion, MARGINS)
        assert (found.bodies, found.forbidden) == (("upper", "wall"), False)
        shares.append(found.share)
    assert shares[0] == 1.0
    assert shares[1] < 0.5


def test_a_fast_motion_does_not_pass_through_a_thin_wall(tmp_path: Path) -> None:
    checker = Checker(world_of(tmp_path, obstacles=["wall = box 0.002 1 2 at 0.3 0 0.7"]))
    path = np.zeros((2, 5))
    path[0, 0], path[1, 0] = 0.05, 2.0
    found = checker.check(path, MARGINS)
    assert found.forbidden
    assert found.with_scene
    assert found.bodies[1] == "wall"


def test_fingertips_may_come_near_a_support_and_other_links_may_not(tmp_path: Path) -> None:
    checker = Checker(world_of(tmp_path, obstacles=["shelf = box 0.4 0.4 0.1 at 0 0 1.3 0 0 0 support"]))
    distances = dict.fromkeys(("finger", "hand"), np.inf)
    for pair, (i, j) in enumerate(checker.world.pairs):
        names = {checker.world.bodies[i].name, checker.world.bodies[j].name}
        for name in distances:
            if names == {name, "shelf"}:
                distances[name] = checker.distances(pair, np.zeros((1, 5)), 9.0)[0]
    gap = distances["finger"]
    path = np.zeros((2, 5))
    path[1, 2] = gap - 0.004
    assert not checker.check(path, MARGINS).forbidden, "4 mm from the support"
    path[1, 2] = gap - 0.001
    assert checker.check(path, MARGINS).forbidden, "1 mm"
    strict = Checker(world_of(tmp_path, obstacles=["shelf = box 0.4 0.4 0.1 at 0 0 1.3"]))
    path[1, 2] = gap - 0.004
    assert strict.check(path, MARGINS).forbidden, "no support"


def test_from_a_collision_only_motions_out_of_it_are_allowed(world: World) -> None:
    """Also from penetration, where the depth counts; in whatever direction, nothing comes nearer."""
    checker, rng = Checker(world), np.random.default_rng(1)
    stop = np.array(checker.limits(MARGINS)[0])
    out = kept = 0
    while out < 20 or kept < 20:
        start = np.array([*rng.uniform((-2, -2.5, 0), (2, 2.5, 0.1)), 0.02, 0.0])
        path = world.tree.follow(np.stack([start, start + rng.normal(0, (0.1, 0.1, 0.02, 0, 0))]))
        distances = dense(checker, path, 13)
        below = distances[:, 0] < stop
        if not below.any():
            continue
        if checker.check(path, MARGINS).forbidden:
            kept += 1
            continue
        out += 1
        change = distances[below] - distances[below][:, :1]
        assert change.min() > -2e-4
        assert change[:, -1].max() > 0
        assert (distances[~below] - stop[~below, None]).min() > -6e-4, "and nothing else comes too near"


def test_every_forbidden_motion_that_starts_in_the_clear_can_be_reversed(world: World) -> None:
    checker, rng = Checker(world), np.random.default_rng(2)
    stop, found = np.array(checker.limits(MARGINS)[0]), 0
    while found < 30:
        start = np.array([*rng.uniform((-2, -2.5, 0), (2, 2.5, 0.1)), 0.02, 0.0])
        path = world.tree.follow(np.stack([start, start + rng.normal(0, (0.5, 0.5, 0.05, 0, 0))]))
        distances = dense(checker, path, 40)
        hit = np.flatnonzero((distances < stop[:, None]).any(axis=0))
        if not hit.size or hit[0] == 0:
            continue
        found += 1
        share = (hit[0] - 1) / 39
        here = (1 - share) * path[0] + share * path[1]
        assert checker.check(np.stack([here, path[1]]), MARGINS).forbidden
        back = checker.check(np.stack([here, start]), MARGINS)
        assert not back.forbidden, back


def test_what_a_gripper_holds_counts_while_it_is_closed(tmp_path: Path) -> None:
    world = world_of(tmp_path, obstacles=["wall = box 0.1 1 1 at 0.25 0 1.2"], held="box 0.3 0.02 0.02")
    checker = Checker(world)
    assert checker.nearest(np.zeros(5)).bodies != ("held", "wall")
    held = checker.nearest(np.zeros(5), ["arm"])
    assert set(held.bodies) == {"held", "wall"}
    assert 0.03 < held.distance < 0.06
    path = np.zeros((2, 5))
    path[1, 0] = 0.08
    assert checker.check(path, MARGINS, ["arm"]).forbidden
    assert not checker.check(path, MARGINS).forbidden


def test_a_world_without_pairs_forbids_nothing(tmp_path: Path) -> None:
    from dataclasses import replace

    world = replace(world_of(tmp_path), pairs=())
    assert not Checker(world).check(np.ones((2, 5)), MARGINS).forbidden
