"""The section ``collision``: what an arm must not touch, and how near it may come."""

import re
from dataclasses import dataclass

from vla_ros.config.options import option
from vla_ros.config.sections import NUMBER

SIZES = {"plane": 0, "box": 3, "cylinder": 2, "sphere": 1, "mesh": 0}
"""Kinds of obstacles, with how many numbers give their size."""
_SHAPE = (
    r"(?P<kind>plane|box|cylinder|sphere|mesh)(?:\s+(?P<rest>(?!at\s|in\s|support$).*?))?"
    rf"(?:\s+at\s+(?P<at>{NUMBER}(?:\s+{NUMBER})*))?(?:\s+in\s+(?P<frame>\S+))?(?P<support>\s+support)?"
)
_OBSTACLE = re.compile(rf"(?P<name>[\w-]+)\s*=\s*{_SHAPE}")
_HELD = re.compile(_SHAPE)
FORM = (
    "NAME = box X Y Z | cylinder RADIUS LENGTH | sphere RADIUS | plane | mesh FILE [at X Y Z [R P Y]] [in LINK] "
    "[support]"
)


@dataclass(frozen=True)
class Obstacle:
    """A solid that does not belong to the robot, or that its gripper holds, placed in the frame of a link."""

    name: str
    kind: str  # a key of :data:`SIZES`
    size: tuple[float, ...]  # m; a box's edges, a cylinder's radius and length (along z), a sphere's radius
    file: str  # of a mesh
    position: tuple[float, ...]  # x, y, z, m; a plane's surface, beyond which everything is solid
    angles: tuple[float, ...]  # roll, pitch, yaw about fixed axes, rad; a plane's z axis points out of it
    frame: str  # link; "" for the robot's base
    is_support: bool  # True for a surface that fingertips may come near


def read_obstacle(text: str, name: str = "") -> Obstacle | None:
    """Read an obstacle of the form :data:`FORM`, without ``NAME =`` if a name is given; None if invalid."""
    found = (_HELD if name else _OBSTACLE).fullmatch(text.strip())
    if found is None:
        return None
    kind, rest, at = (
        found["kind"],
        (found["rest"] or "").strip(),
        [float(each) for each in (found["at"] or "").split()],
    )
    if kind == "mesh":
        size: tuple[float, ...] = ()
    else:
        try:
            size, rest = tuple(map(float, rest.split())), ""
        except ValueError:
            return None
    known = len(size) == SIZES[kind] and all(each > 0 for each in size) and (kind != "mesh") == (not rest)
    if not known or len(at) not in (0, 3, 6):
        return None
    at += [0.0] * (6 - len(at))
    named = name or found["name"]
    return Obstacle(
        named, kind, size, rest, tuple(at[:3]), tuple(at[3:]), found["frame"] or "", bool(found["support"])
    )


@dataclass(frozen=True)
class CollisionConfig:
    """Whether commands are checked for collisions, and how near bodies may come; see docs/collisions.md."""

    check: bool = option(
        False, "true: no command is sent that would bring the arm too near itself, another arm or an obstacle"
    )
    deceleration: float = option(
        0.0,
        "How fast each joint can stop; required by check. What remains of a motion until then is checked as well",
        "rad/s^2 or m/s^2",
        0,
        1000,
        live=True,
    )
    hold_distance: float = option(0.01, "Two bodies nearer than this: hold", "m", 0, 1, live=True)
    slow_distance: float = option(
        0.05, "Two bodies nearer than this that approach: slower, down to a tenth", "m", 0, 2, live=True
    )
    support_distance: float = option(
        0.002,
        "As hold_distance, for fingertips and held objects at a surface that is a support",
        "m",
        0,
        1,
        live=True,
    )
    srdf: str = option(
        "", "SRDF whose disable_collisions name the pairs that are not checked; empty: found by sampling at start"
    )
    obstacles: tuple[str, ...] = option((), f"What stands around the robot, each as {FORM}")
    held: str = option(
        "", "What the gripper holds while it is closed, as an obstacle without NAME, in the frame of the tip"
    )
    scene: str = option("", "In: visualization_msgs/MarkerArray of obstacles that move; empty: none")
    scene_meshes: tuple[str, ...] = option(
        (),
        "Meshes that markers of the scene may name, as their mesh_resource; a file that changes is read again. Any "
        "other mesh is an obstacle of unknown shape, which holds the arm",
    )
    scene_required: bool = option(
        False, "true: without a scene, or with one older than scene_timeout, the arm holds", live=True
    )
    scene_timeout: float = option(1.0, "A scene older than this is stale", "s", 0.01, 3600, live=True)
    mount: tuple[float, ...] = option(
        (),
        "With several arms of the same URDF: where each arm's root is, as x, y, z and roll, pitch, yaw",
        "m and rad",
        -100,
        100,
        length=(0, 6),
    )

    @property
    def parsed_obstacles(self) -> tuple[Obstacle, ...]:
        """``obstacles``; those that cannot be read are left out."""
        return tuple(filter(None, map(read_obstacle, self.obstacles)))

    @property
    def parsed_held(self) -> Obstacle | None:
        """``held``; None if it is empty or cannot be read."""
        return read_obstacle(self.held, "held") if self.held else None
