"""The options of one arm and what follows from them, for the node's controller and for the guard."""

from collections.abc import Mapping

import numpy as np

from vla_ros.config import VELOCITY_OUTPUTS, Config
from vla_ros.control.command import Command
from vla_ros.control.envelope import Envelope
from vla_ros.control.following import Following
from vla_ros.control.measured import MeasuredArm, held_fingers, joint_speeds, position_of, sags
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray, JointState


class ArmOptions:
    """The options of one arm, and what follows from them.

    Args:
        config: All options.
        name: Name of the arm in ``config.arms``.
        kinematics: The arm's kinematics; None without a URDF.

    Attributes:
        arm: The arm's options.
        joint_names: Its N joints in command order; empty if a twist without kinematics needs none.
        measured: Reads its positions from joint states.
        envelope: Its limits.
        sags: How far each joint may be from where it is held, [N].
        speeds: How fast each joint can move (:func:`vla_ros.control.measured.joint_speeds`).
        sends_velocities: True if motion ends only with another command.
        sends_twists: True if it is the tip's motion.
        frame: Frame of a twist: the base of the kinematics or, without kinematics, the configured frame.

    Raises:
        ConfigError: A joint has no range left.
    """

    def __init__(self, config: Config, name: str, kinematics: Kinematics | None) -> None:
        self.arm = arm = next(each for each in config.arms if each.name == name)
        self.kinematics, robot = kinematics, arm.robot
        self.joint_names = kinematics.joint_names if kinematics else robot.joint_names
        self.measured = MeasuredArm(self.joint_names, kinematics)
        self.envelope = Envelope.from_config(config, arm, self.joint_names, kinematics)
        self.sags = sags(self.joint_names, kinematics)
        self.speeds = joint_speeds(arm, self.joint_names, kinematics)
        self.sends_velocities = arm.output in VELOCITY_OUTPUTS
        self.sends_twists = arm.output == "twist_stamped"
        frame = robot.tip_frame if config.control.delta_frame == "tip" else robot.base_frame
        self.frame = kinematics.base_frame if kinematics else frame

    def hold(
        self,
        following: Following,
        joints: JointState | None,
        last: FloatArray | None,
        fingers: Mapping[str, float | None],
    ) -> Command:
        """Return a command that holds the measured position (never zeros), or zero velocity.

        The arm keeps the position at which the hold began until somebody moves it (:meth:`Following.hold`), so that
        it does not sag further and further. If it was commanded elsewhere, moving there takes what the velocity
        limits require (``Command.duration``).

        Args:
            following: What is known of the arm's hold.
            joints: Newest joint state.
            last: The last command [N] since the arm was at rest, or None.
            fingers: The last command of each finger, which keeps it so that nothing is dropped; None without one.

        Raises:
            Refused: The joint state is stale or invalid and the output is no velocity, or a finger is unknown.
        """
        names: tuple[str, ...] = ()
        held, duration, speed = np.zeros(0), 0.0, self.envelope.joints.velocity
        if not self.sends_velocities:
            names = self.joint_names
            held = following.hold(last, self.measured.positions(joints), self.envelope.joints.lead)
            if last is not None:
                duration = float(np.max(np.abs(held - last)[speed > 0] / speed[speed > 0], initial=0.0))
        known = held_fingers(
            self.arm, {name: position_of(joints, name) if at is None else at for name, at in fingers.items()}
        )
        moves = self.sends_velocities and not self.sends_twists
        return Command(
            names=names + tuple(known),
            positions=np.concatenate((held, list(known.values()))),
            stamp=joints.stamp if joints else 0,
            arm=self.arm.name,
            hold=True,
            duration=duration,
            frame_id=self.frame if self.sends_velocities else "",
            twist=(np.zeros(3), np.zeros(3)) if self.sends_twists else None,
            velocities=dict.fromkeys(self.joint_names, 0.0) if moves else None,
        )
