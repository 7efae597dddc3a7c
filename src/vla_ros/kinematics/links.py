"""Where the links of a URDF are in their parents, at any position of the joint between them."""

import xml.etree.ElementTree as ElementTree

import numpy as np

from vla_ros.kinematics.rotations import euler_xyz_matrix, rotation_vector_matrix, transform
from vla_ros.kinematics.urdf import Mimic, Urdf
from vla_ros.types import FloatArray


class Links:
    """The links of a robot that are fixed to their parents, or move with one joint; those of None are none.

    Attributes:
        parents: Each link's parent; links below a floating or planar joint have none.
        moved_by: The joint whose measured position moves a link in its parent; links that are fixed have none.
    """

    def __init__(self, urdf: Urdf | None) -> None:
        every = urdf.joints if urdf is not None else ()
        joints = {joint.child: joint for joint in every if joint.is_movable or joint.kind == "fixed"}
        moved = {
            link: joint.mimic or Mimic(joint.name, 1.0, 0.0) for link, joint in joints.items() if joint.is_movable
        }
        self.parents = {link: joint.parent for link, joint in joints.items()}
        self.moved_by = {link: mimic.leader for link, mimic in moved.items()}
        self._urdf, self._joints, self._moved = urdf, joints, moved

    def pose(self, link: str, position: float = 0.0) -> FloatArray:
        """Return the pose [4, 4] of ``link`` in its parent, with its joint of :attr:`moved_by` at ``position``."""
        assert self._urdf is not None
        element = self._urdf.elements[self._joints[link].name]
        xyz, rpy = (_numbers(element, "origin", name, "0 0 0") for name in ("xyz", "rpy"))
        origin = transform(euler_xyz_matrix(rpy), xyz)
        if (mimic := self._moved.get(link)) is None:
            return origin
        axis = _numbers(element, "axis", "xyz", "1 0 0")
        along = (mimic.scale * position + mimic.offset) * axis / np.linalg.norm(axis)
        slides = self._joints[link].kind == "prismatic"
        moved = (np.eye(3), along) if slides else (rotation_vector_matrix(along), np.zeros(3))
        result: FloatArray = origin @ transform(*moved)
        return result


def _numbers(joint: ElementTree.Element, tag: str, name: str, default: str) -> FloatArray:
    found = joint.find(tag)
    return np.array((default if found is None else found.get(name, default)).split(), float)
