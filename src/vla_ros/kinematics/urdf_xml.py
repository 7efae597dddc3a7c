"""Reads the XML of a URDF as ROS's parser (urdfdom) does, and refuses what it would read as something else.

Namespaces do not matter: a prefix need not be declared (``drake:``, ``gazebo:``), and what has one is left out.
"""

import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from xml.parsers import expat

from vla_ros.errors import ConfigError
from vla_ros.files import read_bytes

Element = ElementTree.Element

_MOST_BYTES = 16 << 20
_MOST_LINKS = 3000  # Pinocchio's parser takes quadratic time, and a level of the stack for each link
_DEEPEST = 100
_KINDS = ("revolute", "prismatic", "continuous", "fixed", "floating", "planar")
_XACRO_TAGS = ("include", "macro")  # as in files from before xacro had a namespace
_NUMBERS = {
    "origin": {"xyz": 3, "rpy": 3},
    "axis": {"xyz": 3},
    "limit": {"lower": 1, "upper": 1, "velocity": 1, "effort": 1},
    "mimic": {"multiplier": 1, "offset": 1},
}
"""Attributes of a joint's elements that are numbers, and how many."""


def read_xml(path: Path) -> Element:
    """Return the root of a URDF; raises ConfigError if it is not XML, a xacro file or not a tree of links."""
    try:
        root = _parse(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"robot.urdf: {path} cannot be read ({error.strerror}), expected a URDF file") from None
    except (expat.ExpatError, ValueError) as error:
        raise ConfigError(f"robot.urdf: {path} is not XML ({error})") from None
    if _is_xacro(root):
        raise ConfigError(
            f"robot.urdf: {path} is a xacro file, expected a URDF; run `xacro {path.name} > arm.urdf`"
        )
    _remove_prefixed(root)
    count = len(root.findall("joint"))
    part = "; a xacro file may be a part of another: run `xacro` on the whole" if path.suffix == ".xacro" else ""
    if root.tag != "robot" or not count:
        raise ConfigError(f"robot.urdf: {path} contains <{root.tag}> with {count} joints, expected a robot{part}")
    for wrong in chain(_wrong_names(root), _wrong_tree(root), _wrong_numbers(root)):  # the first one
        raise ConfigError(f"robot.urdf: {path}: {wrong}{part}")
    return root


def _parse(content: bytes) -> Element:
    """Parse XML without namespaces; raises ExpatError or ValueError."""
    builder, parser, depth = ElementTree.TreeBuilder(), expat.ParserCreate(), 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"elements are nested more than {_DEEPEST} deep: line {parser.CurrentLineNumber}")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.Parse(content.lstrip(), True)
    root: Element = builder.close()
    return root


def _is_xacro(root: Element) -> bool:
    """Return True if ``xacro`` must process a file: it has its elements, or expressions for names and numbers."""
    prefixes = {"xacro"}
    for element in root.iter():
        prefixes |= {key[6:] for key, value in element.items() if key.startswith("xmlns:") and "xacro" in value}
    if any(element.tag in _XACRO_TAGS for element in root):
        return True
    if any(element.tag.partition(":")[0] in prefixes for element in root.iter() if ":" in element.tag):
        return True
    parts = (part for tag in ("link", "joint") for each in root.iter(tag) for part in (each, *each))
    return any(sign in value for part in parts for value in part.attrib.values() for sign in ("${", "$("))


def _remove_prefixed(root: Element) -> None:
    for element in list(root.iter()):
        element.attrib = {key: value for key, value in element.attrib.items() if ":" not in key}
        element[:] = [child for child in element if ":" not in child.tag]


def end_of(joint: Element, which: str) -> str:
    """Return a joint's ``parent`` or ``child`` link, or ""."""
    end = joint.find(which)
    return "" if end is None else end.get("link", "")


