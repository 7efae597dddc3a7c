"""The bodies of arms and their surroundings, and which pairs of them are checked."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.collision.geometry import Body, RobotGeometry, load_mesh, pieces_of, read_robot
from vla_ros.collision.shapes import Piece, library
from vla_ros.collision.tree import Tree, join, mounted
from vla_ros.config import ArmConfig, Config
from vla_ros.config.collision import Obstacle
from vla_ros.errors import ConfigError, did_you_mean, one_line
from vla_ros.files import read_bytes
from vla_ros.kinematics.rotations import euler_xyz_matrix, transform
from vla_ros.kinematics.solver import Kinematics
from vla_ros.types import FloatArray

_MOST_BYTES = 4 << 20  # of an SRDF
_SAMPLES = 300  # configurations
_NEAR = "vla_ros_near"  # an element that other readers of an SRDF skip


@dataclass(frozen=True, eq=False)
class World:
    """Bodies that move with the frames of a tree, and the pairs of them that are checked."""

    tree: Tree
    bodies: tuple[Body, ...]
    pairs: tuple[tuple[int, int], ...]  # indices in ``bodies``, the smaller one first
    links: Mapping[str, tuple[int, FloatArray]]  # frame, and place [4, 4] in it
    joints: Mapping[str, Mapping[str, int]]  # of each arm: the joints of its URDF, in the tree
    reach: FloatArray  # [J], how far anything that a joint moves is from it, m
    unchecked: Mapping[tuple[str, str], str]  # pairs of links that are not checked, and why not
    near: Collection[tuple[str, str]]  # pairs that are near everywhere, so that they slow nothing
    notes: tuple[str, ...]  # what is not covered
    base: str  # link in whose frame obstacles are given


def make_world(config: Config, arms: Mapping[str, Kinematics]) -> World | None:
    """Return the world of the options, or None if no arm has a URDF.

    All pairs are checked but those that cannot move, neighbours and parts of a hand; see :func:`without`. Raises
    ConfigError if a URDF has no geometry, or anything in it or in the options cannot be read.
    """
    known = [arm for arm in config.arms if arm.name in arms]
    if not known:
        return None
    robots, joints = _robots(known, arms)
    notes = [f"arm '{arm.name}': it has no URDF" for arm in config.arms if arm.name not in arms]
    bodies, links = list[Body](), dict[str, tuple[int, FloatArray]]()
    why, start = dict[tuple[str, str], str](), 0
    for robot in robots:
        if not robot.bodies:
            raise ConfigError(
                f"collision.check: {known[0].robot.urdf} has neither collision nor visual elements; use the "
                "robot's full description, or set collision.check to false"
            )
        bodies += [replace(body, frame=body.frame + start if body.frame else 0) for body in robot.bodies]
        links |= {name: (frame + start if frame else 0, place) for name, (frame, place) in robot.links.items()}
        why |= {named(*pair): "neighbours" for pair in robot.neighbours}
        start += len(robot.tree.names)
        if robot.bare:
            notes.append(f"links without geometry: {', '.join(robot.bare)}")
    fitted = [body.name for body in bodies if body.is_fitted]
    if fitted:
        notes.append(
            f"capsules around the visual elements of links without collision elements: {', '.join(fitted)}"
        )
    tree = join([robot.tree for robot in robots])
    hands = {
        arm.name: _hand(tree, [joints[arm.name][name] for name in arms[arm.name].joint_names]) for arm in known
    }
    for palm, fingers in hands.values():
        own = [body.name for body in bodies if body.frame in (palm, *fingers)]
        why |= {named(*pair): "parts of a hand" for pair in combinations(own, 2)}
    tips = {frame for _, fingers in hands.values() for frame in fingers}
    bodies = [replace(body, is_tip=body.frame in tips) for body in bodies]
    commanded = {
        joints[arm.name][name]
        for arm in known
        for name in (*arms[arm.name].joint_names, *arm.measured_fingers)
        if name in joints[arm.name]
    }
    free = [name for index, name in enumerate(tree.names) if index not in {*tree.mimics, *commanded}]
    if free:
        notes.append(f"joints that are at 0 unless joint states name them: {', '.join(free)}")
    if config.collision.parsed_held is not None:
        for arm in known:
            prefix = f"{arm.name}/" if f"{arm.name}/{arms[arm.name].tip_frame}" in links else ""
            frame, place = links[prefix + arms[arm.name].tip_frame]
            pieces = _shaped(config.collision.parsed_held, place)
            held = Body(f"{prefix}held", frame, pieces, is_tip=True, held_by=arm.name)
            palm, fingers = hands[arm.name]
            own = [body.name for body in bodies if body.frame in (palm, *fingers)]
            why |= {named(held.name, name): "holds it" for name in own}
            bodies.append(held)
    base = known[0].robot.base_frame
    world = World(
        tree, tuple(bodies), (), links, joints, _reach(tree, bodies), why, (), tuple(notes), base * (base in links)
    )
    world = replace(world, pairs=tuple(_pairs(world, 0)))
    return with_bodies(world, [obstacle_body(world, each) for each in config.collision.parsed_obstacles])


def with_bodies(world: World, bodies: Sequence[Body]) -> World:
    """Return ``world`` with further bodies, which are checked against all that move otherwise."""
    start = len(world.bodies)
    grown = replace(world, bodies=(*world.bodies, *bodies))
    return replace(grown, pairs=(*world.pairs, *_pairs(grown, start)))


def without(world: World, pairs: Mapping[tuple[str, str], str], near: Collection[tuple[str, str]] = ()) -> World:
    """Return ``world`` without some pairs of bodies, and with others that are :attr:`World.near`.

    Pairs are :func:`named`.
    """
    names = [body.name for body in world.bodies]
    kept = tuple((i, j) for i, j in world.pairs if named(names[i], names[j]) not in pairs)
    return replace(world, pairs=kept, unchecked={**world.unchecked, **pairs}, near=near)


def read_srdf(path: Path) -> tuple[dict[tuple[str, str], str], set[tuple[str, str]]]:
    """Return the pairs of ``disable_collisions`` in an SRDF with their reasons, and :attr:`World.near`."""
    try:
        root = ElementTree.fromstring(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"collision.srdf: {path} cannot be read ({error.strerror})") from None
    except ElementTree.ParseError as error:
        raise ConfigError(f"collision.srdf: {path} is not XML ({error})") from None
    if root.tag != "robot":
        raise ConfigError(f"collision.srdf: {path} contains <{root.tag}>, expected <robot>")
    unchecked, near = dict[tuple[str, str], str](), set[tuple[str, str]]()
    for each in root:
        name = named(each.get("link1", ""), each.get("link2", ""))
        if each.tag == "disable_collisions":
            unchecked[name] = each.get("reason", "SRDF")
        elif each.tag == _NEAR:
            near.add(name)
    return unchecked, near


def write_srdf(world: World) -> str:
    """Return the pairs that are not checked as an SRDF, with those of :attr:`World.near`."""
    root = ElementTree.Element("robot", name="vla_ros")
    for (first, second), why in sorted(world.unchecked.items()):
        ElementTree.SubElement(root, "disable_collisions", link1=first, link2=second, reason=why)
    for first, second in sorted(world.near):
        ElementTree.SubElement(root, _NEAR, link1=first, link2=second)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def named(first: str, second: str) -> tuple[str, str]:
    """Return a pair's two names in alphabetical order."""
    return (first, second) if first < second else (second, first)


