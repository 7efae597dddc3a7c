"""Where a recorded run comes too near something, by the collision check of the running node."""

from collections.abc import Mapping

import numpy as np

from vla_ros.control.collision import CollisionCheck, refusal
from vla_ros.control.reasons import Reason, Refused
from vla_ros.control.robot import of_arm
from vla_ros.types import FloatArray, JointState

_COLLISION = frozenset((Reason.COLLISION_SELF, Reason.COLLISION_SCENE))
_MOST = 100  # places of a bag


class Stops:
    """Notes where ``check`` refuses the policy's commands, and the motion that the bag has.

    Attributes:
        found: Time in ns, and what is too near, wherever it was not at the frame before.
    """

    def __init__(self, check: CollisionCheck | None) -> None:
        self._check = check if check is not None and check.world is not None else None
        self.found: list[tuple[int, str]] = []
        self._before: FloatArray | None = None
        self._last = dict[str, str]()  # the bodies at the frame before

    def begin(self) -> None:
        """Forget where the arm was."""
        self._before, self._last = None, {}

    def command(self, time: int, refused: Refused | None) -> None:
        """Note whether the policy's command was refused for a collision."""
        detail = refused.detail if refused is not None and refused.reason in _COLLISION else ""
        self._note(time, "the policy's command", detail)

    def motion(self, time: int, joints: JointState | Mapping[str, JointState] | None) -> None:
        """Check the way from the joint state before to ``joints``."""
        if self._check is None or joints is None or self._check.world is None:
            return
        [path], _ = self._check.ways((), {arm: of_arm(joints, arm) for arm in self._check.world.joints})
        before, self._before = self._before, path[0]
        refused = None if before is None else refusal(self._check.clearance(np.stack([before, path[0]])[None]))
        self._note(time, "the recorded motion", refused.detail if refused else "")

    def _note(self, time: int, what: str, detail: str) -> None:
        bodies = detail.partition(":")[0]
        if bodies and bodies != self._last.get(what) and len(self.found) < _MOST:
            self.found.append((time, f"{what}: {detail}"))
        self._last[what] = bodies
