"""MuJoCo as a judge of what touches what: its own kinematics, and its own convex pieces of the meshes (CoACD).

The pieces may be larger than the meshes, so a shallow penetration counts only if the triangles touch as well.
"""

import hashlib
import math
import os
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from vla_ros.collision.geometry import find_mesh
from vla_ros.collision.shapes import library
from vla_ros.config import Config
from vla_ros.config.collision import Obstacle
from vla_ros.control.collision import CollisionCheck
from vla_ros.kinematics.rotations import euler_xyz_matrix
from vla_ros.kinematics.urdf import resolve

_PIECES: dict[str, Any] = {
    "threshold": 0.1, "max_convex_hull": 16, "preprocess_resolution": 40, "resolution": 200,
    "mcts_iterations": 4, "mcts_nodes": 4, "mcts_max_depth": 1, "seed": 0,
}  # fmt: skip

_DOUBTED = (-0.03, -5e-4)  # m; in penetrations between these, the triangles are asked


class Judge:
    """MuJoCo's model of the same robots, with its own convex pieces; of the check only the pairs left out.

    Args:
        config: All options.
        check: Whose pairs are left out.
        margin: Distances above this are not told apart, m.
        ignored: Further pairs of bodies that are left out.
    """

    def __init__(
        self, config: Config, check: CollisionCheck, margin: float, ignored: Collection[tuple[str, str]] = ()
    ) -> None:
        spec = mujoco.MjSpec()
        spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_FILTERPARENT
        spec.compiler.degree = False
        self._spec, self._margin, self._meshes = spec, margin, dict[str, list[str]]()
        self._solids = dict[
            str, list[tuple[Any, np.ndarray, np.ndarray]]
        ]()  # shape, position and rotation in a body
        self.joints: list[str] = []
        several = len(config.arms) > 1
        for arm in config.arms:
            prefix = f"{arm.name}/" if several else ""
            mount = arm.mount or (0.0,) * 6
            self._robot(resolve(arm.robot.urdf), prefix, np.array(mount[:3]), euler_xyz_matrix(np.array(mount[3:])))
            if config.collision.parsed_held is not None:
                self._obstacle(config.collision.parsed_held, spec.body(prefix + arm.robot.tip_frame), prefix)
        for obstacle in config.collision.parsed_obstacles:
            self._obstacle(obstacle, spec.worldbody)
        for first, second in {*check.world.unchecked, *ignored}:  # type: ignore[union-attr]
            if spec.body(first) is not None and spec.body(second) is not None:
                spec.add_exclude(bodyname1=first, bodyname2=second)
        self.model = spec.compile()
        self.data = mujoco.MjData(self.model)
        order = {
            self.model.joint(index).name: int(self.model.jnt_qposadr[index]) for index in range(self.model.njnt)
        }
        self._columns = np.array([order[name] for name in check.world.tree.names])  # type: ignore[union-attr]

    def _robot(self, urdf: Path, prefix: str, place: np.ndarray, turn: np.ndarray) -> None:
        root = ElementTree.parse(urdf).getroot()
        joints = {_link(joint, "child"): joint for joint in root.findall("joint")}
        links = {link.get("name", ""): link for link in root.findall("link")}
        below: dict[str, list[str]] = {}
        for child, joint in joints.items():
            below.setdefault(_link(joint, "parent"), []).append(child)

        def add(parent: Any, name: str, place: np.ndarray, turn: np.ndarray) -> None:
            body = parent.add_body(
                name="root" if name == "world" else prefix + name, pos=place, quat=quaternion(turn)
            )
            joint = joints.get(name)
            if joint is not None and joint.get("type") in ("revolute", "continuous", "prismatic"):
                kind = (
                    mujoco.mjtJoint.mjJNT_SLIDE if joint.get("type") == "prismatic" else mujoco.mjtJoint.mjJNT_HINGE
                )
                axis = numbers(joint.find("axis"), "xyz", "1 0 0")
                body.add_joint(name=prefix + joint.get("name", ""), type=kind, axis=axis)
                body.mass, body.inertia, body.explicitinertial = 1.0, [1.0] * 3, True
            for collision in links[name].findall("collision"):
                self._geom(body, collision, urdf, name)
            for child in below.get(name, []):
                add(body, child, *origin(joints[child]))

        add(self._spec.worldbody, next(name for name in links if name not in joints), place, turn)

    def _geom(self, body: Any, collision: Any, urdf: Path, link: str) -> None:
        place, turn = origin(collision)
        shape = collision.find("geometry")[0]
        self._solids.setdefault(body.name, []).append((solid(shape, urdf, link), place, turn))
        common = {"pos": place, "quat": quaternion(turn), "margin": self._margin}
        if shape.tag == "box":
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=numbers(shape, "size") / 2, **common)
        elif shape.tag == "cylinder":
            size = [float(shape.get("radius")), float(shape.get("length")) / 2, 0]
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, **common)
        elif shape.tag == "sphere":
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[float(shape.get("radius")), 0, 0], **common)
        else:
            for mesh in self._decomposed(
                find_mesh(shape.get("filename"), urdf, link), numbers(shape, "scale", "1 1 1")
            ):
                body.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname=mesh, **common)

    def _decomposed(self, path: Path, scale: np.ndarray) -> list[str]:
        """Return the names of the convex pieces of a mesh, kept in a folder beside the temporary files."""
        key = hashlib.sha256(path.read_bytes() + scale.tobytes() + repr(_PIECES).encode()).hexdigest()[:16]
        if key not in self._meshes:
            folder = Path(tempfile.gettempdir()) / "vla_ros_decompositions"
            folder.mkdir(exist_ok=True)
            stored = folder / f"{key}.npz"
            if not stored.exists():
                own = folder / f"{key}.{os.getpid()}.npz"
                np.savez(own, *decompose(path, scale))
                own.replace(stored)
            with np.load(stored) as pieces:
                self._meshes[key] = [f"{key}_{name}" for name in pieces.files]
                for name in pieces.files:
                    self._spec.add_mesh(name=f"{key}_{name}", uservert=pieces[name].ravel())
        return self._meshes[key]

    def _obstacle(self, obstacle: Obstacle, parent: Any, prefix: str = "") -> None:
        body = parent.add_body(name=prefix + obstacle.name, pos=obstacle.position)
        box = obstacle.kind == "box"
        shape = library().Box(np.array(obstacle.size)) if box else library().Cylinder(*obstacle.size)
        self._solids.setdefault(body.name, []).append((shape, np.zeros(3), np.eye(3)))
        if box:
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=np.array(obstacle.size) / 2, margin=self._margin)
        else:
            size = [obstacle.size[0], obstacle.size[1] / 2, 0]
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, margin=self._margin)

    def _move(self, q: np.ndarray) -> None:
        self.data.qpos[self._columns] = q
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_collision(self.model, self.data)

    def distance(self, q: np.ndarray) -> float:
        """Return the smallest distance at positions ``q`` of the tree, or the margin."""
        self._move(q)
        if not self.data.ncon:
            return self._margin
        found = self.data.contact.dist.copy()
        for number in np.flatnonzero((_DOUBTED[0] < found) & (found < _DOUBTED[1])):
            first, second = (self.model.geom_bodyid[each] for each in self.data.contact.geom[number])
            apart = self._apart(int(first), int(second))
            found[number] = apart if apart > 0 else found[number]
        return float(min(found.min(), self._margin))

    def _apart(self, first: int, second: int) -> float:
        """Return the distance between the triangles of two bodies; 0 or less if they touch."""
        fcl = library()
        transform = getattr(fcl, "Transform3s", None) or fcl.Transform3f

        def placed(body: int) -> list[tuple[Any, Any]]:
            turn, place = self.data.xmat[body].reshape(3, 3), self.data.xpos[body]
            return [
                (shape, transform(turn @ own_turn, turn @ own + place))
                for shape, own, own_turn in self._solids[self.model.body(body).name]
            ]

        pairs = product(placed(first), placed(second))
        return float(min(fcl.distance(*a, *b, fcl.DistanceRequest(), fcl.DistanceResult()) for a, b in pairs))

    def near(self, q: np.ndarray) -> set[tuple[str, str]]:
        """Return the pairs of bodies whose pieces are nearer than the margin at positions ``q``."""
        self._move(q)
        bodies = self.model.geom_bodyid[self.data.contact.geom[self.data.contact.dist < self._margin]]
        return {(self.model.body(int(a)).name, self.model.body(int(b)).name) for a, b in np.sort(bodies, axis=1)}

    def complete(self) -> bool:
        """Return whether there was memory for all contacts."""
        return not self.data.warning[mujoco.mjtWarning.mjWARN_CONTACTFULL].number

    def along(self, path: np.ndarray, reach: np.ndarray, step: float) -> Iterator[float]:
        """Yield distances along a path, between which nothing moves further than about ``step``."""
        yield self.distance(path[0])
        for start, end in pairwise(path):
            count = math.ceil(float(np.abs(end - start) @ reach) / step)
            for index in range(1, count + 1):
                yield self.distance(start + (end - start) * (index / count))