def _robots(
    arms: Sequence[ArmConfig], chains: Mapping[str, Kinematics]
) -> tuple[list[RobotGeometry], dict[str, dict[str, int]]]:
    """Read one URDF with all arms, or one for each arm; return each arm's joints in the joined tree as well."""
    names = [name for arm in arms for name in chains[arm.name].joint_names]
    together = len(set(names)) == len(names) and len({arm.robot.urdf for arm in arms}) == 1
    lacking = [arm.name for arm in arms if not arm.mount]
    if not together and lacking:
        raise ConfigError(
            f"collision.mount: not set for {', '.join(lacking)}; each arm has its own URDF, so say where its root "
            "is, such as left.mount: [0, 0.3, 0, 0, 0, 0]: the arms are checked against each other"
        )
    robots, joints, start = list[RobotGeometry](), dict[str, dict[str, int]](), 0
    for arm in arms[:1] if together else arms:
        prefix = "" if together else f"{arm.name}/"
        robot = read_robot(arm.robot.urdf, prefix)
        if arm.mount:
            robot = _mounted(robot, transform(euler_xyz_matrix(np.array(arm.mount[3:])), np.array(arm.mount[:3])))
        own = {name.removeprefix(prefix): start + index for index, name in enumerate(robot.tree.names)}
        joints |= {other.name: own for other in (arms if together else [arm])}
        start += len(robot.tree.names)
        robots.append(robot)
    return robots, joints


