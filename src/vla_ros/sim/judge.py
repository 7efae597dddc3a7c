"""Did the arm do what it was told, and to which object?"""

from __future__ import annotations

from collections.abc import Mapping

from vla_ros.sim.scene import Scene
from vla_ros.sim.tasks import SIDES
from vla_ros.types import FloatArray

LIFT_HEIGHT = 0.08
"""A lifted object's centre is this much higher than where it lay, metres."""
LIFT_STEPS = 3
"""Steps in a row for which it must stay so: a bounce does not count."""
PUSH_DISTANCE = 0.08
"""A pushed object has moved this far to the named side, metres."""


class Judge:
    """Watches one episode and says, once and for all, how it ended.

    A pick succeeds when the target has been lifted by :data:`LIFT_HEIGHT` for :data:`LIFT_STEPS` steps; a push when
    it lies :data:`PUSH_DISTANCE` further to the named side. If another object gets there first (lifted, or
    in a push moved that far in any direction), the episode has failed for good.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._lifted = dict.fromkeys((thing.name for thing in scene.objects), 0)
        self.reason = ""
        """``success``, ``wrong_object`` or "" while undecided."""
        self.touched = ""
        """Name of the wrong object, or ""."""

    @property
    def success(self) -> bool:
        """True where the named object ended as told."""
        return self.reason == "success"

    @property
    def decided(self) -> bool:
        """True where nothing can change any more."""
        return bool(self.reason)

    def update(self, positions: Mapping[str, FloatArray]) -> bool:
        """Look at the object positions (name to [3], metres) after one step; returns :attr:`decided`."""
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
