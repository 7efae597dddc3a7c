"""Motions of a ball inside and around hollow meshes, compared with exact distances from the triangles."""

from pathlib import Path

import numpy as np
import pytest
from hollow import bin_of, gaps, pipe_of, revolved, ring_of, sheets_of
from tiny_robot import box, world_of, write_stl

from vla_ros.collision.checker import Checker, Margins

MARGINS = Margins(hold=0.01, slow=0.05, support=0.002)
BALL = 0.03  # m
JOINT = (
    '<joint name="{}" type="prismatic"><parent link="{}"/><child link="{}"/><axis xyz="{}"/>'
    '<limit lower="-1" upper="1" velocity="1" effort="1"/></joint>'
)
GANTRY = f"""<robot name="gantry"><link name="base"/><link name="x"/><link name="y"/><link name="tip"/>
  <link name="z"><collision><geometry><sphere radius="{BALL}"/></geometry></collision></link><link name="finger"/>
  {JOINT.format("a", "base", "x", "1 0 0")}{JOINT.format("b", "x", "y", "0 1 0")}
  {JOINT.format("c", "y", "z", "0 0 1")}{JOINT.format("f", "z", "finger", "1 0 0")}
  <joint name="t" type="fixed"><parent link="z"/><child link="tip"/></joint></robot>"""
SIZE = np.array([0.2, 0.26, 0.2])
FORMS = {
    "ring": (ring_of(0.2, 0.02), (0.3, 0.3, 0.08)),
    "pipe": (pipe_of(0.1, 0.3), (0.1, 0.1, 0.4)),
    "bin": (bin_of(SIZE), SIZE),
    "sheets": (sheets_of(SIZE), SIZE),
    "boxes": (  # a floor and two walls that overlap
        np.concatenate(
            [
                box((-0.2, -0.1, -0.02), (0.2, 0.1, 0.0)),
                box((-0.2, -0.1, -0.02), (-0.15, 0.1, 0.2)),
                box((0.15, -0.1, -0.02), (0.2, 0.1, 0.2)),
            ]
        ),
        (0.15, 0.1, 0.2),
    ),
}


def checker_of(folder: Path, triangles: np.ndarray) -> Checker:
    write_stl(folder / "hollow.stl", triangles)
    return Checker(world_of(folder, GANTRY, obstacles=[f"hollow = mesh {folder / 'hollow.stl'}"]))


def path_of(*points: np.ndarray) -> np.ndarray:
    return np.array([[*point, 0.0] for point in points])


@pytest.mark.parametrize("form", FORMS)
def test_a_ball_moves_freely_inside_and_no_motion_that_touches_passes(tmp_path: Path, form: str) -> None:
    triangles, extent = FORMS[form]
    checker, rng = checker_of(tmp_path, triangles), np.random.default_rng(0)
    passed = held = 0
    while passed < 40 or held < 20:
        start = rng.uniform(-1, 1, 3) * extent
        end = start + rng.normal(0, 0.06, 3)
        first = gaps(start[None], triangles)[0] - BALL
        if passed >= 40 and first > MARGINS.hold + np.linalg.norm(end - start):
            continue  # too far from everything to be held
        exact = gaps(start + np.linspace(0, 1, 60)[:, None] * (end - start), triangles) - BALL
        if exact[0] < MARGINS.hold + 0.001 or MARGINS.hold <= exact.min() < MARGINS.hold + 0.002:
            continue
        found = checker.check(path_of(start, end), MARGINS)
        assert found.forbidden == (exact.min() < MARGINS.hold), (start, end, exact.min(), found)
        passed, held = passed + (not found.forbidden), held + found.forbidden


def test_from_beside_a_wall_the_ball_leaves_into_the_hole_and_not_through_the_wall(tmp_path: Path) -> None:
    triangles, x = ring_of(0.2, 0.02), np.array([1.0, 0.0, 0.0])
    checker = checker_of(tmp_path, triangles)
    near, touching = 0.145 * x, 0.16 * x  # 5 mm from the tube, inside of the ring, and 10 mm within the tube
    assert not checker.check(path_of(near, near - 0.05 * x), MARGINS).forbidden
    assert checker.check(path_of(near, near + 0.05 * x), MARGINS).forbidden
    assert checker.check(path_of(near, near + 0.15 * x), MARGINS).forbidden, "right through the tube"
    assert not checker.check(path_of(touching, touching - 0.05 * x), MARGINS).forbidden
    assert checker.check(path_of(touching, touching + 0.005 * x), MARGINS).forbidden


def test_inside_the_material_is_not_free(tmp_path: Path) -> None:
    """A pipe whose wall is 20 cm thick appears around the ball."""
    profile = np.array([[0.1, 0.0], [0.3, 0.0], [0.3, 0.5], [0.1, 0.5]])
    checker, x = checker_of(tmp_path, revolved(profile)), np.array([1.0, 0.0, 0.0])
    inside, hole = np.array([0.2, 0.0, 0.25]), np.array([0.0, 0.0, 0.25])
    assert checker.nearest(path_of(hole)[0]).distance > 0.06
    assert checker.nearest(path_of(inside)[0]).distance < -0.06
    assert checker.check(path_of(inside - 0.05 * x, inside), MARGINS).forbidden
    assert not checker.check(path_of(inside - 0.05 * x, inside - 0.06 * x), MARGINS).forbidden, "to the surface"
    assert checker.check(path_of(hole, inside), MARGINS).forbidden


def test_a_solid_mesh_is_judged_by_its_pieces_alone(tmp_path: Path) -> None:
    checker = checker_of(tmp_path, box((-0.1, -0.1, -0.1), (0.1, 0.1, 0.1)))
    assert all(piece.surface is None for body in checker.world.bodies for piece in body.pieces)
    assert checker.nearest(np.zeros(4)).distance < -0.1
