"""Judges whether an episode succeeded, or which wrong object was moved."""

from __future__ import annotations

from collections.abc import Mapping

from vla_ros.sim.scene import Scene
from vla_ros.sim.tasks import SIDES
from vla_ros.types import FloatArray

LIFT_HEIGHT = 0.08
"""Height by which the centre of a lifted object has risen, metres."""
LIFT_STEPS = 3
"""Consecutive steps for which it must stay lifted; a bounce does not count."""
PUSH_DISTANCE = 0.08
"""Distance that a pushed object has moved to the named side, metres."""


class Judge:
    """Decides one episode; the first decision is final.

    A pick succeeds when the target stays :data:`LIFT_HEIGHT` above its start for :data:`LIFT_STEPS` steps, a push
    when it has moved :data:`PUSH_DISTANCE` to the named side. The episode fails if another object is lifted first
    or, in a push, moved that far in any direction.
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
        """Whether the named object was moved as the instruction says."""
        return self.reason == "success"

    @property
    def decided(self) -> bool:
        """Whether the outcome is final."""
        return bool(self.reason)

    def update(self, positions: Mapping[str, FloatArray]) -> bool:
        """Take the object positions (name to [3], metres) after a step; returns :attr:`decided`."""
        if self.decided:
            return True
        target = self._scene.target.name
        for thing in self._scene.objects:
            moved = positions[thing.name] - thing.position
            self._lifted[thing.name] = self._lifted[thing.name] + 1 if moved[2] > LIFT_HEIGHT else 0
            lifted = self._lifted[thing.name] >= LIFT_STEPS
            if self._scene.task.verb == "pick":
                done = lifted
            elif thing.name == target:
                done = SIDES[self._scene.task.side] * moved[1] > PUSH_DISTANCE
            else:
                done = lifted or float(moved[0] ** 2 + moved[1] ** 2) > PUSH_DISTANCE**2
            if done:
                self.reason = "success" if thing.name == target else "wrong_object"
                self.touched = "" if thing.name == target else thing.name
                return True
        return False
