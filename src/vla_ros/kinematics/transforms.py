"""Where frames are in each other, at any time of the last seconds.

``/tf`` and ``/tf_static`` say it; of links whose pose they never said, the robot's URDF and the joint states.
"""

import bisect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vla_ros.errors import VlaRosError
from vla_ros.kinematics.links import Links
from vla_ros.kinematics.rotations import read_rotation, rotation_vector, rotation_vector_matrix, transform
from vla_ros.types import FloatArray, JointState

KEPT = 10.0  # s, as tf2's buffers
_MOST_FRAMES = 4096  # further ones are ignored, so that no publisher fills the memory
_LENGTH = 0.01  # by which a quaternion's length may differ from 1, as in tf2
_MOVED = 1e-6  # m, and of a quaternion's numbers: static transforms that differ by less are the same
_ROUNDED = 1e-4  # the same, of a URDF and a static transform, which may be written with fewer digits
_APART = 5e-3  # the same, of two publishers of one transform, who agree at other times while it moves
_MOST_PUBLISHERS = 8  # of one transform that are remembered

_Pose = tuple[float, ...]  # x, y, z in metres and a quaternion x, y, z, w; or the position of a joint
_Sample = tuple[int, _Pose]  # with its stamp in nanoseconds


class TransformError(VlaRosError):
    """There is no transform between two frames at a time; or, if ``jumped``, one that must not change did."""

    def __init__(self, text: str, *, jumped: bool = False) -> None:
        super().__init__(text)
        self.jumped = jumped