def _mounted(robot: RobotGeometry, mount: FloatArray) -> RobotGeometry:
    bodies = [
        body if body.frame else replace(body, pieces=tuple(piece.moved(mount) for piece in body.pieces))
        for body in robot.bodies
    ]
    links = {name: (frame, place if frame else mount @ place) for name, (frame, place) in robot.links.items()}
    return replace(robot, tree=mounted(robot.tree, mount), bodies=tuple(bodies), links=links)


def _hand(tree: Tree, arm: Sequence[int]) -> tuple[int, set[int]]:
    """Return the frame of the palm, which the last joint of an arm moves, and the frames beyond it."""
    palm = 1 + max(arm, key=lambda joint: len(tree.ancestors(joint + 1)))
    return palm, {frame for frame in range(1, len(tree.names) + 1) if palm - 1 in tree.ancestors(frame)[1:]}


def _pairs(world: World, start: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs that are checked, at least one of each from ``start`` on."""
    for i, j in combinations(range(len(world.bodies)), 2):
        first, second = world.bodies[i], world.bodies[j]
        if j >= start and first.frame != second.frame and named(first.name, second.name) not in world.unchecked:
            yield i, j


def _reach(tree: Tree, bodies: Sequence[Body]) -> FloatArray:
    """Return how far things that each joint moves are from it at most, [J]; 1 for prismatic joints."""
    rng = np.random.default_rng(0)
    low, high = np.maximum(tree.low, -np.pi), np.minimum(tree.high, np.pi)
    at = tree.forward(tree.follow(rng.uniform(low, high, (_SAMPLES, len(tree.names)))))
    found = np.where(tree.motions[3].any(axis=(1, 2, 3)), 1.0, 0.0)
    for body in bodies:
        for piece in body.pieces:
            centre = at[body.frame] @ piece.place[:, 3]
            for joint in tree.ancestors(body.frame):
                if not tree.motions[3, joint].any():
                    apart = np.linalg.norm(centre[:, :3] - at[joint + 1, :, :3, 3], axis=1)
                    found[joint] = max(found[joint], float(apart.max()) + piece.radius)
    return found


def obstacle_body(world: World, obstacle: Obstacle) -> Body:
    """Return the body of an obstacle; raises ConfigError if its frame is unknown or its mesh cannot be read."""
    frame, place = link_of(world, obstacle.frame or world.base, f"collision.obstacles: {obstacle.name}")
    pieces = _shaped(obstacle, place)
    return Body(obstacle.name, frame, pieces, is_scene=True, is_support=obstacle.is_support)


def _shaped(obstacle: Obstacle, place: FloatArray) -> tuple[Piece, ...]:
    at = transform(euler_xyz_matrix(np.array(obstacle.angles)), np.array(obstacle.position))
    return tuple(pieces_of(_shape(obstacle), place @ at))


def link_of(world: World, link: str, what: str) -> tuple[int, FloatArray]:
    """Return the frame of a link and its place in it; "" is the root."""
    if not link:
        return 0, np.eye(4)
    if link not in world.links:
        hint = did_you_mean(link, world.links) or f"; expected one of {', '.join(world.links)}"
        raise ConfigError(f"{what}: found the frame '{one_line(link)}', which is no link{hint}")
    return world.links[link]


def _shape(obstacle: Obstacle) -> Any:
    fcl, size = library(), obstacle.size
    if obstacle.kind == "mesh":
        return load_mesh(Path(obstacle.file).expanduser(), [1.0, 1.0, 1.0])
    if obstacle.kind == "plane":
        return fcl.Halfspace(np.array([0.0, 0.0, 1.0]), 0.0)
    if obstacle.kind == "box":
        return fcl.Box(np.array(size))
    return fcl.Sphere(size[0]) if obstacle.kind == "sphere" else fcl.Cylinder(size[0], size[1])
