"""Bodies of a robot, from the collision elements of its URDF."""

import os
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_ros.collision.shapes import Piece, box_around, capsule_around, convex_pieces, corners, library
from vla_ros.collision.surface import is_hollow, surface_of
from vla_ros.collision.tree import Tree, read_tree
from vla_ros.errors import ConfigError
from vla_ros.kinematics.native import with_reason
from vla_ros.kinematics.urdf import Urdf, read_urdf
from vla_ros.types import FloatArray

_BEFORE = "package://"
_ROOM, _ROOM_OF_LINK = 0.005, 0.02  # m, radius of a ball that fits into what the pieces of a hollow mesh fill


@dataclass(frozen=True, eq=False)
class Body:
    """A link or an obstacle: convex pieces that move with one frame of the tree."""

    name: str
    frame: int  # index in the tree
    pieces: tuple[Piece, ...]  # placed in the frame, m
    is_fitted: bool = False  # capsules around the visual elements, because the link has no collision elements
    is_scene: bool = False  # an obstacle
    is_support: bool = False  # an obstacle that fingertips may come near
    is_tip: bool = False  # a fingertip, or what the gripper holds
    held_by: str = ""  # the arm whose gripper holds it while closed
    unknown: str = ""  # why its shape is not known, so that the arm holds


@dataclass(frozen=True, eq=False)
class RobotGeometry:
    """A URDF: joints, bodies, and which of them are neighbours."""

    tree: Tree
    bodies: tuple[Body, ...]
    neighbours: frozenset[frozenset[str]]  # names of bodies that a joint connects
    links: Mapping[str, tuple[int, FloatArray]]  # frame, and place [4, 4] in it
    bare: tuple[str, ...]  # links without any geometry


def read_robot(urdf: str, prefix: str = "") -> RobotGeometry:
    """Read joints and geometry of a URDF; ``prefix`` stands before all names.

    Raises ConfigError if a mesh is missing or cannot be read, and names it.
    """
    import pinocchio

    description = read_urdf(urdf)
    root = ElementTree.fromstring(description.text)
    loader = library().CachedMeshLoader()
    for element, mesh in _meshes(root):
        path = find_mesh(mesh.get("filename", ""), description.path, element.get("name", ""))
        mesh.set("filename", str(path))
        load_mesh(path, [float(each) for each in mesh.get("scale", "1 1 1").split()], loader)
    hint = ""
    if root.find(".//capsule") is not None:
        hint = "; capsules need Pinocchio 4"
        root.set("version", "1.1")  # the first that has capsules
    text = ElementTree.tostring(root, encoding="unicode")
    try:
        model = with_reason(lambda: pinocchio.buildModelFromXML(text))
        solid, shown = (
            pinocchio.buildGeomFromUrdfString(model, text, kind, mesh_loader=loader)
            for kind in (pinocchio.COLLISION, pinocchio.VISUAL)
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"robot.urdf: Pinocchio cannot read {description.path} ({error}{hint})") from None
    read = Counter(model.frames[thing.parentFrame].name for thing in solid.geometryObjects)
    for link in root.findall("link"):  # Pinocchio skips what it does not understand
        name, count = link.get("name", ""), len(link.findall("collision"))
        if read[name] < count:
            raise ConfigError(
                f"robot.urdf: Pinocchio reads {read[name]} of {count} collision elements of link '{name}' in "
                f"{description.path}; expected box, cylinder, sphere, capsule or mesh with their dimensions"
            )
    known = dict[tuple[str, str], list[Piece]]()
    found: dict[str, tuple[int, list[Piece]]] = {}
    for thing in solid.geometryObjects:
        link = prefix + model.frames[thing.parentFrame].name
        found.setdefault(link, (thing.parentJoint, []))[1].extend(_pieces(thing, known))
    fitted: dict[str, tuple[int, list[FloatArray]]] = {}
    for thing in shown.geometryObjects:
        link = prefix + model.frames[thing.parentFrame].name
        if link not in found:
            fitted.setdefault(link, (thing.parentJoint, []))[1].append(_points(thing))
    bodies = [Body(link, frame, tuple(pieces)) for link, (frame, pieces) in found.items()]
    bodies += [
        Body(link, frame, (capsule_around(np.concatenate(points)),), is_fitted=True)
        for link, (frame, points) in fitted.items()
    ]
    links = {
        prefix + frame.name: (
            frame.parentJoint if hasattr(frame, "parentJoint") else frame.parent,  # Pinocchio 2
            frame.placement.homogeneous,
        )
        for frame in model.frames
        if frame.type == pinocchio.BODY
    }
    links.setdefault(prefix + description.root, (0, np.eye(4)))
    named = {body.name for body in bodies}
    return RobotGeometry(
        read_tree(model, {joint.name: joint.mimic for joint in description.joints if joint.mimic}, prefix),
        tuple(bodies),
        frozenset(_neighbours(description, named, prefix)),
        links,
        tuple(link for link in description.links if prefix + link not in named),
    )


