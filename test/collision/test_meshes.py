"""Meshes that another process reads: their pieces, files that change, and what is refused."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hollow import bin_of, ring_of
from tiny_robot import box, write_stl

from vla_ros.collision import meshes
from vla_ros.collision.geometry import load_mesh, pieces_of
from vla_ros.collision.meshes import SceneMeshes
from vla_ros.collision.shapes import Piece


def read(known: SceneMeshes, name: object, scale: tuple[float, ...] = (1.0, 1.0, 1.0)) -> tuple[Piece, ...] | str:
    """Ask until the mesh is no longer being read."""
    deadline = time.monotonic() + 60
    while isinstance(found := known.find(str(name), scale), str) and "being read" in found:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


@pytest.fixture
def known(tmp_path: Path):
    found = SceneMeshes(
        [str(tmp_path / name) for name in ("a.stl", "b.stl", "pipe.stl", "broken.stl")] + ["package://cell/c.stl"],
        tmp_path / "robot" / "arm.urdf",
    )
    yield found
    found.close()


def test_the_pieces_are_those_that_this_process_would_find(known: SceneMeshes, tmp_path: Path) -> None:
    for name, triangles in (("a.stl", bin_of(np.array([0.2, 0.3, 0.2]))), ("b.stl", box((0, 0, 0), (1, 2, 3)))):
        write_stl(tmp_path / name, triangles)
        scale = (1.0, 0.5, 2.0)
        found, own = (
            read(known, tmp_path / name, scale),
            pieces_of(load_mesh(tmp_path / name, list(scale)), np.eye(4)),
        )
        assert not isinstance(found, str), found
        assert len(found) == len(own)
        for one, other in zip(found, own, strict=True):
            np.testing.assert_allclose(one.place, other.place)
            assert one.radius == pytest.approx(other.radius)
            assert one.shape.computeVolume() == pytest.approx(other.shape.computeVolume())
            assert (one.surface is None) == (other.surface is None)
        assert known.find(str(tmp_path / name), scale) is found
    assert found[0].surface is None
    assert read(known, tmp_path / "a.stl")[0].surface is not None  # type: ignore[union-attr]


def test_a_flat_mesh_is_a_thin_box(known: SceneMeshes, tmp_path: Path) -> None:
    write_stl(tmp_path / "a.stl", box((0, 0, 0), (1, 1, 1))[:2])
    [piece] = read(known, tmp_path / "a.stl")
    assert piece.radius > 0.7  # type: ignore[union-attr]


def test_a_file_that_is_written_anew_is_read_again_and_not_known_meanwhile(
    known: SceneMeshes, tmp_path: Path
) -> None:
    file = tmp_path / "a.stl"
    assert "missing" in str(read(known, file))
    write_stl(file, box((0, 0, 0), (0.1, 0.1, 0.1)))
    [small] = read(known, file)
    write_stl(file, box((0, 0, 0), (0.8, 0.8, 0.8)))  # of the same length
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert "being read" in str(known.find(str(file)))
    [large] = read(known, file)
    assert large.radius > 5 * small.radius  # type: ignore[union-attr]
    file.unlink()
    assert "missing" in str(known.find(str(file)))


def test_a_file_that_no_option_names_is_never_opened(known: SceneMeshes, tmp_path: Path) -> None:
    write_stl(tmp_path / "other.stl", box((0, 0, 0), (1, 1, 1)))
    for name in ("other.stl", "../other.stl", "/etc/passwd", "a.stl", "", "\x1b[2J"):
        found = known.find(name if name == "" else str(tmp_path / name))
        assert "is missing" in str(found) if name == "a.stl" else "collision.scene_meshes" in str(found)
        assert "\x1b" not in str(found)
    assert known._reader is None
    assert known._known == {}


@pytest.mark.parametrize("kind", ["truncated", "text", "fifo", "folder", "large", "many"])
def test_what_cannot_be_used_is_said_and_tried_again_when_the_file_changes(
    known: SceneMeshes, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "broken.stl"
    if kind == "truncated":
        write_stl(file, box((0, 0, 0), (1, 1, 1)))
        file.write_bytes(file.read_bytes()[:300])
    elif kind == "text":
        file.write_text("solid\x1b[2J\nfacet\n")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "large":
        with file.open("wb") as sparse:
            sparse.truncate(meshes._MOST_BYTES + 1)
    else:
        write_stl(file, ring_of(0.2, 0.02, 260))
    begin = time.thread_time()
    found = read(known, file)
    assert isinstance(found, str)
    assert "\x1b" not in found
    assert str(file) in found
    assert time.thread_time() - begin < 0.5, "this thread only looks"
    if kind in ("fifo", "folder"):
        return
    assert known.find(str(file)) == found, "it is not read again and again"
    write_stl(file, box((0, 0, 0), (1, 1, 1)))
    assert not isinstance(read(known, file), str)


def test_a_process_that_hangs_is_ended(known: SceneMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stl(tmp_path / "a.stl", box((0, 0, 0), (1, 1, 1)))
    monkeypatch.setattr(meshes, "_MOST_SECONDS", 0)
    assert "not read within" in str(read(known, tmp_path / "a.stl"))


def test_what_is_kept_has_a_bound(known: SceneMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "_KEPT", 2)
    write_stl(tmp_path / "a.stl", box((0, 0, 0), (1, 1, 1)))
    for number in range(1, 5):
        assert not isinstance(read(known, tmp_path / "a.stl", (float(number), 1.0, 1.0)), str)
        assert len(known._known) <= 2
    for number in range(100):  # none waits for another one
        known.find(str(tmp_path / "a.stl"), (10.0 + number, 1.0, 1.0))
    assert len(known._known) <= 2


def test_meshes_are_read_before_a_marker_names_them(known: SceneMeshes, tmp_path: Path) -> None:
    write_stl(tmp_path / "a.stl", box((0, 0, 0), (1, 1, 1)))
    write_stl(tmp_path / "pipe.stl", ring_of(0.2, 0.02))
    deadline = time.monotonic() + 60
    while len(known._known) < 2 and time.monotonic() < deadline:
        wrong = known.prepare()
        time.sleep(0.02)
    assert len(known._known) == 2
    assert len(wrong) == 3, "two files and a package are missing"
