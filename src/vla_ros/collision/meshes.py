"""Meshes that markers may name: read and cut into convex pieces by another process, and again when a file changes.

A hull computed by a library keeps all threads of Python from running, for seconds with a large mesh.
``python -m vla_ros.collision.meshes FILE X Y Z`` writes what it finds to its output, as an ``npz`` archive.
"""

import contextlib
import io
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vla_ros.collision.geometry import find_mesh, load_mesh, pieces_of
from vla_ros.collision.shapes import Piece, library
from vla_ros.collision.surface import surface_of
from vla_ros.errors import ConfigError, VlaRosError, one_line
from vla_ros.types import FloatArray

MOST_TRIANGLES = 20_000
"""Of a mesh of the scene."""

_MOST_BYTES = 32 << 20  # of a file
_MOST_POINTS = 4_000  # of a convex piece: a shape of so many is made within 5 ms, in which no other thread runs
_MOST_MEMORY = 4 << 30  # bytes, of the process
_MOST_SECONDS = 60
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # whose stacks would count as its memory
_KEPT = 32  # meshes with their scales
_ONE = (1.0, 1.0, 1.0)
_Key = tuple[str, tuple[float, ...]]
_Signature = tuple[int, ...]


class _Read(NamedTuple):
    signature: _Signature  # of the file
    pieces: tuple[Piece, ...]
    why: str  # they are not known, or ""


class SceneMeshes:
    """The convex pieces of some mesh files. One thread calls it; another process reads one file after the other.

    Args:
        names: The meshes that may be asked for: files, or names that begin with ``package://`` or ``file://``.
        urdf: Where relative names and packages are looked for.
    """

    def __init__(self, names: Sequence[str], urdf: Path) -> None:
        self._names, self._urdf = tuple(names), urdf
        self._known = dict[_Key, _Read]()  # the one that was asked for longest ago is the first
        self._reader: _Reader | None = None

    def find(self, name: str, scale: Sequence[float] = _ONE) -> tuple[Piece, ...] | str:
        """Return the pieces of a mesh, or why they are not known (yet). Never waits for the mesh.

        ``scale`` are the factors along x, y and z.
        """
        self._take()
        if name not in self._names:
            return f"the mesh {one_line(name)!r} is not in collision.scene_meshes, so that its shape is not known"
        try:
            path = find_mesh(name, self._urdf, "collision.scene_meshes")
            signature = _signature(path.stat())
        except (VlaRosError, OSError, ValueError):
            return f"the mesh {one_line(name)} of collision.scene_meshes is missing"
        key = str(path), tuple(scale)
        known = self._known.pop(key, None)
        if known is not None:
            self._known[key] = known
            if known.signature == signature:
                return known.pieces or known.why
        if self._reader is None:
            self._reader = _Reader(key)
        return _being_read(name)

    def prepare(self) -> list[str]:
        """Begin to read what was not read yet, unscaled; return why meshes cannot be read."""
        found = [(name, self.find(name)) for name in self._names]
        return [why for name, why in found if isinstance(why, str) and why != _being_read(name)]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _take(self) -> None:
        """Keep what the other process has found, if it has ended."""
        if self._reader is None or not self._reader.ended():
            return
        key, self._known[self._reader.key] = self._reader.key, self._reader.result()
        self._reader.close()
        self._reader = None
        for old in [each for each in self._known if each != key][: max(0, len(self._known) - _KEPT)]:
            del self._known[old]