def _meshes(root: ElementTree.Element) -> Iterator[tuple[ElementTree.Element, ElementTree.Element]]:
    """Yield each mesh that is used, with its link: visual ones only of links without collision elements."""
    for link in root.findall("link"):
        if link.find("collision") is not None:
            for visual in link.findall("visual"):
                link.remove(visual)
        for mesh in link.iter("mesh"):
            yield link, mesh


def find_mesh(name: str, urdf: Path, link: str) -> Path:
    """Return the file of a mesh: absolute, relative to the URDF, or of a package (``package://``).

    A package is looked for in the folders above the URDF, and where ROS looks.
    """
    if name.startswith(_BEFORE):
        package, _, rest = name[len(_BEFORE) :].partition("/")
        above = urdf.resolve().parents
        roots = [folder / package for folder in above] + [folder for folder in above if folder.name == package]
        for variable, inner in (("AMENT_PREFIX_PATH", "share"), ("ROS_PACKAGE_PATH", "")):
            roots += [
                Path(each) / inner / package for each in filter(None, os.environ.get(variable, "").split(":"))
            ]
        tried = [folder / rest for folder in roots]
    else:
        tried = [urdf.resolve().parent / name.removeprefix("file://")]
    for path in tried:
        if path.is_file():
            return path
    where = (
        "the folders above the URDF, AMENT_PREFIX_PATH and ROS_PACKAGE_PATH" if len(tried) > 1 else str(tried[0])
    )
    raise ConfigError(f"robot.urdf: the mesh {name} of link '{link}' in {urdf} is missing; looked in {where}")


def load_mesh(path: Path, scale: list[float], loader: Any = None) -> Any:
    """Return a mesh with at least one triangle; raises ConfigError and names the file otherwise."""
    try:
        loaded = (loader or library().MeshLoader()).load(str(path), np.array(scale))
        sound = loaded.num_tris > 0 and bool(np.isfinite(loaded.vertices()).all())
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"the mesh {path} cannot be read ({error})") from None
    if not sound:
        raise ConfigError(f"the mesh {path} has no triangles, or points that are not numbers")
    return loaded


def pieces_of(shape: Any, place: FloatArray, link: Literal["", "fixed", "moving"] = "") -> list[Piece]:
    """Return the convex pieces of a shape of the library; those of a hollow mesh have its surface.

    A mesh is hollow if its pieces fill room that it does not. No mesh of a ``link`` that moves is, which spares
    time, and none of a link that is not closed.
    """
    if not hasattr(shape, "num_tris"):
        return [Piece.of(shape, place)]
    vertices = np.asarray(shape.vertices())
    triangles = np.array([[t[0], t[1], t[2]] for t in map(shape.tri_indices, range(shape.num_tris))], np.int64)
    hulls = convex_pieces(vertices, triangles)
    if not hulls:
        return [box_around(vertices).moved(place)]
    if link != "moving":
        surface = surface_of(library(), vertices[triangles])
        room = _ROOM_OF_LINK if link else _ROOM
        if (surface.is_closed or not link) and is_hollow(library(), surface, hulls, room):
            return [Piece.of(each, place, surface) for each in hulls]
    return [Piece.of(each, place) for each in hulls]


def _pieces(thing: Any, known: dict[tuple[str, str], list[Piece]]) -> list[Piece]:
    link: Literal["fixed", "moving"] = "moving" if thing.parentJoint else "fixed"
    key = (str(thing.meshPath), f"{thing.meshScale} {link}")
    if not hasattr(thing.geometry, "num_tris"):
        key = ("", thing.name)
    if key not in known:
        known[key] = pieces_of(thing.geometry, np.eye(4), link)
    return [piece.moved(thing.placement.homogeneous) for piece in known[key]]


def _points(thing: Any) -> FloatArray:
    if not hasattr(thing.geometry, "num_tris"):
        return corners(Piece.of(thing.geometry, thing.placement.homogeneous))
    turn, place = thing.placement.rotation, thing.placement.translation
    points: FloatArray = np.asarray(thing.geometry.vertices()) @ turn.T + place
    return points


def _neighbours(description: Urdf, named: Collection[str], prefix: str) -> Iterator[frozenset[str]]:
    """Yield the names of bodies that a joint connects, directly or through links without geometry."""
    above = {prefix + joint.child: prefix + joint.parent for joint in description.joints}
    for link in named:
        upper = above.get(link)
        while upper is not None and upper not in named:
            upper = above.get(upper)
        if upper is not None:
            yield frozenset((link, upper))
