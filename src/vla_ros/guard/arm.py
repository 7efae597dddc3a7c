"""What the guard knows of one arm."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from vla_ros.config import Config
from vla_ros.control.following import Following
from vla_ros.control.joints import JointStateMerger
from vla_ros.control.measured import held_fingers, position_of
from vla_ros.guard.checks import ArmCheck
from vla_ros.guard.frames import GuardFrame, Kind
from vla_ros.guard.history import JointHistory
from vla_ros.types import FloatArray, JointState

_MOST = 512  # joint states


@dataclass(eq=False)
class GuardedArm:
    """What the guard knows of one arm."""

    check: ArmCheck  # with the options of the frame that is checked
    newest_check: ArmCheck  # with the newest ones
    history: JointHistory
    merger: JointStateMerger
    following: Following
    stamped: bool = True  # its joint states have stamps
    newest: JointState | None = None  # believed, and when it arrived
    arrived: int = 0
    # Not yet merged: joint states, their publishers, when they arrived, and whether the arm moved.
    unmerged: deque[tuple[JointState, bytes, int, bool]] = field(default_factory=lambda: deque(maxlen=_MOST))
    last: FloatArray | None = None  # [N], positions that were sent last
    proposed: FloatArray | None = None  # [N], of the node's last motion
    fingers: FloatArray = field(default_factory=lambda: np.zeros(0))  # sent last; NaN without a command
    speed: FloatArray = field(default_factory=lambda: np.zeros(0))  # [N], of the last motion
    ends: int | None = None  # when its motion ends, or its hold is due; None if it holds
    # Frames, since when they wait, and the options that apply to them.
    waiting: deque[tuple[GuardFrame, int, ArmCheck]] = field(default_factory=deque)
    needs_hold: bool = False  # of the node, before its next motion

    def needs_joints(self, frame: GuardFrame) -> bool:
        """Return True if a frame is checked by a joint state: neither a twist nor a hold that is in force."""
        if not self.check.names or self.check.motion is Kind.TWIST:
            return False
        if frame.kind is not Kind.HOLD:
            return True
        held = self.following.held
        return not self.check.sends_velocities and (held is None or not self.check.is_at(frame, held))

    def zeros(self, fingers: Mapping[str, float] = MappingProxyType({})) -> GuardFrame:
        """Return a hold at zero velocity, with these ``fingers``."""
        return self._frame(np.zeros(self.check.count), fingers)

    def hold(self) -> GuardFrame:
        """Return a hold where the node would hold; raises Refused if that is not known, or a finger is not."""
        check, joints, limits, duration = self.check, self.newest, self.check.envelope.joints, 0.0
        names = check.arm.robot.gripper_joint_names
        told = dict(zip(names, self.fingers.tolist(), strict=False))
        wanted = {name: told.get(name, math.nan) for name in names}
        fingers = held_fingers(
            check.arm, {name: position_of(joints, name) if math.isnan(at) else at for name, at in wanted.items()}
        )
        if check.sends_velocities:
            return self.zeros(fingers)
        positions = self.following.hold(self.last, check.measured.positions(joints), limits.lead)
        if self.last is not None:
            away, free = np.abs(positions - self.last), limits.velocity > 0
            duration = float(np.max(away[free] / limits.velocity[free], initial=0.0))
        return replace(self._frame(positions, fingers), stamp=joints.stamp if joints else 0, duration=duration)

    def _frame(self, numbers: FloatArray, fingers: Mapping[str, float]) -> GuardFrame:
        ends = [fingers.get(name, math.nan) for name in self.check.arm.robot.gripper_joint_names]
        return GuardFrame(Kind.HOLD, values=np.concatenate((numbers, ends)))


def guarded_arm(config: Config, check: ArmCheck) -> GuardedArm:
    """Return an arm at rest, of which nothing is known."""
    own = (*check.names, *check.arm.measured_fingers) if len(config.arms) > 1 else ()
    merger, following = JointStateMerger(check.names, check.speeds, own), Following(check.names, check.sags)
    still = np.zeros(len(check.names))
    return GuardedArm(check, check, JointHistory(check.names), merger, following, speed=still)
