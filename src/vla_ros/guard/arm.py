"""What the guard knows of one arm."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from vla_ros.config import Config
from vla_ros.control.command import Command
from vla_ros.control.following import Following
from vla_ros.control.joints import JointStateMerger
from vla_ros.guard.checks import ArmCheck
from vla_ros.guard.frames import GuardFrame
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
    expires: Command | None = None  # the velocity that ends then
    # Frames, since when they wait, and the options that apply to them.
    waiting: deque[tuple[GuardFrame, int, ArmCheck]] = field(default_factory=deque)
    needs_hold: bool = False  # of the node, before its next motion


def guarded_arm(config: Config, check: ArmCheck) -> GuardedArm:
    """Return an arm at rest, of which nothing is known."""
    own = (*check.names, *check.arm.measured_fingers) if len(config.arms) > 1 else ()
    merger, following = JointStateMerger(check.names, check.speeds, own), Following(check.names, check.sags)
    still = np.zeros(len(check.names))
    return GuardedArm(check, check, JointHistory(check.names), merger, following, speed=still)
