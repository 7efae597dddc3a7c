"""Bodies of a URDF: meshes, capsules, joints, and errors that name the file."""

from pathlib import Path

import numpy as np
import pinocchio
import pytest
from tiny_robot import ARM, BOX, box, world_of, write, write_stl

from vla_ros.collision.checker import Checker
from vla_ros.collision.geometry import read_robot
from vla_ros.collision.shapes import capsule_around, convex_pieces, hull
from vla_ros.errors import ConfigError

MESH = '<geometry><mesh filename="{}" scale="0.001 0.001 0.001"/></geometry>'


def with_mesh(name: str) -> str:
    return ARM.replace(BOX[1], MESH.format(name), 1)


def test_forward_kinematics_are_pinocchios(tmp_path: Path) -> None:
    path = write(tmp_path)
    tree = read_robot(str(path)).tree
    model = pinocchio.buildModelFromXML(
        ARM.replace("continuous", "revolute").replace("<limit velocity", '<limit lower="-9" upper="9" velocity')
    )
    data, q = model.createData(), np.random.default_rng(0).uniform(-1, 1, (5, 5))
    found = tree.forward(q)
    for row, positions in enumerate(q):
        pinocchio.forwardKinematics(model, data, positions)
        for frame in range(model.njoints):
            np.testing.assert_allclose(found[frame, row], data.oMi[frame].homogeneous, atol=1e-12)
    assert tree.follow(np.array([0, 0, 0, 0.01, 0]))[4] == pytest.approx(0.02), "a mimic joint follows"