def _link(joint: ElementTree.Element, end: str) -> str:
    found = joint.find(end)
    return "" if found is None else found.get("link", "")


def solid(shape: Any, urdf: Path, link: str) -> Any:
    """Return a shape of a URDF for Pinocchio's collision library: all triangles of a mesh."""
    fcl = library()
    if shape.tag == "box":
        return fcl.Box(numbers(shape, "size"))
    if shape.tag == "cylinder":
        return fcl.Cylinder(float(shape.get("radius")), float(shape.get("length")))
    if shape.tag == "sphere":
        return fcl.Sphere(float(shape.get("radius")))
    path = find_mesh(shape.get("filename"), urdf, link)
    return fcl.MeshLoader().load(str(path), numbers(shape, "scale", "1 1 1"))


def decompose(path: Path, scale: np.ndarray) -> list[np.ndarray]:
    import coacd

    mesh = library().MeshLoader().load(str(path), scale)  # reads the file only
    triangles = np.array([[t[0], t[1], t[2]] for t in map(mesh.tri_indices, range(mesh.num_tris))])
    coacd.set_log_level("error")
    parts = coacd.run_coacd(coacd.Mesh(np.asarray(mesh.vertices()), triangles), **_PIECES)
    return [np.asarray(vertices) for vertices, _ in parts]


def numbers(element: Any, attribute: str, default: str = "0 0 0") -> np.ndarray:
    text = default if element is None else element.get(attribute, default)
    return np.array([float(each) for each in text.split()])


def origin(element: Any) -> tuple[np.ndarray, np.ndarray]:
    found = element.find("origin")
    return numbers(found, "xyz"), euler_xyz_matrix(numbers(found, "rpy"))


def quaternion(turn: np.ndarray) -> np.ndarray:
    found = np.empty(4)
    mujoco.mju_mat2Quat(found, turn.ravel())
    return found
