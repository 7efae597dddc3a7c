"""Judges whether an episode succeeded, or which wrong object was moved."""

from __future__ import annotations

from collections.abc import Mapping

from vla_ros.sim.scene import Scene
from vla_ros.sim.tasks import SIDES
from vla_ros.types import FloatArray

LIFT_HEIGHT = 0.08
"""Height by which an object's centre must rise to count as lifted, metres."""
LIFT_STEPS = 3
"""Consecutive steps for which an object must stay lifted; a bounce does not count."""
PUSH_DISTANCE = 0.08
"""Distance that an object must move to the named side to count as pushed, metres."""


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
        """True if the named objects were moved as instructed."""
        return self.reason == "success"

    @property
    def decided(self) -> bool:
        """True if the outcome is final."""
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
