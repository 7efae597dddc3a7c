"""Reads the links and joints of a URDF, and finds the chain from base to tip."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from vla_ros.errors import ConfigError, did_you_mean
from vla_ros.kinematics.rotations import read_rotation, write_rotation
from vla_ros.kinematics.urdf_xml import end_of, listed, read_xml

DEMO, DEMO_TWO_ARMS = "demo", "demo_two_arms"
DEMO_MOUNTS = {"left": (0.0, 0.3, 0.0), "right": (0.0, -0.3, 0.0)}
"""Where ``demo_two_arms`` mounts its arms on the link ``table``, metres; both face +x."""
MOVABLE = ("revolute", "prismatic", "continuous")
_UNBOUNDED = 1e6  # rad; limit of a continuous joint


@dataclass(frozen=True)
class Mimic:
    """A joint that follows another: ``position = scale * leader + offset``."""

    leader: str
    scale: float
    offset: float


@dataclass(frozen=True)
class UrdfJoint:
    """One joint of a URDF."""

    name: str
    kind: str
    parent: str
    child: str
    mimic: Mimic | None = None  # the joint that it follows, which follows no other; None if it moves by itself

    @property
    def is_movable(self) -> bool:
        return self.kind in MOVABLE


@dataclass(frozen=True)
class Urdf:
    """A URDF as version 1.0, whose continuous joints are revolute joints with very wide limits."""

    path: Path
    text: str  # the XML, for Pinocchio
    links: tuple[str, ...]
    joints: tuple[UrdfJoint, ...]
    elements: Mapping[str, ElementTree.Element] = field(repr=False)  # the XML of each joint, by its name

    @cached_property
    def _below(self) -> Mapping[str, Sequence[UrdfJoint]]:
        """The joints of which each link is the parent."""
        found: dict[str, list[UrdfJoint]] = {}
        for joint in self.joints:
            found.setdefault(joint.parent, []).append(joint)
        return found

    @cached_property
    def _named(self) -> Mapping[str, UrdfJoint]:
        return {joint.name: joint for joint in self.joints}

    def joint(self, name: str) -> UrdfJoint | None:
        """Return the joint of that name, or None."""
        return self._named.get(name)

    def has(self, name: str) -> bool:
        """Return True if a joint of that name can move."""
        joint = self._named.get(name)
        return joint is not None and joint.is_movable

    def movable_below(self, link: str) -> list[str]:
        """Return the names of the joints that can move below a link."""
        links, found = [link], list[str]()
        for current in links:  # ``links`` grows during the loop
            for joint in self._below.get(current, ()):
                links.append(joint.child)
                found += [joint.name] if joint.is_movable else []
        return found

    def limits(self, name: str) -> tuple[float, float, float]:
        """Return the lowest and highest position and the speed of a joint, each 0 if the URDF does not state it."""
        limit = self.elements[name].find("limit")
        low, high, speed = (
            float("0" if limit is None else limit.get(key, "0")) for key in ("lower", "upper", "velocity")
        )
        return low, high, speed

    def part(self, base: str, tip: str) -> str:
        """Return the XML of the chain of joints from ``base`` to ``tip`` alone, without geometry and masses."""
        robot = ElementTree.Element("robot", name="chain")
        ElementTree.SubElement(robot, "link", name=base)
        for joint in self.chain(base, tip):
            ElementTree.SubElement(robot, "link", name=joint.child)
            copy = ElementTree.SubElement(robot, "joint", name=joint.name)
            copy.set("type", self.elements[joint.name].get("type", "") if joint.is_movable else "fixed")
            kept = ("origin", "parent", "child", *(("axis", "limit") if joint.is_movable else ()))
            copy.extend(deepcopy(each) for each in self.elements[joint.name] if each.tag in kept)
            limit = copy.find("limit")
            if limit is not None:
                limit.attrib = {"effort": "0", "velocity": "0", **limit.attrib}  # required, but not used
        return ElementTree.tostring(robot, encoding="unicode")

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
        ends = [each for each in rigid if all(joint.is_movable for joint in self._below.get(each, ()))]
        if len(ends) > 1:
            raise ConfigError(
                f"robot.tip_frame: not set, and {self.path} has several links at the end of the arm: "
                f"[{listed(sorted(ends))}]; name the link that the policy moves"
            )
        return ends[0]

    def serial_end(self, base: str) -> str:
        """Return the last link of the unbranched chain of movable joints below ``base``: where it ends or branches.

        It is ``base`` itself if no joint, or several, move below it; a gripper with two fingers is a branch.
        """
        link = base
        while True:
            rigid = self._fixed_to(link)
            below = [joint for each in rigid for joint in self._below.get(each, ()) if joint.is_movable]
            if len(below) != 1:
                return link
            link = below[0].child

    def _fixed_to(self, link: str) -> list[str]:
        """Return ``link`` and all links below it that do not move relative to it."""
        links = [link]
        for current in links:  # ``links`` grows during the loop
            links += [joint.child for joint in self._below.get(current, ()) if not joint.is_movable]
        return links


def resolve(urdf: str) -> Path:
    """Return the file that ``robot.urdf`` names; the demo names stand for the simulation's arm."""
    if urdf in (DEMO, DEMO_TWO_ARMS):
        return Path(__file__).resolve().with_name("demo_arm.urdf")
    return Path(urdf).expanduser()


def read_urdf(urdf: str) -> Urdf:
    """Read the URDF that ``robot.urdf`` names; raises ConfigError if the file is not a URDF."""
    path = resolve(urdf)
    root = read_xml(path)
    if urdf == DEMO_TWO_ARMS:
        root = _on_a_table(root)
    _write_as_1_0(root, path)
    elements, leaders, joints = {}, _leaders(root), []
    for element in root.findall("joint"):
        name, kind = element.get("name", ""), element.get("type", "")
        ends = end_of(element, "parent"), end_of(element, "child")
        joints.append(UrdfJoint(name, kind, *ends, leaders.get(name)))
        elements[name] = element
        if kind == "continuous":
            _bound(element)
    links = tuple(element.get("name", "") for element in root.findall("link"))
    return Urdf(path, ElementTree.tostring(root, encoding="unicode"), links, tuple(joints), elements)


def _leaders(root: ElementTree.Element) -> dict[str, Mimic]:
    """Return what each mimic joint follows; a joint that follows a mimic joint follows that one's leader.

    The leader of joints that follow each other is one of them. It may be a joint that does not exist.
    """
    direct = {
        joint.get("name", ""): Mimic(
            each.get("joint", ""), float(each.get("multiplier", "1")), float(each.get("offset", "0"))
        )
        for joint in root.findall("joint")
        if (each := joint.find("mimic")) is not None and joint.get("type") in MOVABLE
    }
    found: dict[str, Mimic] = {}
    for name, mimic in direct.items():
        seen = {name}
        while mimic.leader in direct and mimic.leader not in seen:
            seen.add(mimic.leader)
            upper, scale = direct[mimic.leader], mimic.scale
            mimic = Mimic(upper.leader, scale * upper.scale, scale * upper.offset + mimic.offset)
        found[name] = mimic
    return found


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
    hint = did_you_mean(name, known) or f"; it has [{listed(known)}]"
    return ConfigError(f"{option}: found '{name}', which {where} does not have{hint}")
