"""Reads the links and joints of a URDF, and finds the chain from base to tip."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_ros.config.files import read_bytes
from vla_ros.errors import ConfigError, did_you_mean
from vla_ros.kinematics.rotations import read_rotation, write_rotation

DEMO, DEMO_TWO_ARMS = "demo", "demo_two_arms"
DEMO_MOUNTS = {"left": (0.0, 0.3, 0.0), "right": (0.0, -0.3, 0.0)}
"""Where ``demo_two_arms`` mounts its arms on the link ``table``, metres; both face +x."""
_MOVABLE = ("revolute", "prismatic", "continuous")
_MOST_BYTES = 16 << 20
_UNBOUNDED = 1e6  # rad; limit of a continuous joint


@dataclass(frozen=True)
class UrdfJoint:
    """One joint of a URDF."""

    name: str
    kind: str
    parent: str
    child: str

    @property
    def is_movable(self) -> bool:
        return self.kind in _MOVABLE


@dataclass(frozen=True)
class Urdf:
    """A URDF as version 1.0, whose continuous joints are revolute joints with very wide limits."""

    path: Path
    text: str  # the XML, for Pinocchio
    links: tuple[str, ...]
    joints: tuple[UrdfJoint, ...]

    @property
    def root(self) -> str:
        """The link that is not the child of any joint."""
        children = {joint.child for joint in self.joints}
        return next(link for link in self.links if link not in children)

    def chain(self, base: str, tip: str) -> tuple[UrdfJoint, ...]:
        """Return the joints from ``base`` to ``tip``; raises ConfigError if they are not connected."""
        above = {joint.child: joint for joint in self.joints}
        joints: list[UrdfJoint] = []
        link = tip
        while link != base:
            if link not in above:
                raise ConfigError(
                    f"robot.tip_frame: link '{tip}' is not connected to robot.base_frame '{base}' in {self.path}"
                )
            joints.append(above[link])
            link = above[link].parent
        return tuple(reversed(joints))

    def tip_of(self, link: str) -> str:
        """Return the last link fixed to ``link``, or ``link``; raises ConfigError if there are several."""
        rigid = self._fixed_to(link)
        ends = [each for each in rigid if not self._fixed_to(each)[1:]]
        if len(ends) > 1:
            raise ConfigError(
                f"robot.tip_frame: not set, and {self.path} has several links at the end of the arm: "
                f"{sorted(ends)}; name the link that the policy moves"
            )
        return ends[0]

    def serial_end(self, base: str) -> str:
        """Return the last link of the unbranched chain of movable joints below ``base``."""
        rigid = self._fixed_to(base)
        below = [joint.child for joint in self.joints if joint.is_movable and joint.parent in rigid]
        return self.serial_end(below[0]) if len(below) == 1 else base

    def _fixed_to(self, link: str) -> list[str]:
        """Return ``link`` and all links below it that do not move relative to it."""
        links = [link]
        for current in links:  # ``links`` grows during the loop
            below = [joint.child for joint in self.joints if joint.parent == current and not joint.is_movable]
            links += [child for child in below if child not in links]
        return links


def resolve(urdf: str) -> Path:
    """Return the file that ``robot.urdf`` names; the demo names stand for the simulation's arm."""
    if urdf in (DEMO, DEMO_TWO_ARMS):
        return Path(__file__).resolve().parent.parent / "sim" / "assets" / "arm.urdf"
    return Path(urdf).expanduser()