class _Reader:
    """A process that reads one mesh."""

    def __init__(self, key: _Key) -> None:
        self.key, (path, scale) = key, key
        self._until = time.monotonic() + _MOST_SECONDS
        self._found, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed
        self._signature: _Signature = ()
        with contextlib.suppress(OSError):  # the process says so
            self._signature = _signature(Path(path).stat())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vla_ros.collision.meshes", path, *map(repr, scale)],
            stdin=subprocess.DEVNULL,
            stdout=self._found,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, **dict.fromkeys(_THREADS, "1")},
        )

    def ended(self) -> bool:
        return self._process.poll() is not None or time.monotonic() > self._until

    def result(self) -> _Read:
        status = self._process.poll()
        self._found.seek(0)
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        errors = self._errors.read().decode(errors="replace").split()
        try:
            if status == 0:
                with np.load(io.BytesIO(self._found.read()), allow_pickle=False) as arrays:
                    signature, pieces = _unpacked(arrays)
                return _Read(signature, pieces, "")
            why = " ".join(errors) if errors and status else f"the process that reads it ended with status {status}"
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            why = f"the process that reads it wrote something else ({error})"
        if status is None:
            why = f"not read within {_MOST_SECONDS} s"
        return _Read(self._signature, (), one_line(f"the mesh {self.key[0]} cannot be used: {why}", 600))

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._found.close()
        self._errors.close()


def _being_read(name: str) -> str:
    return f"the mesh {one_line(name)} is being read"


def _signature(found: os.stat_result) -> _Signature:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _packed(path: Path, scale: list[float]) -> dict[str, Any]:
    """Return the pieces of a mesh as arrays. Raises ConfigError if it is too large or cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        what = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
        raise ConfigError(f"found {what}, expected a file of at most {_MOST_BYTES} bytes")
    mesh = load_mesh(path, scale)
    if mesh.num_tris > MOST_TRIANGLES:
        raise ConfigError(f"found {mesh.num_tris} triangles, expected at most {MOST_TRIANGLES}; simplify it")
    arrays: dict[str, Any] = {"signature": np.array(_signature(found))}
    for number, piece in enumerate(pieces_of(mesh, np.eye(4))):
        arrays |= {f"place_{number}": piece.place, f"middle_{number}": piece.middle}
        if not hasattr(piece.shape, "points"):
            arrays[f"box_{number}"] = 2.0 * np.asarray(piece.shape.halfSide)
            continue
        points, faces = piece.shape.points(), map(piece.shape.polygons, range(piece.shape.num_polygons))
        if len(points) > _MOST_POINTS:
            raise ConfigError(f"found a convex piece of {len(points)} points, expected at most {_MOST_POINTS}")
        arrays |= {f"points_{number}": points, f"faces_{number}": [[face[k] for k in range(3)] for face in faces]}
        if piece.surface is not None:
            arrays["triangles"] = piece.surface.triangles
    return arrays


def _unpacked(arrays: Any) -> tuple[_Signature, tuple[Piece, ...]]:
    fcl, pieces = library(), list[Piece]()
    vectors = getattr(fcl, "StdVec_Vec3s", None) or fcl.StdVec_Vec3f
    surface = surface_of(fcl, arrays["triangles"]) if "triangles" in arrays else None
    while f"place_{len(pieces)}" in arrays:
        number = len(pieces)
        place, middle = arrays[f"place_{number}"], arrays[f"middle_{number}"]
        if f"box_{number}" in arrays:
            pieces.append(Piece.of(fcl.Box(arrays[f"box_{number}"]), place))
            continue
        points: FloatArray = arrays[f"points_{number}"]
        corners, faces = vectors(), fcl.StdVec_Triangle()
        corners.extend(list(points))
        faces.extend([fcl.Triangle(*face) for face in arrays[f"faces_{number}"].tolist()])
        radius = float(np.sqrt((points**2).sum(axis=1).max()))
        pieces.append(Piece(fcl.Convex(corners, faces), place, radius, surface, middle))
    if not pieces:
        raise ValueError("no pieces")
    return tuple(arrays["signature"].tolist()), tuple(pieces)


def main(path: str, *scale: str) -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    try:
        np.savez(sys.stdout.buffer, **_packed(Path(path), [float(each) for each in scale]))
    except (VlaRosError, OSError, ValueError, RuntimeError, MemoryError) as error:
        sys.exit(f"{error}" or type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