def _wrong_names(root: Element) -> Iterator[str]:
    links, joints = ([each.get("name", "") for each in root.findall(tag)] for tag in ("link", "joint"))
    if len(links) > _MOST_LINKS:
        yield f"found {len(links)} links, expected at most {_MOST_LINKS}"
    for what, names in (("link", links), ("joint", joints)):
        for name, times in Counter(names).items():
            if not name:
                yield f"a {what} has no name"
            elif times > 1:
                yield f"found {times} {what}s with the name '{name}', expected each once"
    known = set(links)
    for joint in root.findall("joint"):
        name, kind = joint.get("name", ""), joint.get("type", "")
        ends = {which: end_of(joint, which) for which in ("parent", "child")}
        if not all(ends.values()):
            yield f"joint '{name}' has no parent or no child link"
        if kind not in _KINDS:
            yield f"joint '{name}' has the type '{kind}', expected one of {', '.join(_KINDS)}"
        for which, link in ends.items():
            if link not in known:
                yield (
                    f"joint '{name}' has the {which} link '{link}', which is not defined; add "
                    f'<link name="{link}"/>, or pass the whole description instead of a part'
                )


def _wrong_tree(root: Element) -> Iterator[str]:
    """Yield why links and joints are not a tree: ROS's parser would refuse them, or never end."""
    above: dict[str, Element] = {}
    for joint in root.findall("joint"):
        child = end_of(joint, "child")
        if other := above.setdefault(child, joint).get("name") if child in above else "":
            yield f"link '{child}' is the child of the joints '{other}' and '{joint.get('name')}', expected one"
        above[child] = joint
    tops = [name for link in root.findall("link") if (name := link.get("name", "")) not in above]
    reached, cycle = set(tops), _cycle(above, set(tops))
    if cycle:
        yield f"the joints {listed(cycle)} form a cycle, expected a tree of links"
    if len(tops) > 1 and reached:
        yield f"found the root links {listed(tops)}, expected one; connect them by joints"


def _cycle(above: dict[str, Element], reached: set[str]) -> list[str]:
    """Return the joints of a cycle; ``above`` maps links to the joints that they are the child of."""
    for start in above:
        way: dict[str, str] = {}  # link to the joint above it
        link = start
        while link not in reached and link not in way:
            way[link] = above[link].get("name", "")
            link = end_of(above[link], "parent")
        if link in way:
            links = list(way)
            return [way[each] for each in links[links.index(link) :]]
        reached.update(way)
    return []


def _wrong_numbers(root: Element) -> Iterator[str]:
    for joint in root.findall("joint"):
        name, moves = joint.get("name"), joint.get("type") not in ("fixed", "floating")
        for element in joint:
            for key, count in _NUMBERS.get(element.tag, {}).items():
                text = element.get(key)
                if text is None:
                    continue
                values = _numbers(text)
                if len(values) != count:
                    expected = "a finite number" if count == 1 else f"{count} finite numbers"
                    yield f"joint '{name}' has {element.tag} {key}=\"{text[:80]}\", expected {expected}"
                elif element.tag == "axis" and moves and not any(values):
                    yield f"joint '{name}' has the axis {text[:80]}, which is no direction"
        limit = joint.find("limit")
        if limit is not None and joint.get("type") in ("revolute", "prismatic"):
            low, high = (_numbers(limit.get(key, "0"))[0] for key in ("lower", "upper"))
            if low > high:
                yield f"joint '{name}' has the limits {low:g} to {high:g}, expected lower below upper"
        mimic = joint.find("mimic")
        if mimic is not None and not mimic.get("joint"):
            yield f"joint '{name}' mimics no joint; expected <mimic joint=\"NAME\"/>"


def _numbers(text: str) -> list[float]:
    """Return the numbers of an attribute, or [] if one is not finite."""
    try:
        values = [] if "_" in text else [float(word) for word in text.split()]  # Python alone reads 1_000
    except ValueError:
        return []
    return values if all(map(math.isfinite, values)) else []


def listed(names: Collection[str]) -> str:
    """Return names as text, at most twelve of them."""
    shown = ", ".join(f"'{name}'" for name in list(names)[:12])
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown
