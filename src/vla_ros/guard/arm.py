"""What the guard knows of one arm."""

import json
import math
from collections import deque

import numpy as np

from vla_ros.config import Config, build
from vla_ros.contract.binding import make_arms
from vla_ros.control.command import Command
from vla_ros.control.following import Following
from vla_ros.control.joints import JointStateMerger
from vla_ros.guard.checks import ArmCheck
from vla_ros.guard.frames import GuardFrame, Kind
from vla_ros.guard.history import JointHistory
from vla_ros.types import FloatArray, JointState

_MOST = 512  # joint states


class GuardedArm:
    """An arm at rest, of which nothing is known yet.

    Attributes:
        check: With the options of the frame that is checked.
        newest_check: With the newest ones.
        newest: The joint state that is believed, merged from several publishers.
        arrived: When that arrived.
        unmerged: Joint states that are not merged yet, their publishers, when they arrived, and whether the arm
            moved then.
        sent: The last motion or hold of the node that was sent.
        last: Positions that were sent last, [N].
        proposed: Positions of the node's last motion or hold, [N].
        fingers: Positions [F] of the fingers that were sent last; NaN without a command.
        speed: Speed of the last motion, [N].
        deadline: When its motion ends, or its hold is due (monotonic, ns); None if it holds.
        waiting: Frames, since when they wait, and the options that apply to them.
        needs_hold: True if the node must hold before its next motion.
    """

    def __init__(self, check: ArmCheck, *, shares_topic: bool) -> None:
        self.check = self.newest_check = check
        own = (*check.joint_names, *check.arm.measured_fingers) if shares_topic else ()
        self.merger = JointStateMerger(check.joint_names, check.speeds, own)
        self.following, self.history = Following(check.joint_names, check.sags), JointHistory(check.joint_names)
        self.needs_hold, self.arrived = False, 0
        self.newest: JointState | None = None
        self.unmerged = deque[tuple[JointState, bytes, int, bool]](maxlen=_MOST)
        self.sent: GuardFrame | None = None
        self.last: FloatArray | None = None
        self.proposed: FloatArray | None = None
        self.fingers = np.full(len(check.arm.robot.gripper_joint_names), np.nan)
        self.speed = np.zeros(len(check.joint_names))
        self.deadline: int | None = None
        self.waiting = deque[tuple[GuardFrame, int, ArmCheck]]()

    @property
    def moves(self) -> bool:
        """True until a hold, or the end of a velocity, was sent."""
        return self.deadline is not None

    def needs_joints(self, frame: GuardFrame) -> bool:
        """Return True if a frame is checked by a joint state: neither a twist nor a hold that is in force."""
        if frame.kind is not Kind.HOLD:
            return bool(self.check.joint_names) and not self.check.sends_twists
        held = self.following.held
        return not self.check.sends_velocities and (held is None or not self.check.is_at(frame, held))

    def hold(self) -> Command:
        """Return a hold where the node would hold; raises Refused if that is not known, or a finger is not."""
        positions = (None if math.isnan(at) else at for at in self.fingers.tolist())
        fingers = dict(zip(self.check.arm.robot.gripper_joint_names, positions, strict=True))
        return self.check.hold(self.following, self.newest, self.last, fingers)


def parse_options(text: str) -> Config:
    """Return the options of an OPTIONS packet: JSON by flat name."""
    return build(json.loads(text), complete=False)


def guarded_arms(config: Config) -> list[GuardedArm]:
    """Return the arms in the order of ``Config.arms``."""
    checks = [ArmCheck(config, name, arm.kinematics) for name, arm in make_arms(config).items()]
    return [GuardedArm(check, shares_topic=len(checks) > 1) for check in checks]
