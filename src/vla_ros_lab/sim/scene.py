"""Draws scenes from a seed (object positions, the task, the arms' start positions) and judges them.

A scene depends only on its seed and options (numpy's PCG64), not on the machine or on earlier scenes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vla_ros.types import FloatArray
from vla_ros_lab.sim.arm import ONE_ARM, Mount
from vla_ros_lab.sim.tasks import COLOURS, SHAPES, SIDES, SLOTS, TASK_NAMES, Task, make_task

HALF_HEIGHT = {"cube": 0.020, "cylinder": 0.028, "ball": 0.023}
"""Height of each shape's centre when it rests on the table, metres."""

TABLE_X = (0.38, 0.62)
TABLE_Y = (-0.20, 0.20)
"""Where an arm's objects are placed, metres in its base frame."""

CLEARANCE = 0.10
"""Minimum distance between the centres of two objects, metres: the open hand fits between them."""

PUSH_ROOM = 0.20
"""Free space along the push in front of and behind the object, metres: for the object and for the hand."""

START_LOW = (0.38, -0.12, 0.18)
START_HIGH = (0.54, 0.12, 0.30)
"""Box from which a tool's start position is drawn, metres in the arm's base frame."""

LIFT_HEIGHT = 0.08
"""Height by which an object's centre must rise to count as lifted, metres."""
LIFT_STEPS = 3
"""Consecutive steps for which an object must stay lifted; a bounce does not count."""
PUSH_DISTANCE = 0.08
"""Distance that an object must move to the named side to count as pushed, metres."""

_PUSH_LANE = 0.09
_PUSH_Y = 0.13
_BIAS = 0.7


@dataclass(frozen=True)
class SceneObject:
    """One object on the table."""

    colour: str  # key of :data:`~vla_ros_lab.sim.tasks.COLOURS`
    shape: str  # one of :data:`~vla_ros_lab.sim.tasks.SHAPES`
    # (x, y, z) of the centre in the table's frame (one arm: its base frame), metres.
    position: tuple[float, float, float]
    yaw: float  # rotation about z, radians

    @property
    def name(self) -> str:
        """Unique name within the scene, such as ``red_cube``."""
        return f"{self.colour}_{self.shape}"


@dataclass(frozen=True)
class Scene:
    """The objects on the table, the task and the arms' start positions."""

    seed: int
    objects: tuple[SceneObject, ...]  # a target per arm, then the distractors, in the order of the arms
    task: Task
    # Start position of each arm's ``tool``, float64 [arms, 3], metres in its base frame.
    starts: FloatArray = field(compare=False)

    @property
    def instruction(self) -> str:
        return self.task.instruction


def draw(
    seed: int,
    tasks: Sequence[str] = ("pick",),
    mounts: Sequence[Mount] = ONE_ARM,
    objects: int = 0,
    shrink: float = 0.0,
    displace: float = 0.0,
) -> Scene:
    """Return the scene of ``seed`` with one of ``tasks`` (names of :data:`TASK_NAMES`).

    A single arm has a target and two or three distractors (``objects`` sets the total); each of two arms has a
    target and one distractor. The region of the objects is smaller by ``shrink`` on each side, and targets are
    ``displace`` outside of it, both in metres. Most distractors share the colour or the shape of a target, so that
    neither colour nor shape alone identifies it.
    """
    arms = len(mounts)
    rng = np.random.default_rng([seed, 0x7AB1E])
    name = tasks[int(rng.integers(len(tasks)))] if tasks else TASK_NAMES[0]
    kinds = _draw_kinds(rng, count=objects or (int(rng.integers(3, SLOTS + 1)) if arms == 1 else SLOTS))
    task = make_task(name, *("_".join(kind) for kind in kinds[:arms]))
    bases = np.resize([mount.position for mount in mounts], (len(kinds), 3))[:, :2]  # of each object's arm
    low, high = np.array([TABLE_X, TABLE_Y]).T + np.array([[shrink], [-shrink]])
    while True:
        places = bases + rng.uniform(low, high, (len(kinds), 2))
        if displace:
            places[:arms] = bases[:arms] + [_outside(rng, low - displace, high + displace) for _ in range(arms)]
        if task.verb == "push":
            places[0, 1] = rng.uniform(-_PUSH_Y, _PUSH_Y)
        if _apart(places) and (task.verb == "pick" or _lane_is_free(places, SIDES[task.side])):
            break
    things = tuple(
        SceneObject(colour, shape, (float(x), float(y), HALF_HEIGHT[shape]), float(rng.uniform(-0.35, 0.35)))
        for (colour, shape), (x, y) in zip(kinds, places, strict=True)
    )
    return Scene(seed, things, task, rng.uniform(START_LOW, START_HIGH, (arms, 3)))