@pytest.mark.parametrize(
    "name", ["parts/link.stl", "package://tiny_description/parts/link.stl", "file://{}/link.stl"]
)
def test_a_mesh_is_found_beside_the_urdf_in_a_package_or_by_its_path(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tiny_description" / "urdf"
    absolute = tmp_path / "elsewhere"
    for place in (folder / "parts", folder.parent / "parts", absolute):
        write_stl(place / "link.stl", 1000 * box((-0.03, -0.03, -0.15), (0.03, 0.03, 0.15)))
    by_mesh = world_of(folder, with_mesh(name.format(absolute)))
    by_box = world_of(tmp_path)
    q = np.array([0.4, 0.5, 0.05, 0, 0])
    for pair, names in enumerate(by_box.pairs):
        found = [Checker(world).distances(pair, q[None], 9.0)[0] for world in (by_mesh, by_box)]
        assert found[0] == pytest.approx(found[1], abs=1e-5), names


def test_a_missing_mesh_is_named_with_its_link(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh package://none/link.stl of link 'upper' .* is missing"):
        world_of(tmp_path, with_mesh("package://none/link.stl"))


@pytest.mark.parametrize("content", [b"solid nothing\nendsolid nothing\n", b"\0" * 84, b"no mesh at all", b""])
def test_a_broken_mesh_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "link.stl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"link\.stl"):
        world_of(tmp_path, with_mesh("link.stl"))


def test_a_mesh_with_points_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    triangles = box((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    triangles[3, 1, 2] = np.nan
    write_stl(tmp_path / "link.stl", triangles)
    with pytest.raises(ConfigError, match=r"link\.stl has no triangles, or points that are not numbers"):
        world_of(tmp_path, with_mesh("link.stl"))


def test_a_flat_mesh_is_a_thin_box(tmp_path: Path) -> None:
    flat = np.array([[[0, 0, 0], [100, 0, 0], [0, 100, 0]], [[100, 100, 0], [100, 0, 0], [0, 100, 0]]], float)
    write_stl(tmp_path / "link.stl", flat)
    [upper] = [body for body in world_of(tmp_path, with_mesh("link.stl")).bodies if body.name == "upper"]
    assert [piece.radius for piece in upper.pieces] == [pytest.approx(0.0707, abs=1e-3)]


CAPSULE = '<geometry><capsule radius="0.03" length="0.24"/></geometry>'


@pytest.mark.skipif(int(pinocchio.__version__.split(".")[0]) < 4, reason="Pinocchio 4 is the first with capsules")
@pytest.mark.parametrize("version", ["", ' version="1.0"', ' version="1.2"'])
def test_a_capsule_is_read_whatever_the_version(tmp_path: Path, version: str) -> None:
    text = ARM.replace("<robot", f"<robot{version}").replace(BOX[1], CAPSULE, 1)
    [upper] = [body for body in world_of(tmp_path, text).bodies if body.name == "upper"]
    assert [(shape.radius, shape.halfLength) for shape in (piece.shape for piece in upper.pieces)] == [(0.03, 0.12)]


@pytest.mark.parametrize("shape", ["<cone/>", '<sphere radius="x"/>', ""])
def test_a_collision_element_that_is_not_understood_is_refused(tmp_path: Path, shape: str) -> None:
    with pytest.raises(ConfigError, match="reads 0 of 1 collision elements of link 'upper'"):
        world_of(tmp_path, ARM.replace(BOX[1], f"<geometry>{shape}</geometry>", 1))


def test_a_hollow_mesh_is_cut_into_pieces_that_contain_its_surface() -> None:
    """A U of three bars: its hull would fill the gap."""
    parts = [
        box((0, 0, 0), (0.3, 0.05, 0.05)),
        box((0, 0, 0.05), (0.05, 0.05, 0.3)),
        box((0.25, 0, 0.05), (0.3, 0.05, 0.3)),
    ]
    soup = np.concatenate(parts)
    pieces = convex_pieces(soup.reshape(-1, 3), np.arange(len(soup) * 3).reshape(-1, 3))
    assert 3 <= len(pieces) <= 8
    rng = np.random.default_rng(0)
    shares = rng.dirichlet((1, 1, 1), 2000)
    surface = np.einsum("ns,nsk->nk", shares, soup[rng.integers(len(soup), size=2000)])
    assert all(any(contains(piece, point) for piece in pieces) for point in surface)
    assert not any(contains(piece, np.array([0.15, 0.025, 0.2])) for piece in pieces), "the gap is free"


def contains(piece: object, point: np.ndarray) -> bool:
    from vla_ros.collision.shapes import library

    fcl = library()
    place = getattr(fcl, "Transform3s", None) or fcl.Transform3f
    there = place(np.eye(3), point)
    return (
        fcl.distance(
            piece,
            place(np.eye(3), np.zeros(3)),
            fcl.Sphere(1e-6),
            there,
            fcl.DistanceRequest(),
            fcl.DistanceResult(),
        )
        < 1e-5
    )


def test_hulls_of_too_few_or_flat_points_are_none() -> None:
    assert hull(np.zeros((2, 3))) is None
    assert hull(np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0.5, 0.2, 0]], float)) is None


def test_a_capsule_contains_its_points_and_is_no_larger_than_it_must_be() -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform((-0.02, -0.03, -0.2), (0.02, 0.03, 0.2), (500, 3))
    capsule = capsule_around(points)
    local = (points - capsule.place[:3, 3]) @ capsule.place[:3, :3]
    axial = np.maximum(np.abs(local[:, 2]) - capsule.shape.halfLength, 0.0)
    reach = np.hypot(np.hypot(local[:, 0], local[:, 1]), axial)
    assert reach.max() <= capsule.shape.radius + 1e-9
    assert capsule.shape.radius < 0.04
    assert capsule.shape.halfLength < 0.2


def test_without_collision_elements_capsules_enclose_the_visual_ones_and_the_notes_say_so(tmp_path: Path) -> None:
    world = world_of(tmp_path, ARM.replace("collision>", "visual>"))
    assert all(body.is_fitted and len(body.pieces) == 1 for body in world.bodies)
    assert any("capsules around the visual elements" in note and "upper" in note for note in world.notes)


def test_a_urdf_without_any_geometry_is_refused(tmp_path: Path) -> None:
    import re

    bare = re.sub(r"<collision>.*?</collision>", "", ARM)
    with pytest.raises(ConfigError, match="neither collision nor visual elements"):
        world_of(tmp_path, bare)
