"""Forward kinematics of all joints of a robot, at several configurations at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_ros.errors import ConfigError
from vla_ros.kinematics.urdf import Mimic
from vla_ros.types import FloatArray


@dataclass(frozen=True, eq=False)
class Tree:
    """J joints of one degree of freedom each, parents before children.

    Frame 0 is the root; frame ``j + 1`` moves with joint ``j``. A transform is a matrix [4, 4].
    """

    names: tuple[str, ...]
    parents: tuple[int, ...]  # [J], frame that each joint is attached to
    # [4, J, 1, 4, 4]: a joint's transform is constant + sin(q) * sine + cos(q) * cosine + q * slide.
    motions: FloatArray
    low: FloatArray  # [J], limits of the URDF
    high: FloatArray  # [J]
    speeds: FloatArray  # [J], limits of the URDF, rad/s or m/s
    mimics: Mapping[int, tuple[int, float, float]]  # joint to its leader, scale and offset

    def ancestors(self, frame: int) -> list[int]:
        """Return the joints that move ``frame``, nearest first."""
        found = []
        while frame:
            found.append(frame - 1)
            frame = self.parents[frame - 1]
        return found

    def follow(self, q: FloatArray) -> FloatArray:
        """Set mimic joints in ``q`` [..., J], in place, and return it."""
        for joint, (leader, scale, offset) in self.mimics.items():
            q[..., joint] = scale * q[..., leader] + offset
        return q

    def forward(self, q: FloatArray) -> FloatArray:
        """Return the transforms [J + 1, K, 4, 4] of all frames at positions ``q`` [K, J]."""
        joints, column = len(self.names), q.T
        factors = np.empty((*column.shape, 4))
        factors[..., 0], factors[..., 3] = 1.0, column
        np.sin(column, out=factors[..., 1])
        np.cos(column, out=factors[..., 2])
        local = (factors @ self.motions.reshape(4, joints, 16).swapaxes(0, 1)).reshape(joints, -1, 4, 4)
        found = np.empty((len(self.names) + 1, len(q), 4, 4))
        found[0] = _HERE
        for joint, parent in enumerate(self.parents):
            np.matmul(found[parent], local[joint], out=found[joint + 1])
        return found


_HERE = np.eye(4)


def read_tree(model: Any, mimics: Mapping[str, Mimic], prefix: str = "") -> Tree:
    """Return the joints of Pinocchio's ``model``; ``prefix`` stands before all names.

    Raises ConfigError if a joint has more than one degree of freedom.
    """
    import pinocchio

    names = list(model.names)[1:]
    wide = [
        name for index, name in enumerate(names, 1) if (model.joints[index].nv, model.joints[index].nq) != (1, 1)
    ]
    if wide:
        raise ConfigError(f"robot.urdf: collision.check knows no joints of several degrees of freedom: {wide}")
    data, at = model.createData(), [model.joints[index].idx_q for index in range(1, model.njoints)]
    motions = np.zeros((4, len(names), 1, 4, 4))
    for index, column in enumerate(at, 1):
        turned = np.zeros(model.nq)
        turned[column] = 1.0
        pinocchio.forwardKinematics(model, data, turned)
        place = model.jointPlacements[index]
        screw = pinocchio.log6(place.actInv(data.liMi[index]))  # what the joint does at 1 rad or m
        base, axis = place.homogeneous, screw.angular
        constant, sine, cosine, slide = motions[:, index - 1, 0]
        if np.linalg.norm(axis) < 0.5:
            constant[:], slide[:3, 3] = base, place.rotation @ screw.linear
            continue
        outer = np.outer(axis, axis)
        constant[:] = base
        constant[:3, :3] = place.rotation @ outer
        sine[:3, :3] = place.rotation @ pinocchio.skew(axis)
        cosine[:3, :3] = place.rotation @ (np.eye(3) - outer)
    numbers = {name: index for index, name in enumerate(names)}
    followed = {
        numbers[name]: (numbers[one.leader], one.scale, one.offset)
        for name, one in mimics.items()
        if name in numbers and one.leader in numbers
    }
    low, high, speeds = (
        part[at].copy() for part in (model.lowerPositionLimit, model.upperPositionLimit, model.velocityLimit)
    )
    parents = tuple(int(model.parents[index]) for index in range(1, model.njoints))
    return Tree(tuple(prefix + name for name in names), parents, motions, low, high, speeds, followed)


def mounted(tree: Tree, mount: FloatArray) -> Tree:
    """Return ``tree`` with its root at ``mount`` [4, 4]."""
    rooted = np.array([parent == 0 for parent in tree.parents])[:, None, None, None]
    return replace(tree, motions=np.where(rooted, mount @ tree.motions, tree.motions))


def join(trees: Sequence[Tree]) -> Tree:
    """Return one tree of several that have the same root."""
    parents, mimics, start = list[int](), dict[int, tuple[int, float, float]](), 0
    for tree in trees:
        parents += [parent + start if parent else 0 for parent in tree.parents]
        for joint, (leader, scale, offset) in tree.mimics.items():
            mimics[joint + start] = leader + start, scale, offset
        start += len(tree.names)
    low, high, speeds = (
        np.concatenate([getattr(tree, part) for tree in trees]) for part in ("low", "high", "speeds")
    )
    names = tuple(name for tree in trees for name in tree.names)
    return Tree(
        names, tuple(parents), np.concatenate([tree.motions for tree in trees], axis=1), low, high, speeds, mimics
    )