class TransformBuffer:
    """Keeps transforms, and the positions of joints that move ``links``, for ``seconds``. Thread-safe.

    Attributes:
        changed: Notified when a transform or a position was added.
        used: Where the poses of frames came from that were needed: ``/tf``, ``/tf_static`` or ``robot.urdf``.
        jumps: Frames whose pose in their parent is said to be constant but changed, or whose parent changed, with
            what happened; until :meth:`accept`.
    """

    def __init__(self, seconds: float = KEPT, links: Links | None = None) -> None:
        self._kept, self.links = seconds * 1e9, links or Links(None)
        self._parents: dict[str, str] = {}
        self._static: dict[str, _Pose] = {}
        self._samples: dict[str, list[_Sample]] = {}
        self._joints: dict[str, list[_Sample]] = {joint: [] for joint in self.links.moved_by.values()}
        self._said: dict[str, dict[bytes, _Pose]] = {}  # by child and publisher, the newest one last
        self.used: Mapping[str, str] = {}
        self.changed = threading.Condition()
        self.jumps: dict[str, str] = {}

    def add(
        self,
        parent: str,
        child: str,
        stamp: int,
        numbers: Sequence[float],
        *,
        static: bool,
        publisher: bytes = b"",
    ) -> None:
        """Add a transform: the pose of ``child`` in ``parent``, as position and quaternion x, y, z, w.

        What is not a pose is ignored, as tf2 does. ``publisher`` is its id, or b"" if unknown.
        """
        parent, child, pose = parent.lstrip("/"), child.lstrip("/"), tuple(map(float, numbers))
        is_pose = all(map(math.isfinite, pose)) and abs(math.hypot(*pose[3:]) - 1) < _LENGTH
        if not (parent and child and parent != child and is_pose):
            return
        with self.changed:
            if child not in self._parents and len(self._parents) >= _MOST_FRAMES:
                return
            self._look_for_jump(parent, child, pose, static)
            if publisher and not static:
                self._look_for_contradiction(child, pose, publisher)
            if self._parents.get(child) != parent:
                self._samples.pop(child, None)
            self._parents[child] = parent
            if static:
                self._static[child] = pose
            else:
                self._static.pop(child, None)
                self._insert(self._samples.setdefault(child, []), (stamp, pose))
            self.changed.notify_all()

    def measure(self, joints: JointState) -> None:
        """Add what a joint state says of the joints that move links."""
        with self.changed:
            for name, position in zip(joints.names, joints.positions.tolist(), strict=False):
                if name in self._joints and math.isfinite(position):
                    self._insert(self._joints[name], (joints.stamp, (position,)))
            self.changed.notify_all()

    def accept(self) -> None:
        """Take the newest static transforms for the true ones."""
        with self.changed:
            self.jumps.clear()
            self._said.clear()

    def forget(self) -> None:
        """Forget what moves, because the clock has jumped and stamps may repeat."""
        with self.changed:
            for samples in (*self._samples.values(), *self._joints.values()):
                samples.clear()

    def at(self, target: str, source: str, stamp: int) -> FloatArray:
        """Return the transform [4, 4] that leads from ``source`` to ``target`` at ``stamp``.

        Between two samples, the position is interpolated linearly and the rotation about one axis; nothing is
        extrapolated. Raises TransformError.
        """
        target, source = target.lstrip("/"), source.lstrip("/")
        with self.changed:
            up, down = list(self._chain(source)), list(self._chain(target))
            shared = next((frame for frame in up if frame in down), None)
            if shared is None:
                known = ", ".join(sorted({*self._parents, *self._parents.values()})) or "none"
                nor = "; nor does robot.urdf" if self.links.parents else ""
                text = f"/tf and /tf_static do not connect '{source}' with '{target}'; found {known}{nor}"
                raise TransformError(text)
            up, down = up[: up.index(shared)], down[: down.index(shared)]
            if jumped := [self.jumps[frame] for frame in (*up, *down) if frame in self.jumps]:
                raise TransformError(jumped[0], jumped=True)
            self.used = {**self.used, **{frame: self._origin(frame) for frame in (*up, *down)}}
            to_shared, to_target = self._product(up, stamp), self._product(down, stamp)
        result: FloatArray = np.linalg.inv(to_target) @ to_shared
        return result

    def _look_for_jump(self, parent: str, child: str, pose: _Pose, static: bool) -> None:
        before, was = self._parents.get(child), self._static.get(child)
        if before is None:
            if static and self.used.get(child) == "robot.urdf":
                same = np.allclose(_matrix(pose), self.links.pose(child), atol=_ROUNDED)
                if parent != self.links.parents[child] or not same:
                    self.jumps[child] = f"'{child}' was where robot.urdf has it, and /tf_static says otherwise now"
            return
        if before != parent:
            self.jumps[child] = f"the parent of '{child}' was '{before}' and is '{parent}' now"
        elif static and was is None:
            self.jumps[child] = f"'{child}' was on /tf and is on /tf_static now"
        elif was is not None and not (static and _moved(was, pose) < _MOVED):
            moved = f"by {math.dist(was[:3], pose[:3]):.3g} m or in rotation" if static else "and is on /tf now"
            self.jumps[child] = f"'{child}' in '{parent}' is on /tf_static, but changed {moved}"

    def _look_for_contradiction(self, child: str, pose: _Pose, publisher: bytes) -> None:
        """Notice two publishers that alternate, each of which returns to what it said itself."""
        said = self._said.setdefault(child, {})
        last = next(reversed(said), publisher)
        if last != publisher and publisher in said:
            apart = _moved(said[last], pose)
            if _moved(said.pop(publisher), pose) + _APART < apart:
                text = f"two publishers on /tf contradict each other about '{child}', by {apart:.3g} m or in"
                self.jumps[child] = f"{text} rotation"
        said.pop(publisher, None)
        said[publisher] = pose
        while len(said) > _MOST_PUBLISHERS:
            del said[next(iter(said))]

    def _insert(self, samples: list[_Sample], sample: _Sample) -> None:
        if samples and sample[0] < samples[-1][0] - self._kept:  # the clock has jumped back
            samples.clear()
        at = bisect.bisect_left(samples, sample[0], key=_stamp_of)
        if at == len(samples) or samples[at][0] != sample[0]:  # as in tf2, the first one of a time is kept
            samples.insert(at, sample)
        oldest = samples[-1][0] - self._kept
        if samples[0][0] < oldest - 0.5 * self._kept:
            del samples[: bisect.bisect_left(samples, oldest, key=_stamp_of)]

    def _chain(self, frame: str) -> Iterator[str]:
        """Yield a frame and those above it; a loop ends it."""
        seen = set[str]()
        while frame not in seen:
            yield frame
            seen.add(frame)
            frame = self._parents.get(frame) or self.links.parents.get(frame, frame)

    def _origin(self, frame: str) -> str:
        """Return where the pose of a frame in its parent comes from."""
        return "/tf_static" if frame in self._static else "/tf" if frame in self._parents else "robot.urdf"

    def _product(self, frames: Sequence[str], stamp: int) -> FloatArray:
        """Return the transform [4, 4] from the first of ``frames`` to the parent of the last one."""
        result = np.eye(4)
        for frame in frames:
            result = self._pose(frame, stamp) @ result
        return result

    def _pose(self, frame: str, stamp: int) -> FloatArray:
        if (static := self._static.get(frame)) is not None:
            return _matrix(static)
        joint = self.links.moved_by.get(frame, "")
        if frame in self._parents:
            return self._between(self._samples[frame], stamp, f"transform of '{frame}'", _matrix)
        if not joint:
            return self.links.pose(frame)
        name = f"position of joint '{joint}', which moves '{frame}',"
        return self._between(self._joints[joint], stamp, name, lambda one: self.links.pose(frame, *one))

    @staticmethod
    def _between(
        samples: Sequence[_Sample], stamp: int, name: str, matrix: Callable[[_Pose], FloatArray]
    ) -> FloatArray:
        """Return the pose at ``stamp``; raises TransformError if no samples are around it."""
        at = bisect.bisect_left(samples, stamp, key=_stamp_of)
        if at < len(samples) and samples[at][0] == stamp:
            return matrix(samples[at][1])
        if not samples:
            raise TransformError(f"there is no {name.rstrip(',')} yet")
        if at in (0, len(samples)):
            apart, side = abs(stamp - samples[-1 if at else 0][0]) / 1e9, "older" if at else "newer"
            raise TransformError(
                f"the {'newest' if at else 'oldest'} {name} is {apart:.3g} s {side} than the image"
            )
        (before, first), (after, second) = samples[at - 1], samples[at]
        share, one, other = (stamp - before) / (after - before), matrix(first), matrix(second)
        one[:3, 3] += share * (other[:3, 3] - one[:3, 3])
        turned = rotation_vector(one[:3, :3].T @ other[:3, :3])
        one[:3, :3] = one[:3, :3] @ rotation_vector_matrix(share * turned)
        return one


def _stamp_of(sample: _Sample) -> int:
    return sample[0]


def _moved(one: Sequence[float], other: Sequence[float]) -> float:
    """Return by how much two poses differ; a quaternion and its negative are one rotation."""
    turned = min(math.dist(one[3:], [sign * number for number in other[3:]]) for sign in (1, -1))
    return max(math.dist(one[:3], other[:3]), turned)


def _matrix(pose: _Pose) -> FloatArray:
    return transform(read_rotation(np.array(pose[3:]), "quaternion_xyzw"), np.array(pose[:3]))
