"""URDFs of the robots in ``config/robots``, for ros2_control's mock hardware and for kinematics.

The URDFs come from the package ``example-robot-data`` (extra ``robots``) if it is installed; otherwise they are
simple chains of links with the same joint names.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files

Limits = tuple[float, float, float]
"""Lower and upper position limit, and velocity limit: rad and rad/s, or m and m/s."""
_TURN: Limits = (-2.9, 2.9, 2.6)
_FINGERS: Limits = (-0.7, 1.8, 3.0)


@dataclass(frozen=True)
class Description:
    """Description of one arm."""

    joints: tuple[str, ...]  # joint names in command order; the last link is called ``tip``
    home: tuple[float, ...]  # initial positions of the mock hardware
    fingers: tuple[str, ...]  # gripper joints, added at the tip if ``source`` lacks them
    base: str = "base_link"
    tip: str = "tool0"
    limits: Mapping[str, Limits] = field(default_factory=dict)  # limits of some joints of a simple chain
    source: str = ""  # file in example-robot-data's ``robots``; "" for a simple chain
    renamed: tuple[str, str] = ("", "")  # name prefix in ``source``, and its replacement


_UR = (
    "shoulder_pan_joint",
    "shoulder_lift_joint",
    "elbow_joint",
    "wrist_1_joint",
    "wrist_2_joint",
    "wrist_3_joint",
)
ROBOTS: Mapping[str, Description] = {
    "ur5e": Description(
        _UR,
        (0.0, -1.57, 1.57, -1.57, -1.57, 0.0),
        ("robotiq_85_left_knuckle_joint",),
        source="ur_description/urdf/ur5_gripper.urdf",
    ),
    "fr3": Description(
        tuple(f"fr3_joint{number}" for number in range(1, 8)),
        (0.0, -0.785, 0.0, -2.356, 0.0, 1.57, 0.785),
        ("fr3_finger_joint1", "fr3_finger_joint2"),
        "fr3_link0",
        "fr3_hand_tcp",
        source="panda_description/urdf/panda.urdf",
        renamed=("panda_", "fr3_"),
    ),
    "xarm7": Description(
        tuple(f"joint{number}" for number in range(1, 8)),
        (0.0, -0.247, 0.0, 0.909, 0.0, 1.156, 0.0),
        ("drive_joint",),
        "link_base",
        "link_eef",
        source="xarm_description/urdf/xarm7.urdf",
    ),
    "so101": Description(
        ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"),
        (0.0,) * 5,
        ("gripper",),
        tip="gripper_frame_link",
        source="so_arm_description/urdf/so101.urdf",
    ),
    "aloha": Description(
        ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate"),
        (0.0, -0.96, 1.16, 0.0, -0.3, 0.0),
        ("gripper",),
    ),
    "kinova_j2": Description(
        tuple(f"j2s6s200_joint_{number}" for number in range(1, 7)),
        (0.0, 2.9, 1.3, 4.2, 1.4, 0.0),
        (),
        "j2s6s200_link_base",
        "j2s6s200_end_effector",
        limits=dict.fromkeys((f"j2s6s200_joint_{number}" for number in range(1, 7)), (-6.2, 6.2, 0.6)),
        source="kinova_description/robots/kinova.urdf",
    ),
}


def urdf(name: str, *, own: bool = False, prefix: str = "") -> str:
    """Return the robot's URDF.

    Args:
        name: One of :data:`ROBOTS`.
        own: Use a simple chain even if example-robot-data is installed.
        prefix: Prefix of all names of a simple chain.
    """
    robot = ROBOTS[name]
    text = "" if own or prefix else _installed(robot.source)
    if not text:
        return ET.tostring(_chain(robot, prefix), "unicode")
    root = ET.fromstring(text.replace(*robot.renamed) if robot.renamed[0] else text)
    movable = {joint.get("name"): joint for joint in root.iter("joint") if joint.get("type") not in (None, "fixed")}
    for finger in robot.fingers:
        if finger not in movable:
            _joint(root, finger, robot.tip, f"{finger}_link", "0 1 0", _FINGERS)
    return ET.tostring(root, "unicode")


def with_mock_hardware(description: str, homes: Mapping[str, float], interface: str = "position") -> str:
    """Add ros2_control's mock hardware, which follows commands at once.

    Args:
        description: A URDF.
        homes: Initial position of each joint that a controller moves.
        interface: ``position``, or ``velocity`` for arms (velocities are integrated).
    """
    root = ET.fromstring(description)
    for own in root.findall("ros2_control"):  # of the real hardware
        root.remove(own)
    mimics = {joint.get("name") for joint in root.iter("joint") if joint.find("mimic") is not None}
    system = ET.SubElement(root, "ros2_control", name="mock", type="system")
    hardware = ET.SubElement(system, "hardware")
    ET.SubElement(hardware, "plugin").text = "mock_components/GenericSystem"
    ET.SubElement(hardware, "param", name="calculate_dynamics").text = "true"
    for name, home in homes.items():
        joint = ET.SubElement(system, "joint", name=name)
        for command in () if name in mimics else dict.fromkeys(("position", interface)):
            ET.SubElement(joint, "command_interface", name=command)
        position = ET.SubElement(joint, "state_interface", name="position")
        ET.SubElement(position, "param", name="initial_value").text = str(home)
        for state in ("velocity", "acceleration", "effort"):
            ET.SubElement(joint, "state_interface", name=state)
    return ET.tostring(root, "unicode")


def _installed(source: str) -> str:
    """Return the content of a file of example-robot-data, or "" if the package is not installed."""
    try:
        known = files("example-robot-data") or []
    except PackageNotFoundError:
        return ""
    found = [file for file in known if source and str(file).endswith(f"robots/{source}")]
    return found[0].read_text() if found else ""


def _chain(robot: Description, prefix: str) -> ET.Element:
    """Return a chain of 0.15 m links whose joints turn alternately about z and y."""
    root = ET.Element("robot", name="chain")
    ET.SubElement(root, "link", name=prefix + robot.base)
    link = prefix + robot.base
    for index, name in enumerate(robot.joints):
        last = index == len(robot.joints) - 1
        child = prefix + (robot.tip if last else f"link_{index + 1}")
        axis = "0 0 1" if index % 2 == 0 else "0 1 0"
        _joint(root, prefix + name, link, child, axis, robot.limits.get(name, _TURN), "0 0 0.15")
        link = child
    for finger in robot.fingers:
        _joint(root, prefix + finger, link, f"{prefix}{finger}_link", "0 1 0", _FINGERS)
    return root


def _joint(root: ET.Element, name: str, parent: str, child: str, axis: str, limits: Limits, at: str = "") -> None:
    ET.SubElement(root, "link", name=child)
    joint = ET.SubElement(root, "joint", name=name, type="revolute")
    ET.SubElement(joint, "parent", link=parent)
    ET.SubElement(joint, "child", link=child)
    ET.SubElement(joint, "origin", xyz=at or "0 0 0", rpy="0 0 0")
    ET.SubElement(joint, "axis", xyz=axis)
    low, high, fastest = map(str, limits)
    ET.SubElement(joint, "limit", lower=low, upper=high, velocity=fastest, effort="100")


def homes(name: str, prefixes: Sequence[str] = ("",)) -> dict[str, float]:
    """Return the initial position of each joint that a controller moves, including fingers."""
    robot = ROBOTS[name]
    one = {**dict(zip(robot.joints, robot.home, strict=True)), **dict.fromkeys(robot.fingers, 0.01)}
    return {prefix + joint: home for prefix in prefixes for joint, home in one.items()}