def _outside(rng: np.random.Generator, low: FloatArray, high: FloatArray) -> FloatArray:
    """Return a place on one of the four sides of a rectangle, float64 [2]."""
    place = rng.uniform(low, high)
    axis, end = rng.integers(2, size=2)
    place[axis] = (low, high)[end][axis]
    return np.asarray(place)


def switched(scene: Scene) -> Scene:
    """Return the same scene with the first distractor of each arm as its target."""
    arms = len(scene.starts)
    names = [thing.name for thing in scene.objects[arms : 2 * arms]]
    return replace(scene, task=make_task(scene.task.name, *names))


def shuffled_instruction(scene: Scene) -> str:
    """Return an instruction that names other objects of the scene; for one arm, the seed determines the object."""
    if len(scene.starts) > 1:
        return switched(scene).instruction
    other = int(np.random.default_rng([scene.seed, 0x5117]).integers(1, len(scene.objects)))
    return make_task(scene.task.name, scene.objects[other].name).instruction


def _draw_kinds(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Sample ``count`` distinct pairs of colour and shape, the target's first."""
    everything = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    target = everything[int(rng.integers(len(everything)))]
    kinds = [target]
    while len(kinds) < count:
        left = [kind for kind in everything if kind not in kinds]
        if rng.random() < _BIAS:
            left = [kind for kind in left if (kind[0] == target[0]) != (kind[1] == target[1])]
        kinds.append(left[int(rng.integers(len(left)))])
    return kinds


def _apart(places: FloatArray) -> bool:
    gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)
    return bool(np.all(gaps + np.eye(len(places)) > CLEARANCE))


def _lane_is_free(places: FloatArray, side: float) -> bool:
    """Return True if no distractor is in the way of the hand and the pushed object."""
    across = np.abs(places[1:, 0] - places[0, 0])
    along = side * (places[1:, 1] - places[0, 1])
    return bool(np.all((across > _PUSH_LANE) | (along > PUSH_ROOM) | (along < -PUSH_ROOM * 0.75)))


class Judge:
    """Judges one episode; the first decision is final.

    A pick succeeds when all targets have stayed :data:`LIFT_HEIGHT` above their start for :data:`LIFT_STEPS` steps
    at the same time, a push when the target has moved :data:`PUSH_DISTANCE` to the named side. The episode fails if
    another object is lifted first or, in a push, moved that far in any direction.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._lifted = dict.fromkeys((thing.name for thing in scene.objects), 0)
        self.reason = ""
        """``success``, ``wrong_object``, or "" until decided."""
        self.touched = ""
        """Name of the wrong object, or ""."""

    @property
    def success(self) -> bool:
        return self.reason == "success"

    @property
    def decided(self) -> bool:
        return bool(self.reason)

    def update(self, positions: Mapping[str, FloatArray]) -> bool:
        """Judge the object positions (name to [3], metres) after a step; return :attr:`decided`."""
        if self.decided:
            return True
        task = self._scene.task
        done = set()
        for thing in self._scene.objects:
            moved = positions[thing.name] - thing.position
            self._lifted[thing.name] = self._lifted[thing.name] + 1 if moved[2] > LIFT_HEIGHT else 0
            lifted = self._lifted[thing.name] >= LIFT_STEPS
            if thing.name not in task.targets:
                pushed = task.verb == "push" and float(moved[0] ** 2 + moved[1] ** 2) > PUSH_DISTANCE**2
                if lifted or pushed:
                    self.reason, self.touched = "wrong_object", thing.name
                    return True
            elif lifted if task.verb == "pick" else SIDES[task.side] * moved[1] > PUSH_DISTANCE:
                done.add(thing.name)
        if done == {*task.targets}:
            self.reason = "success"
        return self.decided