def read_urdf(urdf: str) -> Urdf:
    """Read the URDF that ``robot.urdf`` names; raises ConfigError if the file is not a URDF."""
    path = resolve(urdf)
    try:
        root = ElementTree.fromstring(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"robot.urdf: {path} cannot be read ({error.strerror})") from None
    except ElementTree.ParseError as error:
        raise ConfigError(f"robot.urdf: {path} is not XML ({error})") from None
    if any(str(element.tag).startswith("{http://www.ros.org/wiki/xacro}") for element in root.iter()):
        raise ConfigError(
            f"robot.urdf: {path} is a xacro file, expected a URDF; run `xacro {path.name} > arm.urdf`"
        )
    if urdf == DEMO_TWO_ARMS:
        root = _on_a_table(root)
    _write_as_1_0(root, path)
    joints = []
    for element in root.findall("joint"):
        parent, child = element.find("parent"), element.find("child")
        if parent is None or child is None:
            raise ConfigError(f"robot.urdf: joint '{element.get('name')}' in {path} has no parent or no child")
        kind = element.get("type", "")
        joints.append(UrdfJoint(element.get("name", ""), kind, parent.get("link", ""), child.get("link", "")))
        if kind == "continuous":
            _bound(element)
    links = tuple(element.get("name", "") for element in root.findall("link"))
    if root.tag != "robot" or not joints:
        raise ConfigError(f"robot.urdf: {path} contains <{root.tag}> with {len(joints)} joints, expected a robot")
    return Urdf(path, ElementTree.tostring(root, encoding="unicode"), links, tuple(joints))


def _on_a_table(arm: ElementTree.Element) -> ElementTree.Element:
    """Return a robot with two copies of ``arm``, whose names begin with ``left_`` and ``right_``."""
    table = ElementTree.Element("robot", name="vla_ros_two_arms")
    table.extend(arm.findall("material"))
    ElementTree.SubElement(table, "link", name="table")
    for name, place in DEMO_MOUNTS.items():
        copy = deepcopy(arm)
        for tag, attribute in (
            ("link", "name"),
            ("joint", "name"),
            ("joint/parent", "link"),
            ("joint/child", "link"),
        ):
            for element in copy.findall(tag):
                element.set(attribute, f"{name}_{element.get(attribute)}")
        table.extend(element for element in copy if element.tag in ("link", "joint"))
        mount = ElementTree.SubElement(table, "joint", name=f"{name}_mount", type="fixed")
        ElementTree.SubElement(mount, "parent", link="table")
        ElementTree.SubElement(mount, "child", link=f"{name}_base_link")
        ElementTree.SubElement(mount, "origin", xyz=" ".join(map(str, place)))
    return table


def _write_as_1_0(root: ElementTree.Element, path: Path) -> None:
    """Write quaternions, new in URDF 1.1, as angles: older Pinocchios refuse version 1.1 or turn nothing."""
    version = root.attrib.pop("version", "1.0")
    for origin in root.iter("origin"):
        text = origin.attrib.pop("quat_xyzw", None)
        if text is None:
            continue
        found = f'robot.urdf: {path} has an origin with quat_xyzw="{text}"'
        if version in ("1", "1.0"):
            raise ConfigError(f'{found}, which ROS ignores in version 1.0; expected <robot version="1.1"> or newer')
        if "rpy" in origin.attrib:
            raise ConfigError(f"{found} and rpy, expected one of the two")
        try:
            rotation = read_rotation(np.array(text.split(), np.float64), "quaternion_xyzw")
        except ValueError as error:
            raise ConfigError(f"{found}, which is no rotation ({error})") from None
        origin.set("rpy", " ".join(map(repr, write_rotation(rotation, "euler_xyz").tolist())))


def _bound(joint: ElementTree.Element) -> None:
    """Make a continuous joint revolute: Pinocchio uses two numbers for a continuous joint."""
    joint.set("type", "revolute")
    limit = joint.find("limit")
    if limit is None:
        limit = ElementTree.SubElement(joint, "limit", effort="0", velocity="0")
    limit.set("lower", str(-_UNBOUNDED))
    limit.set("upper", str(_UNBOUNDED))


def unknown_name(option: str, name: str, known: Collection[str], where: Path) -> ConfigError:
    """Return an error about a name that is not in the URDF ``where``, with the nearest of the names it has."""
    hint = did_you_mean(name, known, cutoff=0.4) or f"; it has {list(known)}"
    return ConfigError(f"{option}: found '{name}', which {where} does not have{hint}")
