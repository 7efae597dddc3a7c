"""The section ``takeover``: with what a person takes over the arm, and how it is checked."""

import re
from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.config.sections import NUMBER, Gauge, read_gauge

PERSON_RATE_HZ = 50.0
"""Rate of a person's steps, Hz."""
INPUTS = ("none", "leader", "joy", "twist", "twist_stamped", "pose")
DIRECTIONS = ("x", "y", "z", "roll", "pitch", "yaw")
BUTTONS = ("deadman", "correct", "pause", "resume", "success", "failure", "discard", "open", "close", "reach")
_SCALED = rf"(?:\s*\*\s*({NUMBER}))?"
_AXIS = re.compile(rf"(\w+)\s*=\s*(\d+){_SCALED}")
_JOINT = re.compile(rf"([^\s=]+)\s*=\s*([^\s=*]+){_SCALED}(?:\s*([-+])\s*({NUMBER}))?")
_BUTTON = re.compile(r"(\w+)\s*=\s*(\d+)")


@dataclass(frozen=True)
class LeaderJoint:
    """A joint of the arm and the leader's joint that moves it: ``position = scale * leader + zero``."""

    name: str
    leader: str
    scale: float  # -1 for another sign
    zero: float  # rad or m


@dataclass(frozen=True)
class Axis:
    """A direction in which the tip moves, and the axis of a Joy that moves it."""

    direction: str  # one of :data:`DIRECTIONS`
    index: int
    scale: float  # share of the largest speed at 1


@dataclass(frozen=True)
class TakeoverConfig:
    """The input with which a person takes over the arm, and its checks; see docs/takeover.md."""

    input: str = option(
        "none",
        "What a person holds: a leader arm (JointState), a pad or SpaceMouse (joy: Joy), velocities of the tip "
        "(twist, twist_stamped, in base axes), a controller's pose (pose: PoseStamped, relative while deadman is "
        "pressed). none: a person can only pause",
        choices=INPUTS,
    )
    leader: str = option("", "In: sensor_msgs/JointState of the leader arm; with several arms, one for each")
    joints: tuple[str, ...] = option(
        (),
        "The leader's joints, as JOINT = LEADER_JOINT [* SCALE] [+ ZERO], with JOINT = SCALE * LEADER_JOINT + "
        "ZERO; empty: the same names, signs and zeros",
    )
    gripper: str = option(
        "", "The leader's gripper, as LEADER_JOINT = CLOSED..OPEN in its unit; empty: only the buttons open, close"
    )
    topic: str = option("", "In: the topic of twist, twist_stamped or pose")
    joy: str = option("", "In: sensor_msgs/Joy with the buttons, and with the axes of joy; a pedal is a Joy, too")
    buttons: tuple[str, ...] = option((), f"Buttons of the Joy, as NAME = INDEX, of {', '.join(BUTTONS)}")
    axes: tuple[str, ...] = option(
        (), f"Axes of the Joy, as DIRECTION = INDEX [* SCALE], of {', '.join(DIRECTIONS)}; 1 is the largest speed"
    )
    frame: str = option("base", "Axes in which joy moves the tip", choices=("base", "tip"))
    arm: str = option("", "Which of several arms joy, twist and pose move; empty: the first")
    linear_speed: float = option(0.1, "Speed of the tip at 1 on an axis of joy", "m/s", 0, 10, live=True)
    angular_speed: float = option(0.5, "Turning speed of the tip at 1 on an axis of joy", "rad/s", 0, 10, live=True)
    max_joint_speed: float = option(
        1.0, "Largest joint speed of a person's commands, besides all other limits", "rad/s or m/s", 0.001, 100,
        live=True,
    )  # fmt: skip
    tolerance: float = option(
        0.1,
        "A leader arm moves the arm once each of its joints is this near to the arm's",
        "rad or m",
        0.001,
        3.2,
        live=True,
    )
    lost_distance: float = option(
        0.5,
        "A leader arm that is further away than this has jumped or lost the arm: hold until it is within tolerance",
        "rad or m",
        0.002,
        6.4,
        live=True,
    )
    allow_reach: bool = option(
        False, "true: while the button reach is pressed, the arm goes to the leader, within its limits", live=True
    )
    stale_after: float = option(
        0.25,
        "No message of the input, or of the Joy, that was published within this time: hold",
        "s",
        0.01,
        10,
        live=True,
    )
    frozen_after: float = option(
        5.0,
        "An input that repeats the same motion for this long, or the same positions while it must follow: hold",
        "s",
        0.05,
        3600,
        live=True,
    )
    longest_press: float = option(
        60.0, "deadman pressed without a break for this long: hold until it is released", "s", 0.1, 3600, live=True
    )

    @property
    def parsed_joints(self) -> tuple[LeaderJoint, ...]:
        """``joints``; those that cannot be read are left out."""
        found = (_JOINT.fullmatch(text.strip()) for text in self.joints)
        return tuple(
            LeaderJoint(each[1], each[2], float(each[3] or 1), float((each[4] or "") + (each[5] or "0")))
            for each in found
            if each
        )

    @property
    def parsed_buttons(self) -> dict[str, int]:
        """``buttons`` by name; those that cannot be read are left out."""
        found = (_BUTTON.fullmatch(text.strip()) for text in self.buttons)
        return {each[1]: int(each[2]) for each in found if each and each[1] in BUTTONS}

    @property
    def parsed_axes(self) -> tuple[Axis, ...]:
        """``axes``; those that cannot be read are left out."""
        found = (_AXIS.fullmatch(text.strip()) for text in self.axes)
        return tuple(
            Axis(each[1], int(each[2]), float(each[3] or 1)) for each in found if each and each[1] in DIRECTIONS
        )

    @property
    def gauge(self) -> Gauge | None:
        """The joint of ``gripper``; None if it is empty or invalid."""
        return read_gauge(self.gripper)
